"""Mesh, micro-batches and schedule left open: what is chosen, what is said of the rest, and that bounds are bounds."""
from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

import autoshard
from autoshard import Pipeline
from autoshard.base.mesh import AnyMesh, Mesh, mesh_or_any, parse_mesh
from autoshard.base.plan import Plan
from autoshard.base.windows import ONCE, is_accumulator
from autoshard.cost.cluster import load_cluster
from autoshard.cost.compute import started_seconds
from autoshard.cost.fusion import NOTHING, untouched
from autoshard.decide import refine
from autoshard.decide.options import Options
from autoshard.decide.phase_timer import PhaseTimer
from autoshard.errors import ClusterError, InfeasibleError, MeshError, UsageError
from autoshard.pipeline.action_lists.network import network_of
from autoshard.pipeline.microbatches.batch import Batch
from autoshard.pipeline.schedules import make_schedule
from autoshard.pipeline.shapes.choose import Asked
from autoshard.pipeline.shapes.decide import LOOKS, OWN, TOLERANCE
from autoshard.pipeline.shapes.floors import Floor
from autoshard.pipeline.shapes.least_play import least_played
from autoshard.pipeline.shapes.mesh_prices import MeshPricer, Sizes, traced_count
from autoshard.pipeline.shapes.meshes import Slot
from autoshard.pipeline.shapes.partitions import course_of
from autoshard.planner.one_stage import prices
from autoshard.planner.open_mesh import searches
from autoshard.search.partition.feasible import Stages
from models import gpt, llama

OPTIONS = Options(cluster="cpu-gloo", pipeline=Pipeline(microbatches="auto"))


def small(batch=4, **sizes):
    torch.manual_seed(0)
    with torch.device("meta"):
        return llama.build(batch=batch, seq=8, **{"layers": 2, "vocab": 251, **sizes})


def plan(mesh, batch=4, pipeline=None, **options):
    model, inputs = small(batch)
    return autoshard.plan(model, mesh, inputs, loss_fn=llama.loss, pipeline=pipeline, **{"cluster": "cpu-gloo", **options})


@pytest.fixture(scope="module")
def chosen():
    return plan("auto:2")


def test_a_mesh_is_chosen_and_planned(chosen):
    """The plan is that of its shape: planned again with all of it given, it costs the same."""
    assert chosen.mesh.size == 2
    best, = (s for s in chosen.shapes if s.chosen)
    assert best.mesh == str(chosen.mesh) and best.step_s == chosen.objective_s
    given = Pipeline.from_data(chosen.pipeline["options"]) if chosen.pipeline else Pipeline()
    again = plan(str(chosen.mesh), pipeline=replace(given, microbatches=best.microbatches))
    assert again.objective_s == pytest.approx(chosen.objective_s)
    assert again.graph_hash == chosen.graph_hash


def test_every_shape_has_its_line(chosen):
    """A mesh of each kind, numbers of micro-batches that divide, and of each what is known."""
    assert {s.mesh for s in chosen.shapes} == {"dp=2", "tp=2", "pp=2"}
    assert {s.microbatches for s in chosen.shapes} == {1, 2, 4}
    for s in chosen.shapes:
        assert s.step_s is not None or s.about_s is not None or s.why
        assert s.bound_s is not None and s.bound_s <= (s.step_s or s.about_s or s.bound_s) * (1 + 1e-9)
    assert min(s.step_s for s in chosen.shapes if s.step_s) == chosen.objective_s
    assert chosen.bound_s == pytest.approx(min(chosen.objective_s, *(s.bound_s for s in chosen.shapes)))
    assert chosen.gap == pytest.approx(1 - chosen.bound_s / chosen.objective_s)
    assert Plan.from_json(chosen.to_json()).shapes == chosen.shapes


def test_a_deep_model_is_priced_by_blocks_without_stages_too(chosen, monkeypatch):
    """Only the best two are planned, and bounds hold for them."""
    monkeypatch.setattr("autoshard.pipeline.shapes.choose.DEEP", 0)
    made = plan("auto:2")
    planned = [s for s in made.shapes if s.step_s is not None]
    assert 1 <= len(planned) <= 2 and made.objective_s == min(s.step_s for s in planned) <= chosen.objective_s * 1.05
    assert any(s.about_s is not None and not s.mesh.startswith("pp") for s in made.shapes)
    assert all(s.bound_s <= s.step_s * (1 + 1e-9) for s in planned)


