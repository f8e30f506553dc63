"""What a changed machine would do, and what memory is worth: held against plans made from the start."""
from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

import autoshard
import models.gpt
import models.mlp
from autoshard.base.mesh import parse_mesh
from autoshard.base.plan import Plan
from autoshard.cost.change import changed
from autoshard.cost.cluster import load_cluster
from autoshard.decide import program
from autoshard.decide.options import Options
from autoshard.decide.program import starting_plans
from autoshard.errors import MeshError, UsageError
from autoshard.report import what
from autoshard.study.scenario import scenario, scenarios
from autoshard.study.what_if import what_changed

MESH, OPTIONS, H100 = parse_mesh("dp=4"), Options(), load_cluster("h100-dgx")
SPLIT = {"input:0": "dp,-"}
LONG = 200.0
"""Seconds that no search takes whose plan is compared with another one's: the tightest takes 20 on a slow machine with nothing beside it."""


def planner(module=models.mlp, batch: int = 512, time_limit: float = 30.0, **options) -> autoshard.Planner:
    with torch.device("meta"):
        model, inputs = module.build("tiny", batch=batch)
    return autoshard.Planner(model, inputs, loss_fn=module.loss, time_limit=time_limit, **options)


@pytest.fixture(scope="module")
def table():
    """Of a plan whose inputs are split, so that ranks talk to each other."""
    asked = ["links.nvlink.bandwidth=0.25x", "device.memory_bandwidth=2x", "mesh.dp=8", "memory=1KiB", "overlap.eta=0"]
    return planner(seeds=SPLIT).what_if("dp=4", asked)


# -- scenarios --------------------------------------------------------------------------------------

@pytest.mark.parametrize("text, number", [("2x", 160.0), ("0.5x", 40.0), ("+10%", 88.0), ("-25%", 60.0), ("7e3", 7000.0), ("50GB/s", 5e10), ("+1KiB", 1104.0),
                                          ("-30", 50.0), ("400Gbit/s", 5e10), ("3us", 3e-6), ("2TFLOP/s", 2e12), ("96GiB", 96 * 2**30)])
def test_amounts(text, number):
    (_, change), = scenario(f"device.x={text}").changes
    assert change(80.0) == pytest.approx(number, rel=1e-12)


@pytest.mark.parametrize("text", ["", "memory", "memory=", "=2x", "memory=2y", "memory=+2x", "memory=10%", "memory=0x", "memory=1.2.3", "a=1,a=2",
                                  "links.a.bandwidth=400Gb/s", "memory=x"])
def test_scenarios_that_do_not_parse(text):
    with pytest.raises(UsageError):
        scenario(text)


def test_changes_of_a_scenario_hold_together():
    mesh, options, profile = scenario("mesh.dp=2x, memory=-50%, links.infiniband.bandwidth=2x").applied(MESH, OPTIONS, H100)
    assert (str(mesh), options.memory_budget, profile.links[1].bandwidth) == ("dp=8", H100.device.memory_capacity / 2, 1e11)


@pytest.mark.parametrize("text, error, words", [
    ("links.infiniband.bandwith=2x", UsageError, "did you mean links.infiniband.bandwidth"), ("mesh.tp=2x", MeshError, "the axes are dp"),
    ("mesh.dp=0.3x", UsageError, "1.2 ranks"), ("memory=-200GiB", UsageError, "leaves no memory"), ("memori=2x", UsageError, "did you mean memory"),
    ("device.peak=0.1x,links.nvlink.efficiency=2x", autoshard.AutoshardError, "efficiency is 1.64")])
def test_what_cannot_be_is_said_before_planning(text, error, words):
    with pytest.raises(error, match=words):
        scenarios([text], MESH, OPTIONS, H100)
    with pytest.raises(UsageError, match="capacity decides nothing"):
        scenarios(["device.memory_capacity=2x"], MESH, replace(OPTIONS, memory_budget=1e9), H100)


# -- the table --------------------------------------------------------------------------------------

def test_rows_are_the_plans_of_the_changed_machine(table, tmp_path):
    slow = changed(H100, "links.nvlink.bandwidth", lambda number: number / 4)
    file = tmp_path / "slow.json"
    assert table.rows[0].plan.cluster["links"] == slow.snapshot()["links"]
    wide = planner(seeds=SPLIT).plan("dp=8")
    assert table.rows[2].plan.objective_s == pytest.approx(wide.objective_s, rel=1e-9) and str(table.rows[2].plan.mesh) == "dp=8"
    table.rows[0].plan.save(file)
    assert Plan.load(file).objective_s == table.rows[0].plan.objective_s
    assert all(row.gain_s == table.today.objective_s - row.plan.objective_s for row in table.rows if row.plan is not None)
    assert table.rows[1].gain_s > 0 > table.rows[0].gain_s


def test_planning_anew_is_never_worse_than_todays_plan(table):
    for row in table.rows:
        if row.kept_s is not None:
            assert row.plan.objective_s <= row.kept_s * (1 + 1e-9)
            assert row.changes or row.kept_s == pytest.approx(row.plan.objective_s, rel=1e-9)
    assert table.rows[2].kept_s is None, "on another mesh it is another plan"


def test_what_does_not_fit_is_a_row(table):
    row = table.rows[3]
    assert row.plan is None and "no plan fits" in row.why and row.to_dict(table.today)["step_s"] is None
    assert len(table.cells()) == 6 and "does not fit" in table.cells()[4] and "What if" in table._repr_html_()
    assert json.loads(json.dumps(table.to_dict()))["what_if"][3]["why"] == row.why


