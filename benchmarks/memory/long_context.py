"""Activation memory of a long sequence: what a rank keeps for backward, over its share of what one device would keep.

    python -m benchmarks.memory.long_context                                         # llama 8B, 1 x 131,072, on cp=64 and dp=8,tp=8
    python -m benchmarks.memory.long_context --mesh cp=64 --memory 32GiB             # with less room for copies
    python -m benchmarks.memory.long_context --mesh cp=8 --model llama:1b --seq 32768

bf16, AdamW, cluster h100-dgx. Columns, in GiB: what one device keeps between forward and backward, divided by the ranks; what a rank keeps in the
layout that made it, and that over the share; copies in other layouts that are kept since there is room (gathered keys, values and weights). Then
ops on activations that run whole on every rank.
"""
from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Iterator

from autoshard.base.graph import BACKWARD, Graph
from autoshard.base.mesh import parse_mesh
from autoshard.base.plan import Plan
from autoshard.base.spec import R
from autoshard.decide.backends import find
from autoshard.decide.how import How
from autoshard.decide.options import Options
from autoshard.decide.phase_timer import cpu_seconds
from autoshard.planner.one_stage import prices, program_of
from autoshard.play.play import Buffer
from autoshard.play.timeline import Timeline
from autoshard.program.load import load_model
from autoshard.program.trace import trace
from autoshard.rules import registry
from autoshard.search import Clock

GIB = 2**30
HEADER = "| mesh | step | gap | CPU s | share of one device | kept as made | over the share | kept copies | whole |\n" + "| --- " * 9 + "|"


def kept(played: Timeline) -> list[Buffer]:
    """Buffers that forward leaves for backward, stored tensors and inputs aside."""
    turn = next(t for t, (window, _) in enumerate(played.playback.times) if window == BACKWARD)
    return [b for b in played.playback.buffers if b.category == "saved" and b.born < turn < b.died]


def of_activations(graph: Graph) -> frozenset[str]:
    """Ops whose results depend on an input of the model."""
    found = {op.name for op in graph.of_kind("input", "tangent")}
    for op in graph.ops:
        if any(ref.op in found for ref in op.refs):
            found.add(op.name)
    return frozenset(found)


def whole(graph: Graph, plan: Plan, least: int) -> Iterator[str]:
    """Calls on activations that no mesh axis splits, neither their inputs nor their results, of at least so many elements. Views of gathered
    keys and values compute nothing."""
    moving = of_activations(graph)
    for op in graph.of_kind("call"):
        specs = (*plan.ops[op.name].inputs, *plan.ops[op.name].outputs)
        made = max((m.numel for m in op.outputs if m is not None), default=0)
        free = registry.rule_of(op.target).family.free
        if op.name in moving and not free and made >= least and all(p == R for spec in specs if spec is not None for p in spec):
            yield f"{op.target} in {op.module or 'the model'}"


def row(mesh: str, given: argparse.Namespace) -> str:
    start, spec = cpu_seconds(), load_model(given.model, batch=1, seq=given.seq, dtype="bf16")
    traced = trace(spec.model, spec.example_inputs, spec.example_kwargs, loss_fn=spec.loss_fn)
    options = Options(memory_budget=given.memory)
    program = program_of(prices(traced, parse_mesh(mesh), options), options, has_loss=True)
    found = find(program, How(Clock(given.seconds, now=time.process_time)))
    plan, took = found.plan(program.formulation.table, {}, {}), cpu_seconds() - start
    alone = program_of(prices(traced, parse_mesh("one=1"), options), options, has_loss=True)
    share = sum(b.nbytes for b in kept(alone.timelines(alone.starts[0]))) / parse_mesh(mesh).size
    graph = found.program.formulation.table.graph
    mine, copies = 0, Counter[str]()
    for b in kept(found.program.timelines(found.solution.choice)):
        own = plan.ops[b.held.ref.op].outputs[b.held.ref.index] == b.held.spec and graph.op(b.held.ref.op).kind == "call"
        mine += b.nbytes * own
        copies["weights" if b.held.ref.op not in of_activations(graph) else "activations"] += b.nbytes * (not own)
    texts = ", ".join(f"{n} x {name}" for name, n in Counter(whole(graph, plan, given.seq)).most_common(5)) or "none"
    return (f"| {mesh} | {1e3 * plan.objective_s:.1f} ms | {plan.gap:.2%} | {took:.0f} | {share / GIB:.2f} | {mine / GIB:.2f} | {mine / share:.3f} "
            f"| {', '.join(f'{n / GIB:.2f} of {what}' for what, n in copies.items() if n) or 'none'} | {texts} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mesh", nargs="+", default=["cp=64", "dp=8,tp=8"])
    parser.add_argument("--model", default="llama:8b")
    parser.add_argument("--seq", type=int, default=131072)
    parser.add_argument("--memory", help="budget of a rank, such as 32GiB; default: the cluster's")
    parser.add_argument("--seconds", type=float, default=60.0, help="of CPU, for each search")
    given = parser.parse_args()
    print(HEADER, flush=True)
    for mesh in given.mesh:
        print(row(mesh, given), flush=True)


if __name__ == "__main__":
    sys.exit(main())