def test_bounds_hold_for_plans():
    """Blocks at their floors are below every plan of their shape, with another cut, schedule and number of micro-batches too."""
    model, inputs = small()
    batch, clock = Batch(model, inputs, {}, {"loss_fn": llama.loss, "training": True}), PhaseTimer()
    cluster = load_cluster("cpu-gloo")
    found = searches(batch.whole, OPTIONS, clock, cluster)
    asked = Asked(2, None, OPTIONS.pipeline, cluster, 1e15)
    pricer = MeshPricer(Sizes(batch, OPTIONS.pipeline, 4, 2), 2, asked.mesh_of, cluster, 1e15, found)
    for mesh, slot in (("dp=2", Slot(2, 1, 2)), ("tp=2", Slot(1, 2, 2))):
        made = plan(mesh, pipeline=Pipeline(microbatches=2))
        for look in range(1, LOOKS + 1):
            floor = pricer.floor(slot, look)
            assert 0.3 * made.objective_s < 2 * floor.whole.sum() + floor.once.sum() <= made.objective_s * (1 + 1e-6)
            assert all(step.sum() <= made.objective_s * (1 + 1e-6) for step in floor.steps)
            assert (floor.forward <= floor.whole).all()
        assert 0.3 * made.objective_s < max(step.sum() for step in floor.steps)


@pytest.mark.parametrize("cluster", ["h100-dgx", "cpu-gloo"])
def test_starting_kernels_bounds_small_micro_batches(cluster):
    """No strategy of an op is faster than its kernel starts. So shapes with many micro-batches of a small model need no search to be ruled out."""
    model, inputs = small()
    profile, options = load_cluster(cluster), replace(OPTIONS, cluster=cluster)
    batch = Batch(model, inputs, {}, {"loss_fn": llama.loss, "training": True})
    pricer = MeshPricer(Sizes(batch, options.pipeline, 4, 2), 4, Asked(4, None, options.pipeline, profile, 1e15).mesh_of, profile, 1e15,
                        replace(searches(batch.whole, options, PhaseTimer(), profile), run=None, step=None, plan=None))
    table = prices(batch.on(parse_mesh("dp=2,tp=2"), Pipeline(microbatches=2)), parse_mesh("dp=2,tp=2"), options)
    kept = untouched(table.graph, profile.device)
    started = {op.name: 2 * started_seconds(table.graph.calls[op.name], profile.device, kept.get(op.name, NOTHING))
               for op in table.graph.of_kind("call") if op.phase not in ONCE}
    assert all(seconds <= table.ops[name].compute.min() for name, seconds in started.items())
    floor, made = pricer.floor(Slot(2, 2, 2), 1), plan("dp=2,tp=2", pipeline=Pipeline(microbatches=2), cluster=cluster)
    assert 0.3 * sum(started.values()) < 2 * floor.whole.sum() <= made.objective_s * (1 + 1e-6)
    whole = plan("dp=2,tp=2", cluster=cluster)
    assert cluster == "cpu-gloo" or 2 * floor.whole.sum() > whole.objective_s, "the search would have to look at it more closely"


def test_bounds_count_what_adds_up_gradients():
    """Of several micro-batches; where blocks share a weight they may share that too."""
    with torch.device("meta"):
        model, inputs = gpt.build(batch=4, seq=8, layers=2, width=16, heads=2, vocab=251)
    cluster = load_cluster("h100-dgx")
    batch = Batch(model, inputs, {}, {"loss_fn": gpt.loss, "training": True})
    pricer = MeshPricer(Sizes(batch, OPTIONS.pipeline, 4, 2), 2, Asked(2, None, OPTIONS.pipeline, cluster, 1e15).mesh_of, cluster, 1e15,
                        searches(batch.whole, OPTIONS, PhaseTimer(), cluster))
    several, one = (pricer.sizes.stage(0, len(pricer.labels), count, False).graph for count in (2, 1))
    free = {op.name for op in filter(is_accumulator, several.ops)} & pricer._shared(several)
    assert free == {"sum:wte.weight"}
    assert {op.name for op in filter(is_accumulator, one.ops)} <= pricer._shared(one)
    made = autoshard.plan(model, "dp=2", inputs, loss_fn=gpt.loss, cluster="h100-dgx", pipeline=Pipeline(microbatches=2))
    step, = (step for step in pricer.floor(Slot(2, 1, 2), LOOKS).steps[1:])
    assert 0.5 * made.objective_s < step.sum() <= made.objective_s * (1 + 1e-6)


