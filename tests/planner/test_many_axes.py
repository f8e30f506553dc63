"""Plans on many mesh axes: of strategies near a plan for fewer axes, never dearer than that one, with a bound of all plans."""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
import torch

import autoshard
from autoshard.base.fine_mesh import refined
from autoshard.base.mesh import Mesh, parse_mesh
from autoshard.base.plan import AROUND, NEARBY, Plan
from autoshard.decide.options import PROPAGATE, Options
from autoshard.decide.phase_timer import PhaseTimer
from autoshard.decide.program import NOTHING
from autoshard.errors import InfeasibleError, Interrupted
from autoshard.formulate.relaxed import Floor
from autoshard.pipeline.microbatches.batch import Batch
from autoshard.planner import descent, many_axes, one_stage
from autoshard.planner.descent import TWO
from autoshard.planner.many_axes import coarse_of, has_many, least, near, on_fewer_axes
from autoshard.planner.one_stage import decide, prices, program_of, searched
from autoshard.program.calling import Traced
from autoshard.search.problem import Status
from models import gpt, mlp

SLOW = str(Path(__file__).parents[1] / "dist/slow-device.toml")
OPTIONS = Options(cluster=SLOW, time_limit=60.0)
BUILT: dict[str, Callable] = {
    "mlp": lambda: mlp.build(batch=8, widths=(8, 16, 4)),
    "gpt": lambda: gpt.build(layers=1, width=24, heads=6, batch=5, seq=8, vocab=50),
}
LOSS = {"mlp": mlp.loss, "gpt": gpt.loss}


@cache
def traced(model: str, mesh: str = "a=2,b=2,c=2") -> Traced:
    with torch.device("meta"):
        built, inputs = BUILT[model]()
    return Batch(built, inputs, {}, {"loss_fn": LOSS[model], "training": True}).on(parse_mesh(mesh), Options().pipeline)


def planned(model: str, mesh: str, options: Options = OPTIONS, few: int = 3, one: int = 1, far: float = 0.05,
            clock: PhaseTimer | None = None) -> Plan:
    """`one`: axes on which strategies may differ from layouts close to the bound; `far`: from it, from where on a plan for fewer axes is asked too."""
    many = patch.object(many_axes, "FEW_AXES", few), patch.object(many_axes, "MANY_PAIRS", 0)
    with many[0], many[1], patch.object(descent, "ONE", one), patch.object(one_stage, "FAR", far):
        return decide(prices(traced(model, mesh), parse_mesh(mesh), options), options, has_loss=True, finer=False, clock=clock)


def test_on_two_axes_every_strategy_is_near():
    whole, found = planned("mlp", "a=2,b=2"), planned("mlp", "a=2,b=2", few=1, one=2)
    assert found.objective_s == pytest.approx(whole.objective_s, rel=1e-9) and AROUND not in whole.status
    assert found.status.endswith(AROUND) and 0 < found.bound_s <= whole.bound_s


@pytest.mark.parametrize("model", sorted(BUILT))
def test_a_plan_near_one_for_fewer_axes_is_no_dearer_and_its_bound_is_of_all(model):
    """Six heads and a batch of five divide on some axes alone, where the plan for fewer axes could not split them."""
    mesh = "a=2,b=2,c=2"
    whole, found, coarse = planned(model, mesh), planned(model, mesh, few=2, far=-1.0), planned(model, "a_b=4,c=2")
    assert whole.bound_s * (1 - 1e-9) <= found.objective_s <= coarse.objective_s * (1 + 1e-9)
    assert found.bound_s <= whole.objective_s * (1 + 1e-9)


@pytest.mark.parametrize("model", sorted(BUILT))
def test_what_is_near_layouts_close_to_the_bound_is_little_dearer_than_the_best(model):
    mesh = "a=2,b=2,c=2"
    whole, found = planned(model, mesh), planned(model, mesh, few=2, far=np.inf)
    assert whole.bound_s * (1 - 1e-9) <= found.objective_s <= 1.05 * whole.objective_s and found.status.endswith(AROUND)


def test_layouts_that_cost_no_more_than_the_bound_are_proven_without_a_search_of_all():
    mesh = "a=2,b=2,c=2"
    options = replace(OPTIONS, cluster="h100-dgx")
    table = prices(traced("gpt", mesh), parse_mesh(mesh), options)
    whole, real, asked = searched(table, options, clock=PhaseTimer(), finer=False), one_stage._searched_whole, []
    with patch.object(many_axes, "MANY_PAIRS", 0), patch.object(one_stage, "_searched_whole", side_effect=lambda t, *a, **k: (asked.append(t), real(t, *a, **k))[1]):
        found = searched(table, options, clock=PhaseTimer(), finer=False)
    assert asked and all(t is not table for t in asked) and found.solution.gap < 1e-3
    assert found.solution.cost == pytest.approx(whole.solution.cost, rel=1e-3)


