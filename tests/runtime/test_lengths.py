"""Lengths in buckets: little padding, few of them, and nothing lost."""
from __future__ import annotations

import pytest
import torch

import autoshard
from autoshard.errors import UsageError
from autoshard.runtime.lengths import bucket_length


@pytest.mark.parametrize("waste, multiple", [(0.125, 8), (0.25, 1), (1.0, 16)])
def test_lengths_grow_by_little_and_are_few(waste, multiple):
    found = {n: bucket_length(n, waste, multiple) for n in range(1, 4097)}
    assert all(n <= b and b - n < max(waste * n + 1, 1.5 * multiple) and b % multiple == 0 for n, b in found.items())
    assert all(bucket_length(b, waste, multiple) == b for b in set(found.values())), "a bucket is its own"
    assert list(found.values()) == sorted(found.values())
    assert len(set(found.values())) <= 12 / waste + 1


def test_a_batch_is_padded_where_it_says():
    batch = {"ids": torch.arange(37)[None].repeat(2, 1), "labels": torch.ones(2, 37, dtype=torch.int64), "scale": torch.ones(3), "note": "as it is"}
    out = autoshard.pad_to_bucket(batch, {"ids": 7, "labels": -100})
    assert out["ids"].shape == out["labels"].shape == (2, 40)
    assert torch.equal(out["ids"][:, :37], batch["ids"]) and set(out["ids"][:, 37:].flatten().tolist()) == {7}
    assert set(out["labels"][:, 37:].flatten().tolist()) == {-100} and out["scale"] is batch["scale"] and out["note"] == "as it is"
    first = autoshard.pad_to_bucket({"x": torch.ones(5, 2, 3)}, {"x": 0.5}, dim=0, multiple=4)["x"]
    assert first.shape == (8, 2, 3) and first[5:].eq(0.5).all() and first[:5].eq(1).all()
    assert autoshard.pad_to_bucket({"x": torch.ones(1, 40)}, {"x": 0})["x"].shape == (1, 40)


def test_mistakes_are_named():
    with pytest.raises(UsageError, match="no tensor 'y'; it has x"):
        autoshard.pad_to_bucket({"x": torch.ones(1, 4)}, {"y": 0})
    with pytest.raises(UsageError, match="different lengths in dim 1: x 4, y 5"):
        autoshard.pad_to_bucket({"x": torch.ones(1, 4), "y": torch.ones(1, 5)}, {"x": 0, "y": 0})
    with pytest.raises(UsageError, match="at least 1"):
        bucket_length(0)