def test_bounds_hold_for_plans_in_little_memory():
    """Where a plan computes again what it cannot keep, a floor with memory in it is higher, and not above the plan."""
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Linear(64, 8)) for _ in range(6)))
    inputs = (torch.randn(4096, 8), torch.randn(4096, 8))
    ample = autoshard.plan(model, "dp=2", inputs, loss_fn=nn.functional.mse_loss, cluster="cpu-gloo")
    limit = 0.35 * ample.memory["total"]
    made = autoshard.plan(model, "dp=2", inputs, loss_fn=nn.functional.mse_loss, cluster="cpu-gloo", memory_budget=limit)
    assert made.objective_s > ample.objective_s * (1 + 1e-9)
    batch, cluster = Batch(model, inputs, {}, {"loss_fn": nn.functional.mse_loss, "training": True}), load_cluster("cpu-gloo")
    options = replace(OPTIONS, memory_budget=limit)
    found = searches(batch.whole, options, PhaseTimer(), cluster)
    pricer = MeshPricer(Sizes(batch, options.pipeline, 4096, 2), 2, Asked(2, None, options.pipeline, cluster, limit).mesh_of, cluster, limit, found)
    course, floor = course_of(make_schedule("1f1b", 1, 1)), pricer.floor(Slot(2, 1, 4096), LOOKS)
    seeing = ({"needs": None, "priced": None}, {"priced": None}, {"needs": None}, {})
    blind, *others = (Stages(f.chain(False), course, work=f.work(course)).bound() for f in (replace(floor, _known={}, **left) for left in seeing))
    assert all(blind * 1.01 < bound <= made.objective_s * (1 + 1e-6) for bound in others)
    assert floor.priced is not None and floor.whole_blocks(course) <= made.objective_s * (1 + 1e-6)
    assert 0.0 < floor.needs.always(1).sum() <= made.memory["parameters"] + made.memory["optimizer"]


@pytest.mark.parametrize("cluster", ["cpu-gloo", "h100-dgx"])
@pytest.mark.parametrize("schedule, cuts", [("1f1b", "3"), ("interleaved", "134"), ("zb1p", "245"), ("zbv", "135")])
def test_played_bounds_hold_for_pipelines(schedule, cuts, cluster):
    """In ample memory, and, where that takes no long search, in little of it."""
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Linear(64, 8)) for _ in range(6)))
    inputs = (torch.randn(4096, 8), torch.randn(4096, 8))
    batch, profile, slot = Batch(model, inputs, {}, {"loss_fn": nn.functional.mse_loss, "training": True}), load_cluster(cluster), Slot(2, 1, 1024)
    pipeline, limit = Pipeline(microbatches=4, schedule=schedule, cuts=tuple(cuts), chunks=(len(cuts) + 1) // 2), 1e15
    table = make_schedule(schedule, 2, 4, (len(cuts) + 1) // 2)
    network, course = network_of(table), course_of(table)
    for part in (0.6, 0.0) if (schedule, cluster) == ("1f1b", "cpu-gloo") else (0.0,):
        pricer = MeshPricer(Sizes(batch, OPTIONS.pipeline, 4096, 2), 4, Asked(4, None, OPTIONS.pipeline, profile, limit).mesh_of, profile, limit,
                            searches(batch.whole, replace(OPTIONS, cluster=cluster, memory_budget=limit), PhaseTimer(), profile))
        made = autoshard.plan(model, "pp=2,dp=2", inputs, loss_fn=nn.functional.mse_loss, cluster=cluster, memory_budget=limit, pipeline=pipeline)
        for look in (OWN, LOOKS):
            floor = pricer.floor(slot, look)
            assert 0.3 * made.objective_s < least_played(network, course, floor) <= made.objective_s * (1 + 1e-6), look
            assert floor.whole_blocks(course) <= made.objective_s * (1 + 1e-6)
        assert floor.input.max() > 0.0
        limit = part * made.memory["total"]


def test_seconds_at_different_prices_do_not_add_up():
    floor = Floor(np.zeros(2), np.ones(2), np.zeros(2), (np.array([0.0, 2.0]), np.array([2.5, 0.0])))
    work, = floor.work(course_of(make_schedule("gpipe", 1, 1)))
    assert work[0, 2] == 2.5 and work[0, 1] == 2.5 and work[1, 2] == 2.0


def test_micro_batches_are_chosen_on_a_given_mesh():
    made = plan("pp=2", pipeline=Pipeline(microbatches="auto", schedule="1f1b"))
    assert {s.mesh for s in made.shapes} == {"pp=2"}
    assert {s.schedule for s in made.shapes} == {"1f1b"}
    assert made.pipeline["microbatches"] in (2, 4)
    told = [plan("pp=2", pipeline=Pipeline(microbatches=n, schedule="1f1b")) for n in (2, 4)]
    assert made.objective_s <= min(p.objective_s for p in told) * 1.02


def test_a_model_that_micro_batches_would_change_gets_a_mesh():
    """Batch norm in training: no stages and no micro-batches, and the notes say why."""
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 4))
    made = autoshard.plan(model, "auto:2", (torch.randn(6, 8), torch.randn(6, 4)), loss_fn=nn.functional.mse_loss, cluster="cpu-gloo")
    assert {s.microbatches for s in made.shapes} == {1} and {s.mesh for s in made.shapes} == {"dp=2"}
    assert any("no stages and no micro-batches" in note and "batch_norm" in note for note in made.notes)


