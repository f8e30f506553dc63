"""Programs of a batch made of that of another one and a trace of few layers: those of a trace, hash by hash, or none."""
from __future__ import annotations

from functools import partial
from importlib import import_module

import pytest
import torch
from torch import nn

from autoshard import Pipeline
from autoshard.base.precision import Precision
from autoshard.pipeline.microbatches.batch import Batch
from autoshard.pipeline.microbatches.few_layers import made_from_one
from autoshard.program.trace import trace

mse = nn.functional.mse_loss


def made(model, known, call, loss, **how):
    """What is made for `call` of the program of `known`, and its trace."""
    how = {"loss_fn": loss, "training": True, **how}
    return made_from_one(trace(model, known, **how), partial(trace, model, call, **how)), trace(model, call, **how)


@pytest.mark.parametrize("name", ["gpt", "llama", "bert", "vit", "t5", "moe"])
def test_the_program_is_that_of_a_trace(name):
    module = import_module(f"models.{name}")
    with torch.device("meta"):
        (model, one), (_, other) = (module.build("tiny", layers=8, batch=rows) for rows in (8, 12))
    found, traced = made(model, one, other, module.loss)
    assert found is not None and found.graph.hash == traced.graph.hash
    assert [op.where for op in found.graph.ops] == [op.where for op in traced.graph.ops]
    assert found.calling.inputs == traced.calling.inputs and found.graph.idle == traced.graph.idle


def test_another_length_and_a_policy_are_no_obstacle():
    module = import_module("models.llama")
    with torch.device("meta"):
        (model, one), (_, other) = (module.build("tiny", layers=8, batch=rows, seq=seq) for rows, seq in ((8, 32), (4, 16)))
    found, traced = made(model, one, other, module.loss, precision=Precision())
    assert found is not None and found.graph.hash == traced.graph.hash


def test_few_layers_are_traced(monkeypatch):
    """By a batch that knows another one."""
    module = import_module("models.gpt")
    with torch.device("meta"):
        (model, one), (_, other) = (module.build("tiny", layers=8, batch=rows) for rows in (8, 12))
    how = {"loss_fn": module.loss, "training": True}
    first = Batch(model, one, {}, how)
    whole, asked = first.whole, []
    monkeypatch.setattr("autoshard.pipeline.microbatches.batch.trace", lambda *a, **k: asked.append(k) or trace(*a, **k))
    second = Batch(model, other, {}, how, [first])
    assert len(second.whole.graph.ops) == len(whole.graph.ops) and second.whole.graph.hash != whole.graph.hash
    assert [sorted(k["without"]) for k in asked] == [[f"h.{i}" for i in range(2, 7)]]


def test_a_micro_batch_that_is_priced(monkeypatch):
    """Few layers of it are traced, and its program is that of a whole trace; a program that runs is traced anew."""
    module = import_module("models.llama")
    with torch.device("meta"):
        model, inputs = module.build("tiny", layers=8, batch=8)
    asked = []
    monkeypatch.setattr("autoshard.pipeline.microbatches.batch.trace", lambda *a, **k: asked.append("without" in k) or trace(*a, **k))
    batch, options = Batch(model, inputs, {}, {"loss_fn": module.loss, "training": True}), Pipeline(microbatches=4)
    about = batch.about(options)
    assert asked == [False, True] and batch.about(options) is about
    cut = batch.cut(options)
    assert asked == [False, True, False] and cut is not about and cut.graph.hash == about.graph.hash
    assert batch.about(options) is cut


class Layer(nn.Module):
    def __init__(self, few: int = 0) -> None:
        super().__init__()
        self.linear, self.few = nn.Linear(8, 8), few

    def forward(self, x):
        return (x.tanh() if x.shape[0] < self.few else x) + self.linear(x).relu()


class Listed(nn.Module):
    """Asks for its layers by number."""

    def __init__(self, layers) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x):
        for i in range(8):
            x = self.layers[i](x)
        return x


def calls(*rows):
    return [(torch.zeros(n, 8), torch.zeros(n, 8)) for n in rows]


@pytest.mark.parametrize("few", [0, 5])
def test_layers_that_look_at_the_batch(few):
    """Where a layer that is traced does something else at the other batch, all of them are traced."""
    model = nn.Sequential(*(Layer(few) for _ in range(8)))
    found, traced = made(model, *calls(8, 4), mse)
    assert (found is None) == bool(few)
    assert few or found.graph.hash == traced.graph.hash


def test_a_model_that_counts_its_layers_is_traced_whole():
    found, traced = made(Listed(Layer() for _ in range(8)), *calls(8, 4), mse)
    assert found is None and traced.graph.ops


def test_layers_with_one_weight_are_traced_whole():
    layers = [Layer() for _ in range(8)]
    for layer in layers[1:]:
        layer.linear.weight = layers[0].linear.weight
    assert made(nn.Sequential(*layers), *calls(8, 4), mse)[0] is None


def test_the_model_is_left_as_it_is():
    model = nn.Sequential(*(Layer() for _ in range(8)))
    names, state = [n for n, _ in model.named_modules()], dict(model.named_parameters())
    assert made(model, *calls(8, 4), mse)[0] is not None
    assert [n for n, _ in model.named_modules()] == names and all(p is state[n] for n, p in model.named_parameters())
