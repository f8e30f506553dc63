"""How far grouping ops into units shrinks the search problem, and what it costs against deciding op by op.

    python -m benchmarks.search.units [MODEL] [--mesh dp=8,tp=8] [--batch 16] [--seq 8192]
    python -m benchmarks.search.units --gain [MODEL ...] [--meshes a=8 a=2,b=4 a=2,b=2,c=2] [--batch 1] [--precision param=bf16,master=fp32,reduce=bf16]

`--gain` takes the models of models/ at real widths with few layers, and prints a row per model, mesh and cluster:

    units     the best plan over units, its gap ("+" where the search did not close it), and CPU seconds
    refined   that plan refined (decide/refine.py), what it gains over units, and CPU seconds
    op by op  the least cost that is known of any plan, every op deciding for itself, after `--prove` more seconds: a search from the refined
              plan, and, where that stays open, neighbourhoods from every other starting plan in half as many seconds
    bound     the proven lower bound of all those plans
    found     what op by op was found to gain over the refined plan: a cheaper plan is known
    at most   what it can gain, by the bound: nothing cheaper than that exists. The truth is between the two columns

The search op by op ends where `at most` is down to `--enough`. Limits are CPU seconds of this process, so that a busy machine gives the same
table; the seconds of one row vary all the same. The last line counts the rows within 0.5 %.
"""
from __future__ import annotations

import argparse
import importlib
import time
from dataclasses import dataclass, replace

import numpy as np
import torch

from autoshard.base.mesh import parse_mesh
from autoshard.cli.read import parse_precision
from autoshard.cost.cluster import load_cluster
from autoshard.decide.how import How
from autoshard.decide.memory.attempts import search
from autoshard.decide.options import Options
from autoshard.decide.program import Program, formulate_within, with_starts
from autoshard.decide.refine import SHARE, lifted, refine
from autoshard.decide.variants import Variants
from autoshard.formulate.problem_of import formulate
from autoshard.planner.one_stage import prices
from autoshard.program.load import load_model
from autoshard.program.trace import trace
from autoshard.search import Clock, Solution, improve, solve
from autoshard.seeds.seeds import Seeds
from autoshard.space.cost_table import CostTable, Training, build_cost_table
from autoshard.space.decision_units import find_units, singletons
from autoshard.space.strategies import enumerate_strategies

WIDE = {"bert": ("base", {"layers": 2}), "dlrm": ("small", {}), "gpt": ("124M", {"layers": 2}), "llama": ("1B", {"layers": 2}),
        "mlp": ("wide", {}), "moe": ("small", {"layers": 2}), "resnet": ("18", {}), "t5": ("small", {"layers": 1}), "vit": ("b16", {"layers": 2})}


@dataclass(frozen=True)
class Limits:
    """CPU seconds of the search over units with what refines its plan, and of the search op by op; the relative gap at which that one ends."""

    plan: float
    prove: float
    enough: float


@dataclass(frozen=True)
class Row:
    """Of one program: the plan over units, the refined one, and the search op by op, where one was made. Costs in seconds of a step, `*_s` in
    CPU seconds."""

    units: float
    units_gap: float
    units_s: float
    refined: float
    refined_s: float
    single: float | None
    bound: float | None
    single_s: float

    @property
    def found(self) -> float | None:
        """The part of the refined plan that op by op was found to gain."""
        return None if self.single is None else self.refined / self.single - 1

    @property
    def at_most(self) -> float | None:
        """What it gains at most."""
        return None if self.bound is None else self.refined / self.bound - 1

    def __str__(self) -> str:
        said = (f"{self.units * 1e6:14.2f} {self.units_gap:8.1e}{'+' if self.units_gap > CLOSED else ' '} {self.units_s:6.1f} "
                f"{self.refined * 1e6:14.2f} {100 * (self.units / self.refined - 1):6.2f} {self.refined_s:6.1f}")
        if self.single is None or self.bound is None:
            return said
        return f"{said} {self.single * 1e6:14.2f} {self.bound * 1e6:14.2f} {100 * self.found:7.2f} {100 * self.at_most:8.2f} {self.single_s:6.1f}"


HEADER = (f"{'model':7} {'mesh':12} {'cluster':9} {'units us':>14} {'gap':>9} {'CPU s':>6} {'refined us':>14} {'gain %':>6} {'CPU s':>6} "
          f"{'op by op us':>14} {'bound us':>14} {'found %':>7} {'at most %':>8} {'CPU s':>6}")
LITTLE = 5e-3  # what op by op may gain
CLOSED = 2e-9  # gaps up to here are the margin of float sums


def gain(names: list[str], meshes: list[str], clusters: list[str], batch: int, policy: str | None, limits: Limits) -> None:
    """A row per model, mesh and cluster: what units cost, what the refined plan costs, and what op by op costs and is bound by."""
    precision, rows = parse_precision(policy) if policy else None, []
    print(HEADER)
    for name in names:
        module, (size, shape) = importlib.import_module(f"models.{name}"), WIDE[name]
        with torch.device("meta"):
            model, inputs = module.build(size, batch=batch, **shape)
        traced = trace(model, inputs, loss_fn=module.loss, training=True, precision=precision)
        for mesh in meshes:
            for cluster in clusters:
                options = Options(cluster=cluster, precision=precision, time_limit=limits.plan)
                rows.append(gained(prices(traced, parse_mesh(mesh), options), options, limits))
                print(f"{name:7} {mesh:12} {cluster:9} {rows[-1]}", flush=True)
    known = [row for row in rows if row.single is not None]
    if known:
        print(f"of {len(known)} rows, op by op was found to gain at most 0.5 % in {sum(row.found <= LITTLE for row in known)}, "
              f"and is proven to in {sum(row.at_most <= LITTLE for row in known)}")


def gained(table: CostTable, options: Options, limits: Limits) -> Row:
    """Of one program: units, refined, and, from there, op by op."""
    program = with_starts(formulate_within(table, options.memory_limit(table.cluster)), options.settings(True, True))
    clock, begin = Clock(limits.plan, now=time.process_time), time.process_time()
    units = search(Variants(program, How(clock.part(1.0 - SHARE)))).solution
    middle, (refined, better) = time.process_time(), refine(program, units, How(clock))
    end = time.process_time()
    single = op_by_op(program, units, better.choice if refined is not program else None, limits) if limits.prove else (None, None)
    return Row(units.cost, units.gap, middle - begin, better.cost, end - middle, *single, time.process_time() - end)


def op_by_op(program: Program, units: Solution, refined: np.ndarray | None, limits: Limits) -> tuple[float, float]:
    """The least cost known of a plan, and a bound of all. `refined`: a choice of the problem op by op; else it starts from that over units."""
    table = program.formulation.table
    finer = formulate_within(table, program.formulation.budget.limit, singletons(table))
    start = lifted(program.formulation, units.choice, finer) if refined is None else refined
    bare = replace(finer.problem, groups=None)  # a bound is wanted, which equal layers tied do not give
    found = solve(bare, clock=Clock(limits.prove, now=time.process_time), starts=[start], enough=limits.enough)
    costs = [found.cost]
    if found.gap > max(limits.enough, CLOSED):
        clock = Clock(limits.prove / 2, now=time.process_time)
        others = [lifted(program.formulation, choice, finer) for choice in program.starts]
        costs += [improved[1] for choice in others if choice is not None and (improved := improve(finer.problem, choice, clock)) is not None]
    return min(costs), found.bound


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
        gain(args.models or list(WIDE), args.meshes, args.clusters, args.batch or 1, args.precision,
             Limits(args.time_limit, args.prove, args.enough))
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
