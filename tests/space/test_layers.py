"""Repeated layers: corresponding ops share a class, everything else is free."""
from collections import defaultdict

import pytest
import torch
from small_models import Block, Stack
from torch import nn

from autoshard.base.precision import Precision
from autoshard.program.trace import trace
from autoshard.space.layers import op_path, repeated_layers
from models import bert, gpt, llama, moe, resnet, t5, vit


def classes_of(model, args, loss_fn=None):
    graph = trace(model, args, loss_fn=loss_fn).graph
    members = defaultdict(list)
    for name, number in repeated_layers(graph).items():
        members[number].append(graph.op(name))
    return graph, members


def without_index(op):
    return tuple("*" if part.isdigit() else part for part in op_path(op))


@pytest.mark.parametrize("module", [gpt, llama, bert, vit, moe, t5], ids=lambda m: m.__name__)
def test_inner_layers_are_tied(module):
    with torch.device("meta"):
        model, example = module.build("tiny", layers=6)
    graph, members = classes_of(model, example, module.loss)
    assert members
    for ops in members.values():
        assert len(ops) == 4, "six layers but the first and the last"
        assert len({(without_index(op), op.kind, op.phase, op.outputs) for op in ops}) == 1
        assert len({graph.calls[op.name] for op in ops if op.kind == "call"}) <= 1
        indices = [next(p for p in op_path(op) if p.isdigit()) for op in ops]
        assert sorted(indices) == ["1", "2", "3", "4"]
    tied = [op for ops in members.values() for op in ops]
    assert {op.kind for op in tied} == {"param", "call", "output"}
    assert {op.phase for op in tied} == {"forward", "backward"}
    inner = [op for op in graph.of_kind("param") if any(p in "1234" for p in op_path(op) if p.isdigit())]
    assert {op.name for op in inner} <= {op.name for op in tied}, "every parameter of an inner layer is tied"


def test_what_a_precision_policy_casts_is_tied_too():
    with torch.device("meta"):
        model, example = llama.build("tiny", layers=5)
    graph = trace(model, example, loss_fn=llama.loss, precision=Precision()).graph
    casts = [op.name for op in graph.of_kind("call") if "_to_copy" in str(op.target) and not op.module]
    parameters = len(graph.of_kind("param"))
    tied = repeated_layers(graph).keys() & casts
    assert len(tied) == 2 * 3 * (parameters - 3) // 5, "of three layers of five, for every parameter one forward and one of its gradient"


def test_ties_are_consistent_with_wiring():
    with torch.device("meta"):
        model, example = llama.build("tiny", layers=5)
    graph, members = classes_of(model, example, llama.loss)
    number = {op.name: n for n, ops in members.items() for op in ops}
    for ops in members.values():
        wires = {tuple(number.get(r.op) for r in op.refs if op_path(graph.op(r.op))[:2] == op_path(op)[:2]) for op in ops}
        assert len(wires) == 1


def test_two_layers_are_free():
    with torch.device("meta"):
        model, example = llama.build("tiny", layers=2)
    assert not classes_of(model, example, llama.loss)[1]


def test_unequal_siblings_are_free_and_equal_ones_found_among_them():
    class Mixed(nn.Module):
        def __init__(self, widths):
            super().__init__()
            self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, w), nn.ReLU(), nn.Linear(w, 8)) for w in widths)

        def forward(self, x):
            for layer in self.layers:
                x = x + layer(x)
            return x

    assert not classes_of(Mixed([4, 5, 6, 7, 8]), (torch.randn(2, 8),))[1]
    _, members = classes_of(Mixed([4, 4, 6, 4, 6, 4, 4]), (torch.randn(2, 8),))
    tied = {frozenset(op_path(op)[1] for op in ops) for ops in members.values()}
    assert tied == {frozenset("135"), frozenset("24")}


def test_lists_inside_lists():
    stages = nn.Sequential(nn.Linear(8, 8), Stack(), nn.Linear(8, 4))
    stages[1].blocks.extend(Block() for _ in range(2))
    _, members = classes_of(stages, (torch.randn(2, 8),))
    assert members and {op_path(op)[:3] for ops in members.values() for op in ops} == {("1", "blocks", i) for i in "123"}


def test_resnet_stages():
    with torch.device("meta"):
        model, example = resnet.build("50", batch=2)
    _, members = classes_of(model, example, resnet.loss)
    assert {len(ops) for ops in members.values()} == {2, 3, 5}, "stages of 3, 4, 6 and 3, without their first blocks"
