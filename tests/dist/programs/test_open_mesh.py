"""A mesh that is chosen, on processes: one rank chooses, all have its plan, and train as one process does."""
from __future__ import annotations

import copy

import pytest

import autoshard
from autoshard import Pipeline
from tests.dist.harness import assert_same_training, on_ranks
from tests.dist.pipeline_cases import Case, subject


def _trained(mesh: str, pipeline: Pipeline | None) -> tuple[str, int]:
    """The plan's mesh, and how many shapes were tried, after three AdamW steps that were those of one process."""
    model, batch, loss = subject(Case("gpt", "pp=2", 2))
    reference = copy.deepcopy(model)
    compiled = autoshard.compile(model, mesh, batch, loss_fn=loss, cluster="cpu-gloo", cache=False, pipeline=pipeline)
    assert_same_training(compiled, reference, [batch] * 3, lambda m, b: m(*b), lambda m, b: loss(m(*b[:-1]), b[-1]))
    return str(compiled.plan.mesh), len(compiled.plan.shapes)


@pytest.mark.slow
@pytest.mark.parametrize("mesh, pipeline", [("auto:2", None), ("pp=2", Pipeline(microbatches="auto", schedule="1f1b"))])
def test_two_processes_with_a_chosen_mesh(mesh, pipeline):
    results = on_ranks(2, _trained, mesh, pipeline)
    assert len(set(results)) == 1
    assert results[0][0] in ("dp=2", "tp=2", "pp=2") and results[0][1] > 1
