"""The schedule as data: what instructions wait for, what they free, which collectives they issue, against its definition and the lowered
program."""
from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from importlib import import_module
from pathlib import Path

import pytest

from autoshard.base.graph import Graph, Ref
from autoshard.base.mesh import parse_mesh
from autoshard.base.plan import GRADIENTS_IN_FLIGHT, IN_FLIGHT, Plan
from autoshard.base.precision import Precision
from autoshard.cost.cluster import load_cluster
from autoshard.cost.redistribute import Redistribution
from autoshard.cost.shared_calls import BUCKETS, SMALL
from autoshard.decide.make_plan import Timelines, make_plan
from autoshard.decide.options import Options
from autoshard.decide.pipeline_options import Pipeline
from autoshard.decide.program import formulate_within
from autoshard.decide.walks.baselines import baseline
from autoshard.decide.walks.reads import Wiring
from autoshard.decide.walks.schemes import schemes
from autoshard.errors import LoweringError, PlanError
from autoshard.lower.buckets import Flight, shared_calls
from autoshard.lower.lower import lower
from autoshard.lower.schedule import COMPUTE, STORED, Held, Schedule, WindowSchedule, reductions, schedule
from autoshard.pipeline.microbatches import batch as batches
from autoshard.planner.one_stage import prices
from autoshard.planner.stages import plan_traced
from autoshard.program.flow import gradient_bound, is_passing
from autoshard.program.trace import trace
from autoshard.rules import registry
from autoshard.runtime.route import route_of
from autoshard.search.problem import Solution, Status, evaluate
from autoshard.verification.reprice import collectives_in, reprice
from tests.dist.random_plans import random_plan

CASES = [(name, mesh, seed) for name in ("mlp", "gpt", "resnet", "moe") for mesh in ("d=2", "a=2,b=2") for seed in range(2)]
SLOW_DEVICE = str(Path(__file__).parents[1] / "dist" / "slow-device.toml")
"""Where work is worth splitting."""
every_case = pytest.mark.parametrize("name, mesh, seed", CASES)


@cache
def traced_of(name: str):
    module = import_module(f"models.{name}")
    model, batch = module.build()
    return trace(model, batch, loss_fn=module.loss)


def made(name: str, mesh: str, seed: int) -> tuple[Graph, Plan, Schedule]:
    graph, on = traced_of(name).graph, parse_mesh(mesh)
    route = Redistribution(on, load_cluster("cpu-gloo")).steps
    plan = random_plan(graph, on, route, seed)
    return graph, plan, schedule(graph, plan, on, route)


def planned(name: str, mesh: str, **options) -> tuple[Graph, Plan, Schedule]:
    """A searched plan, which lists its collectives."""
    traced, on = traced_of(name), parse_mesh(mesh)
    plan = plan_traced(traced, on, Options(time_limit=10.0, **options), has_loss=True)
    return traced.graph, plan, schedule(traced.graph, plan, on, route_of(plan))


def handed_in(graph: Graph, plan: Plan, window: WindowSchedule) -> set[Held]:
    """What a window finds there: stored values, its inputs and tangents, what it takes of earlier windows."""
    ops = [op for op in graph.ops if op.kind in STORED or op.kind in ("input", "tangent") and op.phase == window.name]
    return {Held(Ref(op.name), plan.ops[op.name].outputs[0]) for op in ops} | set(window.takes)


def handed_out(graph: Graph, order: Schedule, window: WindowSchedule) -> set[Held]:
    i = order.windows.index(window)
    outputs = {order.outputs[op.name] for op in graph.of_kind("output") if op.phase == window.name and op.name in order.outputs}
    return outputs | {held for later in order.windows[i + 1:] for held in later.takes}


def readers(window: WindowSchedule) -> Iterator[tuple[int, Held]]:
    return ((i, held) for i, ins in enumerate(window.instructions) if ins.kind != "wait" for held in ins.reads)


