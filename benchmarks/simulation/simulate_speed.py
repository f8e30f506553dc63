"""CPU seconds and memory of simulating a step on thousands of ranks, each with its own jitter.

    python -m benchmarks.simulation.simulate_speed [--model llama:8b --mesh dp=512,tp=8 --batch 512 --seq 8192 --jitter 0.05]
    python -m benchmarks.simulation.simulate_speed --stages 16 --microbatches 128 --mesh dp=128,tp=8

The plan is FSDP x TP by hand (no search). What counts begins when the program exists: `replay`, and what `autoshard simulate` shows of it.
Memory is what that allocates at its peak (tracemalloc, in a second run), beside the program.

With --stages, a GPT of as many layers on so many times the mesh's ranks, planned with its stages (1F1B, one row a micro-batch and data-parallel rank).
What counts is `autoshard.simulate` on the plan and the traced program: windows of all stages replayed, all actions played.
"""
from __future__ import annotations

import argparse
import json
import tracemalloc
from time import process_time

import torch

import autoshard
from autoshard import Pipeline
from autoshard.base.mesh import parse_mesh
from autoshard.cost.cluster import Cluster
from autoshard.decide.make_plan import make_plan
from autoshard.decide.options import Options
from autoshard.decide.program import formulate_within
from autoshard.decide.walks.baselines import baseline
from autoshard.decide.walks.reads import Wiring
from autoshard.decide.walks.schemes import schemes
from autoshard.planner.one_stage import prices
from autoshard.program.load import load_model
from autoshard.program.trace import trace
from autoshard.search.problem import Solution, Status, evaluate
from autoshard.simulation.conditions import Conditions
from autoshard.simulation.critical_path import critical_path, shares
from autoshard.simulation.pipeline import simulate_pipeline
from autoshard.simulation.replay import replay
from autoshard.simulation.result import idle_rows
from autoshard.simulation.simulate import program_for
from autoshard.simulation.source import traced_for
from models import gpt

TARGET_S, TARGET_BYTES, STAGES_TARGET_S = 2.0, 0.5 * 2**30, 10.0


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


def staged(stages: int, microbatches: int, mesh: str, jitter: float) -> dict:
    """A pipeline, planned and simulated."""
    on, start = parse_mesh(mesh), process_time()
    with torch.device("meta"):
        model, inputs = gpt.build("tiny", layers=stages, width=512, heads=8, vocab=4096, context=256, batch=microbatches * on.sizes[0])
    cuts = tuple(f"h.{i}" for i in range(1, stages))
    plan = autoshard.plan(model, f"pp={stages},{mesh}", inputs, loss_fn=gpt.loss, pipeline=Pipeline(microbatches=microbatches, cuts=cuts, schedule="1f1b"))
    planned, graph = process_time(), traced_for(plan, model, inputs, {}, gpt.loss).graph
    cluster, conditions, traced = Cluster.from_snapshot(plan.cluster), Conditions(jitter=jitter), process_time()
    found = simulate_pipeline(graph, plan, cluster, conditions, False, ())
    seconds = process_time() - traced
    return {"mesh": str(plan.mesh), "ranks": plan.mesh.size, "stages": stages, "microbatches": microbatches, "plan_cpu_s": planned - start,
            "trace_cpu_s": traced - planned, "simulate_cpu_s": seconds, "step_s": found.step_s, "objective_s": plan.objective_s,
            "within_target": seconds <= STAGES_TARGET_S}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama:8b")
    parser.add_argument("--mesh", default="dp=512,tp=8")
    parser.add_argument("--batch", type=int, default=512)
    parser.add_argument("--seq", type=int, default=8192)
    parser.add_argument("--jitter", type=float, default=0.05)
    parser.add_argument("--stages", type=int, help="a pipeline of so many stages, each on the mesh")
    parser.add_argument("--microbatches", type=int, default=128)
    given = parser.parse_args()
    if given.stages:
        print(json.dumps(staged(given.stages, given.microbatches, given.mesh, given.jitter), indent=1))
        return
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
