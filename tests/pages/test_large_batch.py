"""The recipe for large batches keeps the accuracy, and the table says by how much it does not."""
from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch

pytest.importorskip("sklearn", reason="the digits come with scikit-learn")


@pytest.fixture(scope="module")
def recipe():
    path = Path(__file__).resolve().parents[2] / "examples" / "large_batch.py"
    spec = importlib.util.spec_from_file_location("large_batch", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    torch.set_num_threads(1)
    return module


@pytest.mark.slow
def test_a_batch_eight_times_as_large_is_as_accurate(recipe):
    """Two seeds each. A batch of 256 has five steps an epoch; without the scaled learning rate it is points behind."""
    found = {(batch, warmup): sum(each) / len(each) for batch, warmup, each in recipe.table(60, ((32, 0), (256, 5)), seeds=2)}
    assert found[32, 0] > 0.95
    assert abs(found[256, 5] - found[32, 0]) < 0.015, found
    recipe.LR, kept = recipe.LR * 32 / 256, recipe.LR
    try:
        unscaled = recipe.train(256, 60, 0)
    finally:
        recipe.LR = kept
    assert unscaled < found[256, 5], "the learning rate of batch 32 for steps of 256"


def test_the_table_says_how_far_each_row_is_from_the_first(recipe):
    text = recipe.show([(32, 0, [0.97, 0.98]), (256, 5, [0.96, 0.97])])
    assert "| 256 | 0.16 | 5 epochs | 96.50% | 96.0% .. 97.0% | -1.00 |" in text