def test_far_from_the_bound_one_search_near_tells_that_of_all_strategies_the_prices():
    table = prices(traced("gpt"), parse_mesh("a=2,b=2,c=2"), OPTIONS)
    real, asked = one_stage._searched_whole, []

    def search(of, *args, **how):
        asked.append((of is table, how.get("near")))
        return real(of, *args, **how)

    with (patch.object(many_axes, "MANY_PAIRS", 0), patch.object(one_stage, "CLOSE", -0.5), patch.object(descent, "CLOSE", -0.5),
          patch.object(one_stage, "SOON", -0.5), patch.object(one_stage, "_searched_whole", search)):
        found = searched(table, OPTIONS, clock=PhaseTimer(), finer=False)
    assert [whole for whole, _ in asked] == [False, True] and asked[1][1] is not None
    assert found.solution.cost == pytest.approx(planned("gpt", "a=2,b=2,c=2").objective_s, rel=1e-3)


def test_where_the_time_is_up_strategies_near_the_bound_are_searched_too():
    mesh = "a=2,b=2,c=2"
    table = prices(traced("gpt", mesh), parse_mesh(mesh), OPTIONS)
    cut = searched(table, OPTIONS, clock=PhaseTimer(), finer=False)
    dear = replace(cut, solution=replace(cut.solution, cost=2 * cut.solution.cost, bound=0.0, status=Status.TIME_LIMIT))
    real = one_stage._searched_whole
    with patch.object(many_axes, "MANY_PAIRS", 0), patch.object(one_stage, "_searched_whole", side_effect=lambda t, *a, **k: dear if t is table else real(t, *a, **k)):
        found = searched(table, OPTIONS, clock=PhaseTimer(), finer=False)
    assert found.status.endswith(AROUND) and found.solution.cost <= 1.05 * cut.solution.cost and 0 < found.solution.bound <= cut.solution.cost


def test_strategies_kept_differ_on_two_axes_at_most():
    mesh = parse_mesh("a=2,b=2,c=2,d=2")
    table = prices(traced("mlp", str(mesh)), mesh, OPTIONS)
    coarse = coarse_of(table)
    there = on_fewer_axes(table, coarse, "replicate")
    plan = searched(there, OPTIONS, clock=PhaseTimer()).plan(there, {}, {})
    kept = near(table, coarse.parts, plan.ops, TWO)
    fewer = 0
    for name, found in kept.strategies.items():
        chosen = [[spec[a] for a in coarse.parts] for spec in (*plan.ops[name].inputs, *plan.ops[name].outputs)]
        away = [sum(any(t[a] != c[a] for t, c in zip(np.concatenate([i, o]), chosen, strict=True)) for a in range(4))
                for i, o in zip(found.inputs, found.outputs, strict=True)]
        assert min(away) == 0 and max(away) <= 2, f"{name}: the plan itself is among its strategies, and nothing far from it"
        fewer += len(found) < len(table.strategies[name])
    assert fewer > 10 and least(kept) >= least(table)


def test_axes_are_taken_as_one_where_seeds_do_not_tell_them_apart():
    def merged(mesh: str, **seeds: str) -> Mesh:
        return coarse_of(prices(traced("mlp", mesh), parse_mesh(mesh), replace(OPTIONS, seeds={k.replace("_", "."): v for k, v in seeds.items()}))).mesh

    assert str(merged("a=2,b=2,c=2,d=4")) == "a_b=4,c=2,d=4"
    assert str(merged("a=2,b=2,c=2,d=4", layers_0_weight="a,-")) == "a=2,b_c=4,d=4"
    assert str(merged("a=2,b=2,c=2,d=4", layers_0_weight="a*b,-")) == "a_b=4,c=2,d=4"
    assert str(merged("a=2,a_b=2,b=2,c=4", layers_0_weight="-,a")) == "a=2,a_b_b=4,c=4"


def test_an_axis_in_parts_is_whole_on_fewer_axes():
    mesh = refined(parse_mesh("a=2,b=2,c=4"), {"c": (2, 2)})
    coarse = coarse_of(prices(traced("mlp", "a=2,b=2,c=4"), mesh, OPTIONS))
    assert str(coarse.mesh) == "a=2,b=2,c=4" and coarse.parts == (0, 1, 2, 2)


def test_seeds_hold_also_where_no_strategy_near_the_plan_obeys():
    mesh = "a=2,b=2,c=2,d=2"
    options = replace(OPTIONS, seeds={"layers.0.weight": "a*c,b*d"})
    found = planned("mlp", mesh, options)
    assert found.ops["param:layers.0.weight"].outputs[0] == found.ops["grad:layers.0.weight"].inputs[0] == (0, 1, 0, 1)


