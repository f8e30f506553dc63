"""A table over batches, meshes, clusters and budgets: each row is the plan of a call for it alone, and the work is shared."""
from __future__ import annotations

import json

import pytest
import torch

import autoshard
import models.gpt
import models.mlp
from autoshard.errors import ClusterError, MeshError, UsageError
from autoshard.pipeline.microbatches import batch as batches_module
from autoshard.report.commands.sizing import show


def model_and(module, *rows):
    with torch.device("meta"):
        built = [module.build("tiny", batch=n) for n in rows]
    return built[0][0], [inputs for _, inputs in built]


@pytest.fixture(scope="module")
def found():
    model, inputs = model_and(models.gpt, 8, 16)
    return autoshard.sweep(model, ["dp=2", "tp=4", "dp=1024"], inputs, clusters=["cpu-gloo", "l40s-pcie"], loss_fn=models.gpt.loss)


def test_every_row_is_the_plan_of_a_call_for_it(found):
    model, inputs = model_and(models.gpt, 8, 16)
    assert len(found.points) == 12 and len(found.planned) == 10
    for p in found.planned:
        alone = autoshard.plan(model, p.case.mesh, inputs[p.case.samples // 16], loss_fn=models.gpt.loss, cluster=p.case.cluster)
        assert p.plan.objective_s == pytest.approx(alone.objective_s, rel=1e-9), str(p.case)
        assert p.plan.cluster["name"] == p.case.cluster and p.plan.mesh == alone.mesh and p.plan.graph_hash == alone.graph_hash


def test_rates_are_of_the_batch_and_the_step(found):
    for p in found.planned:
        length = p.case.tokens // p.case.samples
        assert p.samples_s == p.case.samples / p.plan.objective_s and p.tokens_s == pytest.approx(length * p.samples_s)
        said = p.to_dict()
        assert said["samples_per_s_and_device"] * said["devices"] == pytest.approx(said["samples_per_s"])
    assert {p.case.samples for p in found.points} == {8, 16}


def test_a_case_that_cannot_be_is_a_row_with_its_reason(found):
    missing = [p for p in found.points if p.plan is None]
    assert {(str(p.case.mesh), p.case.cluster) for p in missing} == {("dp=1024", "l40s-pcie")}
    assert all("has 8" in p.why and not p.best and p.samples_s == 0 for p in missing)


def test_the_front_has_what_no_smaller_machine_reaches(found):
    for p in found.planned:
        others = [q for q in found.planned if q.case.cluster == p.case.cluster and q.case.mesh.size <= p.case.mesh.size]
        fastest = max(q.samples_s for q in others)
        smallest = min(q.case.mesh.size for q in others if q.samples_s == fastest)
        assert p.best == (p.samples_s == fastest and p.case.mesh.size == smallest)


def test_the_table_and_json(found, capsys):
    show(found, "gpt:tiny")
    out = capsys.readouterr().out
    assert "Sweep of gpt:tiny" in out and "tokens/s" in out and "samples/s" not in out and "limit" not in out
    assert out.count("\n  *") == 1 + sum(p.best for p in found.points), "rows of the front, and the line that says what a star is"
    assert len(json.loads(json.dumps(found.to_dict()))) == 12 and "dp=1024" in found._repr_html_()


def test_a_batch_is_traced_once(monkeypatch):
    model, inputs = model_and(models.mlp, 64, 128)
    traces = []
    plain = batches_module.trace
    monkeypatch.setattr(batches_module, "trace", lambda *a, **k: traces.append(1) or plain(*a, **k))
    autoshard.sweep(model, ["dp=2", "dp=4", "tp=2"], inputs, clusters=["cpu-gloo", "l40s-pcie"], memory_budgets=["1GiB", "2GiB"],
                    loss_fn=models.mlp.loss)
    assert len(traces) == 2


def test_a_batch_between_two_is_not_traced(monkeypatch):
    """And its plan is that of a call for it alone, of the very program that a trace gives."""
    model, (least, most, middle) = model_and(models.gpt, 8, 16, 12)
    traces = []
    plain = batches_module.trace
    monkeypatch.setattr(batches_module, "trace", lambda *a, **k: traces.append(a[1][0].shape[0]) or plain(*a, **k))
    found = autoshard.sweep(model, ["dp=2"], [least, middle, most], loss_fn=models.gpt.loss, cluster="cpu-gloo")
    assert traces == [8, 16] and [p.case.samples for p in found.points] == [8, 16, 12]
    alone = autoshard.plan(model, "dp=2", middle, loss_fn=models.gpt.loss, cluster="cpu-gloo")
    assert found.points[2].plan.graph_hash == alone.graph_hash and found.points[2].plan.objective_s == pytest.approx(alone.objective_s, rel=1e-9)


def test_less_memory_than_nothing_fits_in_is_not_searched():
    model, inputs = model_and(models.mlp, 64)
    found = autoshard.sweep(model, ["dp=2"], inputs, memory_budgets=[512, "1KiB", "1GiB"], loss_fn=models.mlp.loss, time_limit=10)
    first, second, third = found.points
    assert first.plan is not None and second.proven and "proven" in second.why and third.proven and "1.00 KiB" in third.why
    assert [p.case.memory for p in found.points] == [2**30, 1024, 512]


def test_a_mesh_is_chosen_for_a_number_of_devices():
    model, inputs = model_and(models.mlp, 64)
    found = autoshard.sweep(model, [2, 4], inputs, cluster="cpu-gloo", loss_fn=models.mlp.loss)
    assert [p.plan.mesh.size for p in found.points] == [2, 4] and all(p.plan.shapes for p in found.points)


@pytest.mark.parametrize("meshes, batches, options, error, says", [
    ("dp=2", [()], {}, UsageError, "meshes='dp=2': give a list"), (["dp"], [()], {}, MeshError, "cannot read mesh"),
    (["dp=2"], [torch.zeros(2)], {}, UsageError, "a batch is Tensor"), (["dp=2"], [], {}, UsageError, "batches="),
    (["dp=2"], [()], {"clusters": ["h100"]}, ClusterError, "did you mean"), (["dp=2"], [()], {"memory_budgets": ["x"]}, UsageError, "amount of memory"),
    (["dp=2"], [()], {"memory_budgets": [-1]}, UsageError, "positive"), (["dp=2"], [()], {"tolerance": 1}, UsageError, "no option of a plan")])
def test_bad_calls_are_named_before_the_work(meshes, batches, options, error, says):
    model, inputs = model_and(models.mlp, 64)
    with pytest.raises(error, match=says):
        autoshard.sweep(model, meshes, [inputs if b == () else b for b in batches], loss_fn=models.mlp.loss, **options)