def test_the_same_machine_changes_nothing():
    same = planner().what_if("dp=4", ["links.nvlink.bandwidth=1x"])
    row, = same.rows
    assert (row.gain_s, row.changes, row.kept_s) == (0.0, (), pytest.approx(same.today.objective_s, rel=1e-12))


def test_changes_are_counted(table):
    plan = table.today
    name = next(iter(plan.placements))
    other = replace(plan, kind="another kind", placements={**plan.placements, name: (7,)}, recompute=("a", "b"), offload=("c",))
    assert what_changed(plan, other) == ["1 weight stored otherwise", "2 ops recomputed instead of 0",
                                         "1 optimizer states on the host instead of 0", "now: another kind"]


def test_stages_and_open_meshes_are_refused():
    for mesh in ("auto:4", "pp=2,dp=2"):
        with pytest.raises(UsageError, match="mesh that is given"):
            planner().what_if(mesh, ["memory=2x"])
        with pytest.raises(UsageError, match="mesh that is given"):
            planner().worth(mesh)


# -- what memory is worth ---------------------------------------------------------------------------

@pytest.fixture(scope="module")
def gpt():
    return planner(models.gpt, 64, LONG)


def test_a_budget_that_does_not_bind_is_worth_nothing(gpt):
    plan = gpt.worth("dp=4")
    assert not plan.worth.binds(plan.objective_s) and plan.worth.gib_s == 0.0
    assert what.memory_worth(plan)[0] == "more memory changes nothing: no plan is faster, whatever the memory (proven)"


def test_worth_is_the_difference_of_plans_around(gpt, tmp_path):
    peak = gpt.plan("dp=4").memory["total"]
    budget, step = 0.92 * peak, 0.08 * peak
    plan = gpt.worth("dp=4", memory_budget=budget, step=step)
    around = [planner(models.gpt, 64, LONG).plan("dp=4", memory_budget=budget + sign * step).objective_s for sign in (-1, 1)]
    assert plan.worth.binds(plan.objective_s)
    assert [plan.worth.less.step_s, plan.worth.more.step_s] == pytest.approx(around, rel=1e-9)
    assert plan.worth.gib_s == pytest.approx((around[0] - around[1]) / (2 * step) * 2**30) and plan.worth.gib_s > 0
    assert plan.worth.more.step_s <= plan.objective_s <= plan.worth.less.step_s
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json").worth == plan.worth
    lines = what.memory_worth(plan)
    assert lines[0].startswith("all the memory there could be saves at most") and any("less" in x and "costs" in x for x in lines)


# -- autoshard.Planner ------------------------------------------------------------------------------

def test_another_batch_is_another_problem_and_the_first_one_stays():
    with torch.device("meta"):
        model, inputs = models.mlp.build("tiny", batch=64)
        _, more = models.mlp.build("tiny", batch=256)
    mine = autoshard.Planner(model, inputs, loss_fn=models.mlp.loss)
    small, large = mine.plan("dp=4"), mine.plan("dp=4", more)
    assert large.objective_s > small.objective_s
    again = mine.plan("dp=4")
    assert again == replace(small, timings={}) and "trace" not in again.timings


def batches(module, *rows: int):
    with torch.device("meta"):
        built = [module.build("tiny", batch=n) for n in rows]
    return built[0][0], [inputs for _, inputs in built]


def test_another_batch_starts_from_the_plans_of_the_one_before(monkeypatch):
    model, (first, second, odd) = batches(models.gpt, 64, 128, 6)
    mine = autoshard.Planner(model, first, loss_fn=models.gpt.loss, time_limit=30.0)
    mine.plan("dp=4")
    made = []
    monkeypatch.setattr(program, "starting_plans", lambda formulation: made.append(formulation) or starting_plans(formulation))
    there = mine.plan("dp=4", second)
    assert not made
    mine.plan("dp=4", odd)  # 6 rows on 4 ranks: other strategies
    assert len(made) == 1
    alone = autoshard.plan(model, "dp=4", second, loss_fn=models.gpt.loss, time_limit=30.0)
    assert (there.objective_s, there.status) == (pytest.approx(alone.objective_s, rel=1e-9), alone.status)


def test_the_batch_that_was_used_longest_ago_is_forgotten():
    model, inputs = batches(models.mlp, 64, 128, 256, 512, 1024)
    mine = autoshard.Planner(model, inputs[0], loss_fn=models.mlp.loss)
    for batch in (*inputs[:4], inputs[0], inputs[4]):  # the first one again before the fifth comes
        mine.plan("dp=4", batch)
    assert "trace" not in mine.plan("dp=4", inputs[0]).timings
    assert "trace" in mine.plan("dp=4", inputs[1]).timings


def test_options_of_a_call_come_before_those_of_the_planner():
    mine = planner(optimizer="sgd")
    assert mine.plan("dp=4").settings["optimizer"] == "sgd"
    assert mine.plan("dp=4", optimizer="adamw").settings["optimizer"] == "adamw"
    with pytest.raises(UsageError, match="memory= is no option of a plan; there are .*memory_budget"):
        mine.plan("dp=4", memory="1GiB")


def test_a_model_that_is_frozen_is_traced_anew():
    with torch.device("meta"):
        model, inputs = models.mlp.build("tiny", batch=64)
    mine = autoshard.Planner(model, inputs, loss_fn=models.mlp.loss)
    mine.plan("dp=4")
    next(model.parameters()).requires_grad_(False)
    assert "trace" in mine.plan("dp=4").timings
