"""What a step with micro-batches costs and holds: once a step, or for every micro-batch."""
from __future__ import annotations

import functools

import numpy as np
import pytest
import torch
from torch import nn

from autoshard.base.mesh import parse_mesh
from autoshard.base.plan import Plan
from autoshard.base.spec import is_partial
from autoshard.base.windows import is_accumulator, is_hold
from autoshard.cost.cluster import load_cluster
from autoshard.decide.make_plan import make_plan
from autoshard.decide.notes.microbatch_notes import microbatch_notes
from autoshard.decide.options import Options
from autoshard.decide.pipeline_options import Pipeline
from autoshard.decide.walks.reads import Wiring
from autoshard.decide.walks.walk import Placed
from autoshard.formulate.problem_of import formulate
from autoshard.lower.lower import lower
from autoshard.lower.schedule import schedule
from autoshard.pipeline.microbatches.batch import traced
from autoshard.planner.one_stage import prices
from autoshard.runtime.route import route_of
from autoshard.search import solve
from autoshard.search.problem import row_loads
from autoshard.verification.reprice import collectives_in, reprice

MESH = parse_mesh("dp=4")
ROWS, WIDTH = 512, 256
STORED_SPLIT = {"*.weight": ("dp", None), "*.bias": ("dp",), "input:*": ("dp", None)}
"""Parameters and optimizer state are split and the batch too: ZeRO."""


def program(microbatches: int):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))
    with torch.device("meta"):
        batch = torch.empty(ROWS, WIDTH), torch.empty(ROWS, WIDTH)
    return traced(model.to("meta"), batch, {}, Pipeline(microbatches), loss_fn=nn.functional.mse_loss, training=True)


@functools.cache
def table_of(microbatches: int, cluster: str = "cpu-gloo"):
    return prices(program(microbatches), MESH, Options(cluster=cluster, seeds=STORED_SPLIT))


def planned(microbatches: int, memory: float | None = None, cluster: str = "cpu-gloo") -> Plan:
    """The cheapest plan by the search's own memory rows."""
    formulation = formulate(table_of(microbatches, cluster), memory_limit=memory)
    solution = solve(formulation.problem, time_limit=20)
    return make_plan(formulation, solution, model={}, seeds={},
                     settings=Options(pipeline=Pipeline(microbatches)).settings(True, True))


def late(plan: Plan) -> int:
    """Weights' gradients that stay sums over ranks until the end."""
    return sum(is_partial(op.outputs[0][0]) for name, op in plan.ops.items() if name.startswith("sum:") and name.endswith("weight"))


def held(plan: Plan) -> int:
    """Weights that are gathered once a step."""
    return sum(op.inputs[0] != plan.ops[f"param:{name.removeprefix('held:')}"].outputs[0]
               for name, op in plan.ops.items() if name.startswith("held:") and name.endswith("weight"))


def test_with_ample_memory_everything_that_can_is_done_once() -> None:
    """In every micro-batch ZeRO-2 would reduce, and ZeRO-3 gather, 16 times."""
    ample = planned(16)
    assert late(ample) == 2 and held(ample) == 2
    assert {c.phase for c in ample.collectives if c.op != "user:0"} <= {"start", "end"}
    assert microbatch_notes(program(16).graph, ample) == (
        "16 micro-batches of 32 rows; gradients are reduced once a step; 4 parameters are gathered once a step",)


def test_where_memory_is_short_more_is_done_in_every_micro_batch() -> None:
    """A whole accumulator takes the memory of all of a gradient on every rank, and so does a parameter that is held."""
    ample, whole = planned(16), 4 * WIDTH * WIDTH
    least = planned(16, 2.2 * whole)
    assert late(least) == 0 and held(least) == 0 and least.objective_s > 2 * ample.objective_s
    assert {c.phase for c in least.collectives} >= {"forward", "backward"}
    seconds = [planned(16, budget * whole).objective_s for budget in (2.2, 3, 4, 5, 6)]
    assert seconds == sorted(seconds, reverse=True) and len(set(seconds)) >= 4 and seconds[-1] == pytest.approx(ample.objective_s)
    counts = [(late(p), held(p)) for p in (planned(16, budget * whole) for budget in (3, 4, 5))]
    assert any(0 < n + m < 4 for n, m in counts), f"some once and some in every micro-batch, not {counts}"


def test_one_micro_batch_is_the_program_without() -> None:
    assert program(1).graph.microbatches == 1 and not [op for op in program(1).graph.ops if is_hold(op) or is_accumulator(op)]


@pytest.mark.parametrize("cluster", ["cpu-gloo", "h100-dgx"])
@pytest.mark.parametrize("memory", [None, 12.0 * WIDTH * WIDTH])
def test_the_lowered_program_costs_what_was_planned(memory: float | None, cluster: str) -> None:
    plan, graph, profile = planned(16, memory, cluster), program(16).graph, load_cluster(cluster)
    lowered = lower(graph, plan, MESH, schedule(graph, plan, MESH, route_of(plan)))
    assert reprice(graph, lowered, profile, "adamw").planned_s == pytest.approx(plan.objective_s, rel=1e-9)
    seen = sorted((s.window, s.kind, n) for s in collectives_in(lowered) for n in (s.bucket or (s.nbytes,)))
    assert seen == sorted((c.phase, c.kind, c.nbytes) for c in plan.collectives)


def test_saved_values_count_for_every_micro_batch_in_flight() -> None:
    table = table_of(4)
    one, three = (formulate(table, in_flight=(n, 0)) for n in (1, 3))
    rng = np.random.default_rng(0)
    for _ in range(5):
        choice = np.array([rng.integers(len(c)) for c in one.problem.node_costs])
        saved = sum(float(amounts[choice[node]]) for node, amounts, _ in three.saved)
        turn = one.memory_rows["turn"]
        loads = [row_loads(f.problem, choice)[turn] for f in (one, three)]
        assert saved > 0 and loads[1] - loads[0] == pytest.approx(2 * saved)


def test_a_walk_counts_what_moves_as_often_as_a_step_moves_it():
    wiring = Wiring(formulate(table_of(4)))
    placed = Placed(wiring, dict.fromkeys(range(len(wiring.formulation.units.units)), 0))
    for n, reads in enumerate(wiring.reads):
        wanted = sum((wiring.seconds(r)[wiring.sources(r).index[0]][wiring.targets(r).index] for r in reads), np.zeros(len(wiring.unit(n))))
        assert placed.moved(n, np.zeros(len(wiring.unit(n)))) == pytest.approx(wanted)