@every_case
def test_dependencies_are_complete(name: str, mesh: str, seed: int) -> None:
    graph, plan, order = made(name, mesh, seed)
    for window in order.windows:
        there, complete, started = handed_in(graph, plan, window), {}, {}
        for i, ins in enumerate(window.instructions):
            if ins.kind == "wait":
                assert len({started[h] for h in ins.reads}) == 1 and ins.deps == (started.pop(ins.reads[0]),), f"{i}: {ins}"
                complete.update(dict.fromkeys(ins.reads, i))
                continue
            assert set(ins.deps) == {complete[h] for h in ins.reads if h in complete}, f"{i}: {ins}"
            assert all(h in complete or h in there for h in ins.reads), f"{i} reads what nobody has made: {ins}"
            (complete if ins.kind == "compute" else started).update(dict.fromkeys(ins.writes, i))
        needed = handed_out(graph, order, window)
        assert all(h in complete or h in there for h in needed), "what is handed out is complete"


@every_case
def test_every_value_is_freed_once_after_its_last_reader(name: str, mesh: str, seed: int) -> None:
    graph, plan, order = made(name, mesh, seed)
    stored = {Held(Ref(op.name), plan.ops[op.name].outputs[0]) for op in graph.of_kind(*STORED)}
    for window in order.windows:
        freed = Counter(held for ins in window.instructions for held in ins.frees)
        last: dict[Held, int] = {}
        for i, held in readers(window):
            last[held] = i
        makers = {held: i for i, ins in enumerate(window.instructions) if ins.kind == "compute" for held in ins.writes}
        kept = stored | handed_out(graph, order, window)
        mortal = ({*last, *makers} | {h for i in window.instructions if i.kind == "redistribute" for h in i.writes}) - kept
        assert freed == Counter(mortal), "each once, and nothing that somebody keeps"
        for i, ins in enumerate(window.instructions):
            for held in ins.frees:
                assert i == last.get(held, makers.get(held)), f"{held} is read last at {last.get(held)}, not at {i}"


@every_case
def test_collectives_are_those_of_the_lowered_program_in_order(name: str, mesh: str, seed: int) -> None:
    graph, plan, order = made(name, mesh, seed)
    lowered = collectives_in(lower(graph, plan, plan.mesh, order))
    outside = [(c.kind, c.axis, c.nbytes, c.bucket) for c in lowered if not c.inner]  # a random plan does not list those inside ops
    assert [(c.kind, c.axis, c.nbytes, c.bucket) for c in order.calls] == outside and outside


@pytest.mark.parametrize("name, mesh, seeds", [("llama", "d=2", {"output.weight": "d,-"}), ("resnet", "a=2,b=2", {"input:*": "S0,S0"})])
def test_collectives_inside_ops_are_in_their_place(name: str, mesh: str, seeds: dict[str, str]) -> None:
    """The loss over a split vocabulary, batch norm over a batch split twice."""
    graph, plan, order = planned(name, mesh, cluster=SLOW_DEVICE, seeds=seeds)
    lowered = collectives_in(lower(graph, plan, plan.mesh, order))
    assert [(c.kind, c.axis, c.nbytes, c.bucket) for c in order.calls] == [(c.kind, c.axis, c.nbytes, c.bucket) for c in lowered]
    assert {c.axis for c in lowered if c.inner} == set(plan.mesh.names), "no collective inside an op: choose other seeds"


@every_case
def test_streams_and_bytes(name: str, mesh: str, seed: int) -> None:
    graph, plan, order = made(name, mesh, seed)
    for ins in (i for w in order.windows for i in w.instructions):
        if ins.kind == "redistribute":
            assert ins.stream == (ins.calls[-1].axis if ins.calls else COMPUTE)
            assert len(ins.reads) == len(ins.writes) == len(ins.steps) and (len(ins.reads) > 1) == bool(ins.calls and ins.calls[-1].bucket)
            sent = sorted(s.nbytes for steps in ins.steps for s in steps if s.nbytes)
            assert sorted(n.nbytes for c in ins.calls for n in c.planned()) == sent
        else:
            assert ins.stream == COMPUTE and not ins.steps


def test_reading_what_is_freed_is_an_error() -> None:
    graph, plan, order = made("gpt", "d=2", 0)
    window = order.windows[0]
    at = next(i for i, ins in enumerate(window.instructions) if ins.frees and ins.kind == "compute" and ins.frees[0] in ins.reads)
    held = window.instructions[at].frees[0]
    earlier = next(i for i, ins in enumerate(window.instructions) if held in (ins.reads if ins.kind == "wait" else ins.writes) and ins.kind != "redistribute")
    spoilt = list(window.instructions)
    spoilt[at] = replace(spoilt[at], frees=spoilt[at].frees[1:])
    spoilt[earlier] = replace(spoilt[earlier], frees=(*spoilt[earlier].frees, held))
    order = replace(order, windows=(replace(window, instructions=tuple(spoilt)), *order.windows[1:]))
    with pytest.raises(LoweringError, match="has freed"):
        lower(graph, plan, plan.mesh, order)


