"""Gathers ahead in floor rows: counted where a plan makes them, and never more than lies there."""
from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from autoshard.base.mesh import parse_mesh
from autoshard.decide.make_plan import Timelines
from autoshard.decide.memory.memory_problems import memory_priced
from autoshard.decide.options import Options
from autoshard.decide.program import formulate_within
from autoshard.formulate.floor_gathers import while_all_hold
from autoshard.formulate.floor_rows import Floors
from autoshard.formulate.memory_rows import without_idle
from autoshard.formulate.problem_of import Formulation
from autoshard.planner.one_stage import prices
from autoshard.play.footprint import Footprints
from autoshard.program.trace import trace
from autoshard.recompute.undecided import open_table
from autoshard.search import Problem, solve
from models import llama

OPTIONS = Options(cluster="h100-dgx")


def test_amounts_are_exact_where_all_conditions_hold_and_never_too_high() -> None:
    rng = np.random.default_rng(0)
    for _ in range(100):
        conditions = [(int(rng.integers(3)), rng.random(3) < 0.6) for _ in range(int(rng.integers(1, 5)))]
        amounts = list(while_all_hold(conditions, 7.0))
        for choice in product(range(3), repeat=3):
            total, hold = sum(a[choice[node]] for node, a in amounts), all(mask[choice[node]] for node, mask in conditions)
            assert total == pytest.approx(7.0) if hold else total <= 0.0


def split_everywhere() -> tuple[Formulation, np.ndarray]:
    """A plan of a llama whose weights are split where they are stored, and gathered again in backward: kept copies cost most."""
    model, batch = llama.build(layers=4)
    formulation = formulate_within(open_table(prices(trace(model, batch, loss_fn=llama.loss), parse_mesh("dp=4"), OPTIONS)), 1e18)
    priced = memory_priced(formulation.problem, np.array([formulation.memory_rows["turn"]]), 1e-6)
    choice = solve(Problem(priced.node_costs, priced.edges), time_limit=30.0).choice
    assert choice is not None, "a lean plan exists"
    return formulation, without_idle(formulation, choice)


def test_gathers_that_are_issued_ahead_are_counted() -> None:
    formulation, choice = split_everywhere()
    floors, timeline = Floors(formulation, Footprints(formulation.table.mesh, formulation.table.cluster)), Timelines(formulation, {})(choice)
    total, counted = timeline.live.sum(axis=1), []
    for moment in floors.moments:
        op = floors.graph.op(moment)
        ahead = float(sum(a[choice[node]] for node, a in floors._under_way(op, floors.graph.order[moment], choice)))
        t = timeline.begins(moment)
        if t >= 0:
            assert floors.load(moment, choice) <= total[t - 1:t + 1].max() * (1 + 1e-9), moment
            counted.append(ahead)
    assert sum(ahead > 0 for ahead in counted) > len(counted) / 4
    weight = max(g.nbytes for gathers in floors._gathers.values() for g in gathers)
    assert weight <= max(counted), "with the head's weight on its way"
