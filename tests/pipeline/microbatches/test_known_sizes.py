"""Programs of batches between two that were traced: those of a trace, hash by hash, or none."""
from __future__ import annotations

from importlib import import_module

import pytest
import torch
from torch import nn

from autoshard.pipeline.microbatches.batch import Batch
from autoshard.pipeline.microbatches.known_sizes import made_between


def batch(model, inputs, loss):
    return Batch(model, inputs, {}, {"loss_fn": loss, "training": True})


def between(model, loss, *calls):
    """What is made for the first call of the other two, and what a trace of it gives."""
    own, *others = (batch(model, inputs, loss) for inputs in calls)
    return made_between((own.args, {}), [((b.args, {}), b.whole) for b in others]), own.whole


@pytest.mark.parametrize("name", ["mlp", "gpt", "llama", "bert", "vit", "resnet", "t5", "moe", "dlrm"])
def test_the_program_is_that_of_a_trace(name):
    module = import_module(f"models.{name}")
    with torch.device("meta"):
        built = [module.build("tiny", batch=rows) for rows in (24, 16, 32)]
    found, traced = between(built[0][0], module.loss, *(inputs for _, inputs in built))
    assert found is not None and found.graph.hash == traced.graph.hash and found.calling.inputs == traced.calling.inputs


def squares(out, target):
    return ((out @ out.T) / (out.shape[0] * out.shape[0])).sum() + (out - target).square().mean()


def roots(out, target):
    return (out - target).square().sum() / out.shape[0] ** 0.5


@pytest.mark.parametrize("loss", [squares, roots])
def test_numbers_that_are_no_multiples_of_the_rows_are_seen(loss):
    calls = [(torch.zeros(n, 4), torch.zeros(n, 4)) for n in (8, 4, 16)]
    found, traced = between(nn.Linear(4, 4), loss, *calls)
    assert found is None


@pytest.mark.parametrize("rows", [(32, 16, 24), (16, 16, 32)])
def test_nothing_is_made_beyond_two(rows):
    calls = [(torch.zeros(n, 4), torch.zeros(n, 4)) for n in rows]
    assert between(nn.Linear(4, 4), nn.functional.mse_loss, *calls)[0] is None


def test_other_differences_are_seen():
    calls = [(torch.zeros(n, m), torch.zeros(n, m)) for n, m in ((8, 4), (4, 4), (16, 8))]
    batches = [batch(nn.Identity(), call, nn.functional.mse_loss) for call in calls]
    assert made_between((batches[0].args, {}), [((b.args, {}), None) for b in batches[1:]]) is None
