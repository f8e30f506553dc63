"""How far grouping ops into units shrinks the search problem, and what it costs against deciding op by op.

    python benchmarks/units.py [MODEL] [--mesh dp=8,tp=8] [--batch 16] [--seq 8192]
    python benchmarks/units.py --gain [MODEL ...] [--meshes a=8 a=2,b=4 a=2,b=2,c=2] [--batch 1] [--precision param=bf16,master=fp32,reduce=bf16]

`--gain` takes the models of models/ at real widths with few layers. "+" stands at gaps of a search that did not close. The columns: the best
plan over units; the same refined (decide/refine.py), what that gains and takes; and what the search op by op still gains from there in
`--prove` seconds. That is a harder problem, and its bound says what it gains at most; the search ends where that is `--enough`. Limits are CPU
seconds of this process, so that a busy machine gives the same table.
"""
from __future__ import annotations

import argparse
import importlib
import sys
import time
from dataclasses import replace
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # `models` lies beside this folder

from autoshard.base.mesh import parse_mesh
from autoshard.cli.read import parse_precision
from autoshard.cost.cluster import load_cluster
from autoshard.decide.how import How
from autoshard.decide.memory.attempts import search
from autoshard.decide.options import Options
from autoshard.decide.program import formulate_within, with_starts
from autoshard.decide.refine import SHARE, lifted, refine
from autoshard.decide.variants import Variants
from autoshard.formulate.problem_of import formulate
from autoshard.planner.one_stage import prices
from autoshard.program.load import load_model
from autoshard.program.trace import trace
from autoshard.search import Clock, solve
from autoshard.seeds.seeds import Seeds
from autoshard.space.cost_table import CostTable, Training, build_cost_table
from autoshard.space.decision_units import find_units, singletons
from autoshard.space.strategies import enumerate_strategies

WIDE = {"bert": ("base", {"layers": 2}), "dlrm": ("small", {}), "gpt": ("124M", {"layers": 2}), "llama": ("1B", {"layers": 2}),
        "mlp": ("wide", {}), "moe": ("small", {"layers": 2}), "resnet": ("18", {}), "t5": ("small", {"layers": 1}), "vit": ("b16", {"layers": 2})}


def gain(names: list[str], meshes: list[str], clusters: list[str], batch: int, policy: str | None, seconds: float, prove: float, enough: float) -> None:
    """A line per model, mesh and cluster: what units cost, what the refined plan costs, and what op by op costs and is bound by."""
    precision = parse_precision(policy) if policy else None
    for name in names:
        module, (size, shape) = importlib.import_module(f"models.{name}"), WIDE[name]
        with torch.device("meta"):
            model, inputs = module.build(size, batch=batch, **shape)
        traced = trace(model, inputs, loss_fn=module.loss, training=True, precision=precision)
        for mesh in meshes:
            for cluster in clusters:
                options = Options(cluster=cluster, precision=precision, time_limit=seconds)
                table = prices(traced, parse_mesh(mesh), options)
                print(f"{name:7} {mesh:12} {cluster:9} {gained(table, options, prove, enough)}", flush=True)


def gained(table: CostTable, options: Options, prove: float, enough: float) -> str:
    """Of one program: units, refined, and, for `prove` seconds from there, op by op."""
    program = with_starts(formulate_within(table, options.memory_limit(table.cluster)), options.settings(True, True))
    clock, before = Clock(options.time_limit, now=time.process_time), time.process_time()
    units = search(Variants(program, How(clock.part(1.0 - SHARE)))).solution
    spent, (refined, better) = time.process_time(), refine(program, units, How(clock))
    before, spent = spent - before, time.process_time() - spent
    said = (f"units {units.cost * 1e6:14.2f} us (gap {units.gap:.1e}{'+' * (units.gap > 1e-9)}, {before:5.1f} CPU s)  refined {better.cost * 1e6:14.2f} us: "
            f"{100 * (units.cost / better.cost - 1):5.2f} %, {spent:5.1f} CPU s")
    if not prove:
        return said
    finer = formulate_within(table, program.formulation.budget.limit, singletons(table))
    start = better.choice if refined is not program else lifted(program.formulation, units.choice, finer)
    bare = replace(finer.problem, groups=None)  # a bound is wanted, which equal layers tied do not give
    single = solve(bare, clock=Clock(prove, now=time.process_time), starts=[start], enough=enough)
    return (f"{said}  op by op {single.cost * 1e6:14.2f} us (gap {single.gap:.1e}{'+' * (single.gap > 1e-9)}): "
            f"{100 * (better.cost / single.cost - 1):5.2f} %, at most {100 * (better.cost / single.bound - 1):6.2f} %, "
            f"{single.seconds:5.1f} CPU s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", metavar="MODEL", help="llama:1b; with --gain, all of models/")
    parser.add_argument("--gain", action="store_true", help="what op by op would gain")
    parser.add_argument("--meshes", nargs="+", default=["a=8", "a=2,b=4", "a=2,b=2,c=2"])
    parser.add_argument("--clusters", nargs="+", default=["cpu-gloo", "h100-dgx"])
    parser.add_argument("--precision", help="a policy, such as param=bf16,master=fp32,reduce=bf16")
    parser.add_argument("--time-limit", type=float, default=60.0)
    parser.add_argument("--prove", type=float, default=60.0, help="seconds for the search op by op; 0: none")
    parser.add_argument("--enough", type=float, default=0.0, help="the relative gap at which the search op by op ends")
    parser.add_argument("--mesh", default="dp=8,tp=8")
    parser.add_argument("--batch", type=int, help="16; with --gain, 1")
    parser.add_argument("--seq", type=int, default=8192)
    parser.add_argument("--cluster", default="h100-dgx")
    args = parser.parse_args()
    if args.gain:
        gain(args.models or list(WIDE), args.meshes, args.clusters, args.batch or 1, args.precision, args.time_limit, args.prove, args.enough)
        return
    model = (args.models or ["llama:1b"])[0]
    spec = load_model(model, batch=args.batch or 16, seq=args.seq, dtype="bf16")
    traced = trace(spec.model, spec.example_inputs, spec.example_kwargs, loss_fn=spec.loss_fn)
    graph, mesh = traced.graph, parse_mesh(args.mesh)
    strategies = enumerate_strategies(graph, mesh, Seeds())
    table = build_cost_table(graph, mesh, load_cluster(args.cluster), strategies, Training())
    print(f"{model} on {mesh}: {len(graph.ops)} ops")
    for name, units in (("every op by itself", singletons(table)), ("units", find_units(table))):
        problem = formulate(table, units=units).problem
        print(f"{name:20} {len(units.units):7} deciders  {problem.n:7} nodes with copies  {len(problem.edges):7} edges  "
              f"{sum(map(len, problem.node_costs)):8} choices")


if __name__ == "__main__":
    main()