@pytest.mark.parametrize("precision", [None, autoshard.Precision("bf16")])
def test_what_cannot_move_goes_with_a_seed(precision):
    """Under a policy a parameter lies as what casts it does, and its gradient likewise."""
    mesh, few = "a=2,b=2,c=2", patch.object(many_axes, "FEW_AXES", 2)
    model, inputs = mlp.build(batch=8, widths=(8, 16, 4))
    with few, patch.object(many_axes, "MANY_PAIRS", 0), patch.object(descent, "ONE", 0):
        found = autoshard.plan(model, mesh, inputs, loss_fn=mlp.loss, cluster=SLOW, precision=precision, seeds={"layers.0.weight": "b,a*c"})
    assert found.ops["param:layers.0.weight"].outputs[0] == (1, 0, 1) and (AROUND in found.status or NEARBY in found.status)


def test_a_budget_below_what_is_near_is_not_proven_too_small():
    with pytest.raises(InfeasibleError, match=r"only strategies near a plan for a_b=4,c=2,d=2") as caught:
        planned("mlp", "a=2,b=2,c=2,d=2", replace(OPTIONS, memory_budget=600.0, time_limit=5.0))
    assert "2, d=2" not in str(caught.value)


def test_a_plan_by_hand_that_is_cheaper_is_taken():
    mesh = parse_mesh("a=2,b=2")
    table = prices(traced("mlp", str(mesh)), mesh, OPTIONS)
    program = program_of(table, OPTIONS, has_loss=True)
    best = planned("mlp", str(mesh))
    found = searched(table, OPTIONS, clock=PhaseTimer(), finer=False)
    dear = replace(found, solution=replace(NOTHING, choice=found.solution.choice, cost=2 * found.solution.cost, status=Status.OPTIMAL))
    known = replace(program, starts=(found.solution.choice,))
    taken = many_axes.as_near(dear, least(table), known, False)
    assert taken.solution.cost == pytest.approx(best.objective_s) and taken.solution.status is Status.GAP and taken.program is known


@pytest.mark.parametrize("ends", [InfeasibleError("time is up"), Interrupted("no plan yet")])
def test_the_best_near_layouts_is_the_plan_where_all_strategies_lead_to_none(ends: Exception) -> None:
    """As a plan refined op by op is no start over units, a search of all strategies may begin with nothing."""
    table = prices(traced("gpt"), parse_mesh("a=2,b=2,c=2"), OPTIONS)
    search = one_stage._searched_whole

    def fails_on_all(of, *args, **how):
        if of is table:
            raise ends
        return search(of, *args, **how)

    with patch.object(many_axes, "MANY_PAIRS", 0), patch.object(one_stage, "CLOSE", -0.5), patch.object(one_stage, "_searched_whole", fails_on_all):
        plan = decide(table, OPTIONS, has_loss=True, finer=False)
    interrupted = isinstance(ends, Interrupted)
    assert plan.interrupted == interrupted and (AROUND in plan.status) != interrupted and 0 < plan.bound_s <= plan.objective_s


def test_an_interrupted_search_near_says_so():
    mesh = parse_mesh("a=2,b=2,c=2")
    table = prices(traced("mlp"), mesh, OPTIONS)
    found = searched(table, OPTIONS, clock=PhaseTimer())
    stopped = many_axes.as_near(found, least(table), None, True)
    assert stopped.plan(table, {}, {}).interrupted


def test_seeds_alone_are_spread_over_all_axes():
    table = prices(traced("mlp"), parse_mesh("a=2,b=2,c=2"), OPTIONS)
    with patch.object(many_axes, "FEW_AXES", 1), patch.object(many_axes, "MANY_PAIRS", 0), patch.object(one_stage, "_searched_near") as near_too:
        assert has_many(table) and not has_many(prices(traced("mlp", "a=2,b=1,c=1"), parse_mesh("a=2,b=1,c=1"), OPTIONS))
        options = replace(OPTIONS, search=PROPAGATE, seeds={"input:0": "a,-"})
        decide(prices(traced("mlp"), parse_mesh("a=2,b=2,c=2"), options), options)
    assert not near_too.called


def test_four_axes_compute_what_one_device_does():
    """All 16 ranks in one process."""
    torch.manual_seed(0)
    model, inputs = mlp.build(batch=16, widths=(8, 16, 4))
    report = autoshard.verify(model, "a=2,b=2,c=2,d=2", inputs, loss_fn=mlp.loss, plans=("searched",), cluster=SLOW,
                              seeds={"input:0": "a*c,-", "layers.0.weight": "b,d"})
    assert report.ok, report
    assert AROUND in report.plans[0].plan.status and len({c.axis for c in report.plans[0].plan.collectives}) > 1


def test_who_ends_the_search_while_all_plans_are_bounded_gets_the_plan_so_far():
    def ended(relaxed, over):
        over.__self__.stop = True
        return Floor(0.0, np.zeros(len(relaxed.kept), dtype=np.int64))

    clock = PhaseTimer()
    with patch.object(one_stage, "floor_of", ended):
        found = planned("mlp", "a=2,b=2,c=2", few=2, clock=clock)
    assert clock.ended.is_set(), "a sweep goes on otherwise"
    assert found.interrupted and 0 < found.bound_s <= found.objective_s
