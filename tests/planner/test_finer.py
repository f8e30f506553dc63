"""Plans with a mesh axis in parts: where parts come from, that users see their own mesh, and that no plan gets dearer."""
from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch

import autoshard
from autoshard.base.fine_mesh import refined
from autoshard.base.mesh import parse_mesh
from autoshard.base.plan import Plan
from autoshard.decide.options import Options
from autoshard.decide.phase_timer import PhaseTimer
from autoshard.errors import MeshError, PlanError, UsageError
from autoshard.pipeline.microbatches.batch import Batch
from autoshard.planner.finer import finer_meshes, head_counts, plan_and_prices
from autoshard.planner.one_stage import prices
from autoshard.planner.stages import plan_traced
from autoshard.program.calling import Traced
from autoshard.report.page.html import write
from autoshard.report.what import header
from autoshard.runtime.check_plan import check_fits
from autoshard.study.explain import chosen_by, op_table
from models import llama

SLOW = str(Path(__file__).parents[1] / "dist/slow-device.toml")
MESH = parse_mesh("tp=4")
SIX = {"layers": 2, "width": 24, "heads": 6, "kv_heads": 2, "hidden": 48, "vocab": 64}
OPTIONS = Options(cluster=SLOW, refine_axes="auto")


def built(**sizes: int):
    with torch.device("meta"):
        return llama.build(**{**SIX, "batch": 1, "seq": 9, **sizes})


@cache
def traced() -> Traced:
    model, inputs = built()
    return Batch(model, inputs, {}, {"loss_fn": llama.loss, "training": True}).on(MESH, Options().pipeline)


@cache
def found() -> Plan:
    return plan_traced(traced(), MESH, OPTIONS, has_loss=True)


def test_parts_follow_from_heads():
    assert head_counts(traced().graph) == (6, 2)
    named = {size: [str(m) for m in finer_meshes(traced().graph, parse_mesh(size), "auto")] for size in ("tp=4", "tp=8", "dp=2,tp=4", "tp=2", "tp=6")}
    assert named == {"tp=4": ["tp=2x2"], "tp=8": ["tp=2x4", "tp=4x2"], "dp=2,tp=4": ["dp=2,tp=2x2"], "tp=2": [], "tp=6": ["tp=2x3", "tp=3x2"]}


def test_a_plan_with_heads_on_a_part_is_cheaper_and_says_so():
    plan, plain = found(), plan_traced(traced(), MESH, replace(OPTIONS, refine_axes="never"), has_loss=True)
    assert plan.objective_s < 0.95 * plain.objective_s
    assert (plan.mesh, plan.finer, plain.finer) == (MESH, {"tp": (2, 2)}, {})
    assert any("taking axes in parts (tp=2x2)" in note for note in plan.notes)
    assert dict(header(plan))["finer axes"] == "tp=4 as tp//2 (2) and tp%2 (2)" and "finer axes" not in dict(header(plain))
    heads = [plan.ops[op.name].inputs[:2] for op in traced().graph.of_kind("call") if op.phase == "forward" and "scaled_dot" in str(op.target)]
    assert all(q.count(1) == 1 for q, _ in heads), "six heads are split over two of the four ranks"


def test_what_users_hold_lies_on_their_mesh():
    plan = found()
    assert all(len(spec) == 1 for spec in plan.placements.values()) and any(spec != (-1,) for spec in plan.placements.values())
    for op in traced().graph.ops:
        if op.kind != "call":
            assert all(plan.spec_mesh.as_whole(s) is not None for s in (*plan.ops[op.name].inputs, *plan.ops[op.name].outputs)), op.where


def test_nothing_gets_dearer_where_parts_bring_nothing():
    model, inputs = built(heads=4, kv_heads=2, width=32, seq=16)
    plans = [autoshard.plan(model, "tp=4", inputs, loss_fn=llama.loss, cluster="cpu-gloo", refine_axes=asked) for asked in ("never", "tp=2x2")]
    assert plans[1].objective_s <= plans[0].objective_s
    assert plans[1].finer or any("axes in parts (tp=2x2) bring nothing here" in note for note in plans[1].notes)