def digest(order: Schedule) -> str:
    return hashlib.sha256(repr(order).encode()).hexdigest()


def test_the_same_in_every_process() -> None:
    """Of which another hashes otherwise."""
    code = f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); from test_schedule import digest, made; print(digest(made('moe', 'a=2,b=2', 1)[2]))"
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=Path(__file__).parents[2],
                           env={**os.environ, "PYTHONHASHSEED": "4711"}).stdout
    assert other.strip() == digest(made("moe", "a=2,b=2", 1)[2])


# --- buckets ---

BUCKET = IN_FLIGHT // BUCKETS


def grouped(*flights: Flight[str]) -> list[str]:
    return ["".join(f.what for f in group) for group in shared_calls(flights, BUCKET)]


def test_small_flights_of_one_kind_share_a_call() -> None:
    assert grouped(Flight("a", 0, 9, 4, "x"), Flight("b", 1, 9, 4, "x"), Flight("c", 2, 9, 4, "y")) == ["ab", "c"]
    assert grouped(Flight("a", 0, 9, 4, "x"), Flight("b", 1, 9, 4, "y"), Flight("c", 2, 9, 4, "x")) == ["b", "ac"], "by the last start"
    assert grouped(Flight("a", 0, 9), Flight("b", 1, 9)) == ["a", "b"], "without a key each stays alone"


