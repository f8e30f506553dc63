"""Programs whose mesh axes are taken in parts, all ranks in one process, against the model on one device."""
from __future__ import annotations

import pytest
import torch

import autoshard
from models import llama

WALKED = ("tensor_parallel", "fully_sharded", "random:0")
SIX, TWENTY_EIGHT = {"width": 24, "heads": 6, "kv_heads": 2}, {"width": 56, "heads": 28, "kv_heads": 4}


def check(mesh, asked, sizes, kinds):
    torch.manual_seed(0)
    model, inputs = llama.build(layers=1, vocab=64, hidden=48, batch=2, seq=8, **sizes)
    report = autoshard.verify(model, mesh, inputs, loss_fn=llama.loss, plans=kinds, refine_axes=asked, optimizer="adam")
    assert report.ok, report
    assert all(plan.plan.finer for plan in report.plans), "verified on the parts"
    assert any(c.axis in ("tp//2", "tp%2", "tp%4", "tp//4") for plan in report.plans for c in plan.plan.collectives)


@pytest.mark.parametrize("mesh, asked, sizes", [("tp=8", "tp=4x2", TWENTY_EIGHT), ("tp=4", "auto", SIX)])
def test_numbers_are_those_of_one_device(mesh, asked, sizes):
    check(mesh, asked, sizes, WALKED)


@pytest.mark.slow
@pytest.mark.parametrize("mesh, asked, sizes", [
    ("tp=8", "tp=2x4", TWENTY_EIGHT), ("dp=2,tp=4", "tp=2x2", SIX), ("tp=8", "tp=2x2x2", {"width": 32, "heads": 4, "kv_heads": 2})])
def test_numbers_of_searched_plans_too(mesh, asked, sizes):
    check(mesh, asked, sizes, ("split", *WALKED))