def mlp_and_loss():
    torch.manual_seed(0)
    with torch.device("meta"):
        return nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 16)), (
            torch.empty(32, 64), torch.empty(32, 16)), nn.functional.mse_loss


def llama_and_loss():
    return *small(), llama.loss


MESHES = {"dp=8": Slot(8, 1, 0), "dp=4,tp=2": Slot(4, 2, 0), "dp=2,tp=4": Slot(2, 4, 0), "dp=2,mp=2,tp=2": Slot(2, 2, 0, 2)}


CASES = [pytest.param((mlp_and_loss, "cpu-gloo"), id="mlp"), pytest.param((mlp_and_loss, "h100-dgx"), id="mlp-fused"),
         pytest.param((llama_and_loss, "cpu-gloo"), id="llama", marks=pytest.mark.slow)]


@pytest.fixture(scope="module", params=CASES)
def planned(request):
    """A model, and the step of its best plan on every mesh of up to three axes of 8 devices, each planned by itself: as plans are made, and over
    decision units, which is what bounds are about."""
    made, cluster = request.param
    model, inputs, loss = made()

    def step(mesh, **options):
        return autoshard.plan(model, mesh, inputs, loss_fn=loss, cluster=cluster, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(refine, "MOST", -1)
        over_units = {mesh: step(mesh).objective_s for mesh in MESHES}
    return (model, inputs, loss), step, {mesh: step(mesh).objective_s for mesh in MESHES}, over_units


def test_the_chosen_mesh_is_as_good_as_the_best_of_all_planned_one_by_one(planned):
    """With `thorough` equal, and without it never more than its tolerance dearer than a mesh by hand."""
    _, step, by_hand, over_units = planned
    one = Pipeline(microbatches=1)
    found = step(8, pipeline=one, thorough=True)
    assert {s.mesh for s in found.shapes} == set(by_hand), "one micro-batch is not cut into stages"
    assert found.objective_s == pytest.approx(min(by_hand.values()), rel=1e-9)
    assert all(s.bound_s <= over_units[s.mesh] * (1 + 1e-9) for s in found.shapes)
    two_axes = min(seconds for mesh, seconds in by_hand.items() if "mp" not in mesh)
    assert step(8, pipeline=one).objective_s <= two_axes / (1 - TOLERANCE) * (1 + 1e-9)


def test_bounds_hold_for_plans_without_micro_batches(planned):
    """Chains of ops that one kernel runs go over blocks' borders, nothing is accumulated, and an update is made once."""
    (model, inputs, loss), step, _, over_units = planned
    cluster, rows = load_cluster(step("dp=8").cluster["name"]), inputs[0].shape[0]
    options = Options(cluster=cluster.name, pipeline=Pipeline(microbatches="auto"))
    batch = Batch(model, inputs, {}, {"loss_fn": loss, "training": True})
    pricer = MeshPricer(Sizes(batch, options.pipeline, rows, traced_count(rows)), 8, Asked(8, None, options.pipeline, cluster, 1e15).mesh_of,
                        cluster, 1e15, searches(batch.whole, options, PhaseTimer(), cluster))
    for mesh, slot in MESHES.items():
        slot = replace(slot, rows=rows)
        assert pricer.ideal(slot) <= over_units[mesh] * (1 + 1e-9)
        for look in range(1, LOOKS + 1):
            floor = pricer.floor(slot, look)
            work, = floor.work(course_of(make_schedule("gpipe", 1, 1)))
            assert work[0, -1] <= over_units[mesh] * (1 + 1e-6), (mesh, look)
        assert work[0, -1] >= 0.5 * over_units[mesh], "a bound that says something"


def test_a_batch_that_divides_nowhere_gets_a_mesh():
    """Three rows on 8 devices: no axis splits them, and there is a mesh all the same."""
    made = autoshard.plan(nn.Linear(8, 16), "auto:8", (torch.randn(3, 8),), training=False, cluster="h100-dgx")
    assert made.mesh.size == 8 and {s.mesh for s in made.shapes} == {"dp=8", "dp=4,tp=2", "dp=2,tp=4"}


def test_inference_gets_a_mesh():
    model, inputs = small()
    made = autoshard.plan(model, "auto:2", inputs[:1], training=False, cluster="cpu-gloo")
    assert made.mesh.size == 2 and {s.microbatches for s in made.shapes} == {1}


@pytest.mark.parametrize("mesh, pipeline, error, says", [
    ("auto:x", None, MeshError, "auto:64"), ("auto", None, MeshError, "auto:64"), ("auto:0", None, MeshError, "there are 1 to"),
    ("auto:4", Pipeline(microbatches="auto", cuts=["layers.1"]), UsageError, "cuts belong to a mesh"),
    ("auto:4", Pipeline(microbatches="auto", layout="Et|tL"), UsageError, "layout belong to a mesh"),
    ("auto:4", Pipeline(microbatches="auto", schedule="mine.csv"), UsageError, "mine.csv' belong to a mesh"),
    ("auto:5", Pipeline(microbatches=3), UsageError, "divides a batch of 4 rows")])
def test_bad_calls_are_named(mesh, pipeline, error, says):
    with pytest.raises(error, match=says):
        plan(mesh, pipeline=pipeline)


def test_more_devices_than_the_cluster_has():
    with pytest.raises(ClusterError, match="needs 1048576 devices"):
        plan("auto:1048576", cluster="l40s-pcie")


def test_compile_needs_inputs_to_choose_a_mesh():
    with pytest.raises(UsageError, match="auto:1 is chosen for a batch: pass example_inputs to compile, or give a mesh with names, such as 'd=1'"):
        autoshard.compile(nn.Linear(4, 4), "auto:1", cluster="cpu-gloo")


def test_a_number_of_devices_is_a_mesh_to_compile_for():
    x = torch.randn(2, 4)
    compiled = autoshard.compile(nn.Linear(4, 4), 1, (x, x), loss_fn=nn.functional.mse_loss, cluster="cpu-gloo", cache=False)
    assert compiled.plan.mesh.size == 1 and compiled(x, x).requires_grad


def test_meshes_as_text():
    assert mesh_or_any("auto:64") == mesh_or_any(64) == AnyMesh(64) and str(AnyMesh(64)) == "auto:64"
    assert mesh_or_any("dp=2,tp=4") == parse_mesh("dp=2,tp=4") == Mesh(("dp", "tp"), (2, 4))


def test_too_little_memory_for_any_shape_is_proven_without_a_search(monkeypatch):
    monkeypatch.setattr("autoshard.planner.open_mesh.choose", None)
    with pytest.raises(InfeasibleError, match="on each of 2 devices, however they are divided") as found:
        plan("auto:2", memory_budget=65536)
    assert found.value.proven