def test_large_flights_stay_alone() -> None:
    assert grouped(Flight("a", 0, 9, SMALL + 1, "x"), Flight("b", 1, 9, SMALL, "x"), Flight("c", 2, 9, SMALL, "x")) == ["a", "bc"]
    many = [Flight(chr(97 + i), i, 99, SMALL, "x") for i in range(BUCKET // SMALL + 2)]
    assert [len(group) for group in grouped(*many)] == [BUCKET // SMALL, 2], "a full bucket is sent"


def test_a_wait_in_between_ends_a_bucket() -> None:
    assert grouped(Flight("a", 0, 3, 4, "x"), Flight("b", 3, 9, 4, "x"), Flight("c", 4, 9, 4, "x")) == ["ab", "c"]


def test_small_gradients_of_a_model_share_calls() -> None:
    graph, plan, order = planned("gpt", "d=2", cluster=SLOW_DEVICE, seeds={"input:*": "d,..."})
    reduced = Counter((c.kind, c.nbytes) for c in plan.collectives if c.hideable and c.kind in ("all_reduce", "reduce_scatter"))
    (call,) = [c for c in order.calls if c.bucket]
    together = Counter((call.kind, n) for n in call.bucket)
    assert together <= reduced and len(call.bucket) > 10 and call.nbytes == sum(call.bucket)
    assert all(n > SMALL or kind != call.kind for kind, n in reduced - together), "small ones of that kind are all in it"
    late = replace(plan, settings={**plan.settings, "reduce_gradients": "at the end"})
    assert not any(c.bucket for c in schedule(graph, late, plan.mesh, route_of(plan)).calls), "one after the other, each giving back what it sent"


def test_fewer_bytes_in_flight_are_smaller_calls_and_less_memory() -> None:
    """And dearer ones, as they are planned and as they run."""
    traced, mesh = traced_of("gpt"), parse_mesh("d=2")
    of = prices(traced, mesh, Options(cluster="cpu-gloo"))
    peaks, seconds, calls = [], [], []
    for most in (IN_FLIGHT, 1 << 16, 1 << 12, 1):
        table = replace(of, training=replace(of.training, on_their_way=most))
        formulation, settings = formulate_within(table, float("inf")), {"optimizer": "adamw", GRADIENTS_IN_FLIGHT: most}
        choice = baseline(Wiring(formulation), next(s for s in schemes(mesh) if s.name == "DDP"))
        solution = Solution(choice, evaluate(formulation.problem, choice), 0.0, Status.GAP, 0.0)
        plan = make_plan(formulation, solution, model={}, settings=settings, seeds={})
        order = schedule(traced.graph, plan, mesh, route_of(plan))
        lowered = lower(traced.graph, plan, mesh, order)
        priced = reprice(traced.graph, lowered, load_cluster("cpu-gloo"), "adamw", on_their_way=most)
        assert priced.planned_s == pytest.approx(plan.objective_s, rel=1e-9)
        assert priced.executed_s == pytest.approx(plan.predicted["bucketed_s"], rel=1e-9)
        reduced = [c for c in order.calls if c.kind == "all_reduce"]
        assert all(sum(c.bucket) <= max(most // BUCKETS, max(c.bucket)) for c in reduced if c.bucket)
        total = Timelines(formulation, settings)(choice).live.sum(axis=1)
        peaks.append(int(total[len(total) // 2:-1].max()))  # of backward: the update, which follows, may need more
        seconds.append(plan.objective_s)
        calls.append(len(reduced))
    assert peaks == sorted(peaks, reverse=True) and peaks[0] > peaks[-1]
    assert seconds == sorted(seconds) and seconds[0] < seconds[-1]
    assert calls == sorted(calls) and calls[0] < calls[-1]


@pytest.mark.parametrize("most", [0, "4 MiB", 2.5])
def test_what_is_no_number_of_bytes_in_flight(most) -> None:
    graph, plan, _ = planned("mlp", "d=2")
    with pytest.raises(PlanError, match="gradients_in_flight .* is no number of bytes; plan the model again"):
        schedule(graph, replace(plan, settings={**plan.settings, GRADIENTS_IN_FLIGHT: most}), plan.mesh, route_of(plan))


def test_deferred_reductions_share_calls_too() -> None:
    graph, plan, order = planned("gpt", "d=2", cluster=SLOW_DEVICE, seeds={"input:*": "d,..."})
    window = reductions(graph, plan, plan.mesh, route_of(plan))
    assert [sorted(c.bucket) for c in window.calls if c.bucket] == [sorted(c.bucket) for c in order.calls if c.bucket]
    assert not any(ins.kind == "compute" for ins in window.instructions)


@pytest.mark.parametrize("reduce", ["bf16", "fp32"])
def test_backward_goes_on_while_gradients_under_a_policy_are_reduced(reduce):
    """Reduced in bf16, they are cast to fp32 afterwards: that cast does not stand in backward, where it would wait for the reduction."""
    graph, _, order = by_hand("DDP", "dp=4", Precision(param="bf16", master="fp32", reduce=reduce))
    backward = order.windows[-1].instructions
    waits = [i for i, ins in enumerate(backward) if ins.kind == "wait" and ins.hideable]
    work = [i for i, ins in enumerate(backward) if ins.kind == "compute" and not is_passing(graph.op(ins.op))]
    casts = [i for i, ins in enumerate(backward) if ins.kind == "compute" and registry.is_cast(graph.op(ins.op)) and ins.op in bound_names(graph)]
    assert waits and casts and waits[0] > work[-1], "nothing of backward waits"
    assert (min(casts) > work[-1]) == (reduce == "bf16"), "casts before a reduction stay where they are, so that it can start"


def by_hand(scheme: str, on: str, precision: Precision) -> tuple[Graph, Plan, Schedule]:
    """A baseline's plan of gpt under a policy."""
    module, mesh = import_module("models.gpt"), parse_mesh(on)
    model, batch = module.build()
    traced = batches.traced(model, batch, {}, Pipeline(), loss_fn=module.loss, training=True, precision=precision, marks={}, fallback="error")
    formulation = formulate_within(prices(traced, mesh, Options(cluster="h100-dgx", precision=precision)), float("inf"))
    choice = baseline(Wiring(formulation), next(s for s in schemes(mesh) if s.name == scheme))
    solution = Solution(choice, evaluate(formulation.problem, choice), 0.0, Status.GAP, 0.0)
    plan = make_plan(formulation, solution, model={}, settings={"optimizer": "adamw"}, seeds={})
    return traced.graph, plan, schedule(traced.graph, plan, mesh, route_of(plan))


def bound_names(graph: Graph) -> set[str]:
    return {ref.op for ref in gradient_bound(graph)}
