"""CPU seconds and memory of simulating a step on thousands of ranks, each with its own jitter.

    python benchmarks/simulate_speed.py [--model llama:8b --mesh dp=512,tp=8 --batch 512 --seq 8192 --jitter 0.05]

The plan is FSDP x TP by hand (no search). What counts begins when the program exists: `replay`, and what `autoshard simulate` shows of it.
Memory is what that allocates at its peak (tracemalloc, in a second run), beside the program.
"""
from __future__ import annotations

import argparse
import json
import tracemalloc
from time import process_time

from autoshard.base.mesh import parse_mesh
from autoshard.cost.cluster import Cluster
from autoshard.decide.make_plan import make_plan
from autoshard.decide.options import Options
from autoshard.decide.program import formulate_within
from autoshard.decide.walks.baselines import baseline, schemes
from autoshard.decide.walks.reads import Wiring
from autoshard.planner.one_stage import prices
from autoshard.program.load import load_model
from autoshard.program.trace import trace
from autoshard.search.problem import Solution, Status, evaluate
from autoshard.simulation.conditions import Conditions
from autoshard.simulation.critical_path import critical_path, shares
from autoshard.simulation.replay import replay
from autoshard.simulation.result import idle_rows
from autoshard.simulation.simulate import program_for

TARGET_S, TARGET_BYTES = 2.0, 0.5 * 2**30


def planned(model: str, mesh: str, batch: int, seq: int):
    """(graph, plan) of FSDP x TP, or FSDP where the mesh has one axis."""
    spec, on = load_model(model, batch=batch, seq=seq, dtype="bf16"), parse_mesh(mesh)
    traced = trace(spec.model, spec.example_inputs, spec.example_kwargs, loss_fn=spec.loss_fn)
    formulation = formulate_within(prices(traced, on, Options()), float("inf"))
    scheme = next(s for s in schemes(on) if s.name == ("FSDP x TP" if on.ndim > 1 else "FSDP (ZeRO-3)"))
    choice = baseline(Wiring(formulation), scheme)
    solution = Solution(choice, evaluate(formulation.problem, choice), 0.0, Status.GAP, 0.0)
    return traced.graph, make_plan(formulation, solution, model={}, settings={"optimizer": "adamw"}, seeds={})


def simulated(program, cluster: Cluster, conditions: Conditions) -> dict:
    """What `autoshard simulate` finds, with CPU seconds."""
    start = process_time()
    played = replay(program, cluster, conditions)
    replayed = process_time()
    idle_rows(played.idle)
    shares(played, critical_path(played))
    return {"replay_cpu_s": replayed - start, "total_cpu_s": process_time() - start, "step_s": played.step_s}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama:8b")
    parser.add_argument("--mesh", default="dp=512,tp=8")
    parser.add_argument("--batch", type=int, default=512)
    parser.add_argument("--seq", type=int, default=8192)
    parser.add_argument("--jitter", type=float, default=0.05)
    given = parser.parse_args()
    start = process_time()
    graph, plan = planned(given.model, given.mesh, given.batch, given.seq)
    made = process_time()
    cluster, conditions = Cluster.from_snapshot(plan.cluster), Conditions(jitter=given.jitter)
    program = program_for(graph, plan, cluster)
    found = {"mesh": str(plan.mesh), "ranks": plan.mesh.size, "plan_cpu_s": made - start, "program_cpu_s": process_time() - made,
             "events": len(program.events), "calls": len(program.calls), "ops": len(program.works), "objective_s": plan.objective_s}
    found |= simulated(program, cluster, conditions)
    tracemalloc.start()
    simulated(program, cluster, conditions)
    found["peak_bytes"] = tracemalloc.get_traced_memory()[1]
    found["within_targets"] = found["total_cpu_s"] <= TARGET_S and found["peak_bytes"] <= TARGET_BYTES
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
