"""A mesh that is chosen, on processes: one rank chooses, all have its plan, and train as one process does."""
from __future__ import annotations

import copy

import pytest
from harness import on_ranks, whole
from pipeline_cases import Case, subject

import autoshard
from autoshard import Pipeline


def _trained(mesh: str, pipeline: Pipeline | None) -> tuple[str, int, float]:
    """The plan's mesh, how many shapes were tried, and the difference to one process."""
    model, batch, loss = subject(Case("gpt", "pp=2", 2))
    reference = copy.deepcopy(model)
    compiled = autoshard.compile(model, mesh, batch, loss_fn=loss, cluster="cpu-gloo", cache=False, pipeline=pipeline)
    got, want = compiled(*batch), loss(reference(batch[0]), batch[1])
    got.backward()
    want.backward()
    expected = {n: p.grad for n, p in reference.named_parameters()}
    errors = [float((whole(p.grad) - expected[n]).norm() / expected[n].norm()) for n, p in compiled.named_parameters()]
    return str(compiled.plan.mesh), len(compiled.plan.shapes), max(abs(got.item() - want.item()), *errors)


@pytest.mark.slow
@pytest.mark.parametrize("mesh, pipeline", [("auto:2", None), ("pp=2", Pipeline(microbatches="auto", schedule="1f1b"))])
def test_two_processes_with_a_chosen_mesh(mesh, pipeline):
    results = on_ranks(2, _trained, mesh, pipeline)
    assert len({r[:2] for r in results}) == 1
    assert results[0][0] in ("dp=2", "tp=2", "pp=2") and results[0][1] > 1
    assert max(r[2] for r in results) < 1e-9