def test_the_file_has_the_users_mesh_and_the_parts():
    plan = found()
    data = json.loads(plan.to_json())
    assert (data["mesh"], data["finer"]) == ("tp=4", {"tp": [2, 2]}) and all("," not in spec for spec in data["placements"].values())
    again = Plan.from_json(plan.to_json())
    assert again.to_json() == plan.to_json() and again.spec_mesh == plan.spec_mesh
    check_fits(again, traced().graph, MESH)
    assert "finer" not in json.loads(replace(plan, finer={}).to_json())


@pytest.mark.parametrize("wrong, words", [({"tp": [3, 2]}, "multiply to 4"), ({"dp": [2, 2]}, "no mesh axis 'dp'"), ({"tp": "2x2"}, "finer")])
def test_a_file_with_parts_that_are_none(wrong, words):
    data = json.loads(found().to_json())
    with pytest.raises(PlanError, match=words):
        Plan.from_json(json.dumps({**data, "finer": wrong}))


def test_a_plan_that_stores_a_weight_on_a_part_is_refused():
    plan, graph = found(), traced().graph
    op = next(op for op in graph.of_kind("param") if len(op.outputs[0].shape) == 2)
    on_part = replace(plan, ops={**plan.ops, op.name: replace(plan.ops[op.name], outputs=((0, -1),))})
    with pytest.raises(PlanError, match="which no placement on mesh tp=4 says"):
        check_fits(on_part, graph, MESH)
    with pytest.raises(PlanError):
        check_fits(replace(plan, finer={}), graph, MESH)


def test_seeds_are_about_the_users_axes():
    seeded = replace(OPTIONS, seeds={"*.wq.weight": "tp,-", "*.wk.weight": "-,-", "*.wo.weight": "?,-"})
    allowed = prices(traced(), refined(MESH, {"tp": (2, 2)}), seeded).seeds.specs
    by_name = {str(op.target): allowed[op.name] for op in traced().graph.of_kind("param") if op.name in allowed}
    found = {name.split(".")[-2]: specs for name, specs in by_name.items() if name.startswith("layers.0")}
    assert found == {"wq": {(0, 0)}, "wk": {(-1, -1)}, "wo": {(0, 0), (-1, -1)}}


def test_explaining_starts_from_the_plan_and_its_mesh():
    plan, table = plan_and_prices(traced(), MESH, OPTIONS, clock=PhaseTimer(), has_loss=True)
    assert plan.to_json() == found().to_json() and table.mesh == plan.spec_mesh


@pytest.mark.parametrize("mesh, asked, error, words", [
    ("tp=4", "tp=3x2", MeshError, "multiply to 4"), ("tp=4", "dp=2x2", MeshError, "no mesh axis 'dp'"), ("tp=4", "often", MeshError, "cannot read"),
    ("tp=4", 3, UsageError, "write never, auto, or the parts"), ("auto:4", "tp=2x2", UsageError, "the mesh is to be chosen"),
    ("pp=2,tp=4", "tp=2x2", UsageError, "pipeline stages"),
])
def test_what_cannot_be_asked(mesh, asked, error, words):
    model, inputs = built()
    with pytest.raises(error, match=words):
        autoshard.plan(model, mesh, inputs, loss_fn=llama.loss, refine_axes=asked)


def test_a_plan_in_parts_is_simulated_explained_and_shown(tmp_path):
    plan = found()
    model, inputs = built()
    step = autoshard.simulate(plan, model, inputs, loss_fn=llama.loss).step_s
    assert step == pytest.approx(plan.predicted["bucketed_s"], rel=0.02)
    table = prices(traced(), plan.spec_mesh, OPTIONS)
    attention = next(op.name for op in traced().graph.of_kind("call") if "scaled_dot" in str(op.target))
    rows = op_table(chosen_by(plan, table), attention).rows
    assert any("tp//2" in text or "tp%2" in text for text in rows[0].outputs) and rows[0].chosen
    write(tmp_path / "report.html", plan)
    page = (tmp_path / "report.html").read_text()
    assert "tp//2" in page and "tp%2" in page
