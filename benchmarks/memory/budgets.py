"""A model planned for less and less memory, each plan trained beside one process within its budget, as a table.

    python -m benchmarks.memory.budgets                                   # gpt on two processes, budgets from ample to minimal
    python -m benchmarks.memory.budgets --model llama --mesh dp=4 --steps 8

Plans are priced for --cluster and run on gloo processes: three steps in float64, losses, gradients and weights against one
process. Measured is the peak of live tensor storage of the fullest rank, as in benchmarks/memory/memory.py.
"""
from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

import autoshard
from autoshard.base.mesh import parse_mesh
from autoshard.base.plan import Plan
from autoshard.decide.options import Options
from autoshard.planner.one_stage import prices
from autoshard.program.trace import trace
from autoshard.study.sweep import Point, sweep
from tests.dist.harness import assert_same_training, on_ranks, twins
from tests.dist.live_bytes import step_peak

SIZES: dict[str, dict[str, Any]] = {
    "gpt": {"layers": 4, "width": 256, "heads": 8, "vocab": 1024, "context": 64},
    "llama": {"layers": 4, "width": 256, "heads": 8, "kv_heads": 4, "hidden": 512, "vocab": 1024, "context": 64},
}
STEPS = 3
TOLERANCE = 1e-9


@dataclass(frozen=True)
class Trained:
    """`measured`: bytes of the fullest rank; `failure`: how training differed, empty where it did not."""

    measured: float
    failure: str


def build(name: str, batch: int) -> tuple[torch.nn.Module, tuple[torch.Tensor, ...]]:
    return importlib.import_module(f"models.{name}").build(**{**SIZES[name], "batch": batch})


def planned(options: argparse.Namespace) -> tuple[Point, ...]:
    model, _, batch = twins(lambda: build(options.model, options.batch), torch.float64)
    loss = importlib.import_module(f"models.{options.model}").loss
    settings = Options(cluster=options.cluster, time_limit=options.time_limit)
    table = prices(trace(model, batch, loss_fn=loss), parse_mesh(options.mesh), settings)
    return sweep(table, settings, steps=options.steps, has_loss=True, say=lambda text: print(text, file=sys.stderr, flush=True))


def train(name: str, batch: int, cluster: str, plans: Sequence[Plan]) -> list[Trained]:
    """On every rank."""
    return [_train(name, batch, cluster, plan) for plan in plans]


def _train(name: str, size: int, cluster: str, plan: Plan) -> Trained:
    from torch.distributed.device_mesh import init_device_mesh

    loss = importlib.import_module(f"models.{name}").loss
    model, reference, batch = twins(lambda: build(name, size), torch.float64)
    mesh = init_device_mesh("cpu", plan.mesh.sizes, mesh_dim_names=plan.mesh.names)
    compiled = autoshard.compile(model, mesh, batch, loss_fn=loss, training=True, plan=plan, cluster=cluster, cache=False)
    failure = ""
    try:
        assert_same_training(compiled, reference, [batch] * STEPS, lambda m, b: m(*b), lambda m, b: loss(m(*b[:-1]), b[-1]), TOLERANCE)
    except AssertionError as e:
        failure = str(e)
    del model, reference
    peak = torch.tensor(step_peak(compiled, batch))
    dist.all_reduce(peak, dist.ReduceOp.MAX)
    return Trained(float(peak), failure)


def form(plan: Plan) -> str:
    """How weights are stored, how long their gathered copies live, and what backward recomputes."""
    weights = {x.name: x for x in plan.layouts if x.kind == "weight"}
    split = sum(any(p >= 0 for p in x.spec) for x in weights.values())
    forward = {(c.value, c.spec) for c in plan.copies if c.window == "forward"}
    gathered = [c.source for c in plan.copies if c.window == "backward" and (c.value, c.spec) in forward]
    words = [f"{split} of {len(weights)} weights split" if split else "replicated"]
    if gathered:
        words.append(f"copies kept for backward: {gathered.count('kept')}, gathered again: {gathered.count('made')}")
    if plan.recompute:
        words.append(f"{len(plan.recompute)} ops recomputed")
    return "; ".join(words)


def line(point: Point, ample: float, trained: Trained | None) -> str:
    if point.plan is None:
        return f"| {point.budget / 1e6:.1f} | | | | | {point.why.partition('. ')[0]} | |"
    p = point.plan
    kept = "within" if trained.measured <= point.budget else "**over**"
    return (f"| {point.budget / 1e6:.1f} | {p.memory['total'] / 1e6:.1f} | {trained.measured / 1e6:.1f} ({kept}) | "
            f"{p.objective_s / ample:.2f} | {100 * p.gap:.1f} % | {form(p)} | {trained.failure or 'same'} |")


def main() -> int:
    parser = argparse.ArgumentParser(description="Plans for less and less memory, trained within their budgets.")
    parser.add_argument("--model", choices=list(SIZES), default="gpt")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--mesh", default="dp=2")
    parser.add_argument("--cluster", default="h100-dgx", help="profile that prices plans")
    parser.add_argument("--steps", type=int, default=8, help="budgets, from what the fastest plan takes to an eighth of it")
    parser.add_argument("--time-limit", type=float, default=10.0, help="seconds of search per plan")
    options = parser.parse_args()
    points = planned(options)
    plans = list({id(p.plan): p.plan for p in points if p.plan is not None}.values())
    results = on_ranks(parse_mesh(options.mesh).size, train, options.model, options.batch, options.cluster, plans, timeout=300.0 * len(plans))[0]
    by_plan = {id(plan): trained for plan, trained in zip(plans, results, strict=True)}
    print("| budget MB | predicted MB | measured MB | step time | gap | plan | three steps |\n" + "|---" * 7 + "|")
    for point in points:
        print(line(point, plans[0].objective_s, by_plan.get(id(point.plan))))
    return any(t.failure or t.measured > p.budget for p in points if p.plan is not None for t in [by_plan[id(p.plan)]])


if __name__ == "__main__":
    sys.exit(main())
