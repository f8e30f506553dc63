"""Among plans of equal cost the one that stores least."""
import pytest
import torch
from torch import nn

import autoshard
from autoshard.base.spec import R
from autoshard.decide import backends
from models import llama


def wide():
    return nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 64)), (torch.randn(8, 64),)


class Both(nn.Module):
    """One weight, read as it is and transposed."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(64, 64))

    def forward(self, x):
        return torch.tanh(x @ self.weight) @ self.weight.t()


def planned(model, inputs, mesh="tp=4", seeds=None):
    return autoshard.plan(model, mesh, inputs, training=False, seeds=seeds, cluster="h100-dgx")


@pytest.mark.parametrize("build, seeds", [
    (wide, {"0": "-,tp", "2": "-,tp"}),
    (lambda: (lambda m, b: (m, b[:1]))(*llama.build(batch=4, seq=8, vocab=252)), {"layers.0.feed_forward.w1": "-,-,tp"}),
    (lambda: (Both(), (torch.randn(8, 64),)), {"tanh_0": "-,tp"}),
])
def test_less_is_stored_in_the_same_time(build, seeds, monkeypatch):
    model, inputs = build()
    least = planned(model, inputs, seeds=seeds)
    monkeypatch.setattr(backends, "with_least_stored", lambda program, found: found)
    any_of_them = planned(model, inputs, seeds=seeds)
    assert (least.objective_s, least.bound_s, least.status) == (any_of_them.objective_s, any_of_them.bound_s, any_of_them.status)
    assert least.memory["parameters"] <= any_of_them.memory["parameters"]
    assert [(c.kind, c.nbytes) for c in least.collectives] == [(c.kind, c.nbytes) for c in any_of_them.collectives]


def test_slices_that_are_read_are_what_is_stored():
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4096, 16384), nn.ReLU(), nn.Linear(16384, 16384), nn.ReLU(), nn.Linear(16384, 4096))
        plan = planned(model, (torch.randn(64, 4096),))
    split = sum(p.numel() for n, p in model.named_parameters() if n != "4.bias")
    assert plan.status == "optimal" and plan.memory["parameters"] == 4 * (split // 4 + 4096), "all but the last bias, which is added to a sum"


def test_a_seed_is_kept():
    plan = planned(*wide(), seeds={"0": "-,tp", "0.weight": "-,-"})
    assert plan.ops["param:0.weight"].outputs == ((R,),)
