"""What a call with new shapes costs the leading rank before it runs: its plan kept and priced anew, or searched.

    python -m benchmarks.runtime.new_shapes gpt:tiny --batch 8 --lengths 32,24,16,8
    python -m benchmarks.runtime.new_shapes gpt:124m --batch 4 --lengths 256,248,200,128,64 --cluster my.toml

CPU seconds per phase, without processes: trace, plan, schedule and lower. The first length is searched; for the others the kept plan's
price stands beside a fresh search's, where both store the parameters as the first plan does.
"""
from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from autoshard.base.mesh import Mesh, parse_mesh
from autoshard.base.plan import Plan
from autoshard.cost.budget import Budget
from autoshard.cost.cluster import load_cluster
from autoshard.decide.kept import Known, carried, kept
from autoshard.decide.options import Options
from autoshard.lower.lower import lower
from autoshard.lower.schedule import schedule
from autoshard.planner.stages import plan_traced
from autoshard.program.calling import Traced
from autoshard.program.load import load_model
from autoshard.program.trace import trace
from autoshard.recompute.rewrite import with_recompute
from autoshard.runtime.check_plan import check_fits
from autoshard.runtime.route import route_of
from autoshard.space.cost_table import Training


@dataclass
class Phases:
    """CPU seconds by phase."""

    seconds: dict[str, float] = field(default_factory=dict)

    def __call__(self, name: str, work: Callable[[], Any]) -> Any:
        begin = time.process_time()
        out = work()
        self.seconds[name] = time.process_time() - begin
        return out

    @property
    def line(self) -> str:
        return ", ".join(f"{name} {s:.2f}" for name, s in self.seconds.items()) + f"; together {sum(self.seconds.values()):.2f} CPU s"


def traced_at(model: str, batch: int, length: int) -> Traced:
    spec = load_model(model, batch=batch, seq=length)
    return trace(spec.model, tuple(spec.example_inputs), dict(spec.example_kwargs or {}), loss_fn=spec.loss_fn, training=True)


def lowered(traced: Traced, plan: Plan, mesh: Mesh) -> None:
    graph = with_recompute(traced.graph, plan.recompute)
    lower(graph, plan, mesh, schedule(graph, plan, mesh, route_of(plan)))


def keep(traced: Traced, known: list[Known], mesh: Mesh, options: Options, within: float) -> Plan | None:
    """As `autoshard.compile` does it."""
    profile = load_cluster(options.cluster)
    plans = [plan for k in known if (plan := carried(k, traced.graph)) is not None]
    for plan in plans:
        check_fits(plan, traced.graph, mesh)
    return kept(plans, known, traced.graph, mesh, profile, Training(options.optimizer, True),
                Budget.of(profile.device, options.memory_limit(profile)), within)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="gpt:tiny")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--lengths", default="32,24,16,8")
    parser.add_argument("--mesh", default="d=2")
    parser.add_argument("--cluster", default="cpu-gloo")
    parser.add_argument("--within", type=float, default=0.1)
    given = parser.parse_args()
    mesh, options, known = parse_mesh(given.mesh), Options(cluster=given.cluster), []
    for length in map(int, given.lengths.split(",")):
        phases = Phases()
        traced = phases("trace", lambda length=length: traced_at(given.model, given.batch, length))
        plan = phases("keep", lambda t=traced: keep(t, known, mesh, options, given.within)) if known else None
        fixed = known[0].plan.placements if known else {}
        fresh = Phases()
        searched = (phases if plan is None else fresh)("search", lambda t=traced, f=fixed: plan_traced(t, mesh, options, fixed=f))
        said = "searched" if plan is None else f"kept, {plan.objective_s / searched.objective_s - 1:.2%} above a search ({fresh.line}); {plan.notes[0]}"
        plan = plan or searched
        phases("lower", lambda t=traced, p=plan: lowered(t, p, mesh))
        known.append(Known(plan, with_recompute(traced.graph, plan.recompute)))
        print(f"length {length}: step {plan.objective_s:.4g} s, {said}\n    {phases.line}", flush=True)


if __name__ == "__main__":
    main()
