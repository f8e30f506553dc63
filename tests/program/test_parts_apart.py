"""Projections of unequal parts become one product for each: the same numbers, and nothing else is touched."""
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from trace_parity import check_parity

from autoshard.base.precision import Precision
from autoshard.program.known_ranges import with_known_ranges
from autoshard.program.simplify import simplify
from autoshard.program.trace import trace
from tests.support import grouped_models
from tests.support.grouped_models import HEAD, KEYS, WAYS, WIDTH, Attention

aten = torch.ops.aten
PRODUCTS = (aten.mm.default, aten.addmm.default)
FUSED = WIDTH + 2 * KEYS


def checked(model, batch, loss=None):
    """The canonical graph of a model, which gives what the model gives."""
    model = model.double()
    constants = trace(model, batch, loss_fn=loss, raw=True).calling.constants
    check_parity(model, batch, loss_fn=loss, rewrite=lambda graph: simplify(with_known_ranges(graph, constants)))
    graph = trace(model, batch, loss_fn=loss).graph
    assert simplify(graph).ops == graph.ops, "a second pass finds nothing"
    return graph


def fused(graph):
    """Activations as long as all parts together."""
    shapes = [m.shape for op in graph.of_kind("call") for m in op.outputs if m is not None]
    return [s for s in shapes if len(s) > 1 and s[-1] == FUSED and s[0] != WIDTH]


@pytest.mark.parametrize("way", WAYS)
def test_one_product_for_each_part(way):
    graph = checked(*grouped_models.build(way), grouped_models.loss)
    products = [op.outputs[0].shape[-1] for op in graph.of_kind("call") if op.target in PRODUCTS and op.phase == "forward"]
    assert sorted(products)[:4] == [KEYS, KEYS, WIDTH, WIDTH] and not fused(graph)
    weight = next(op for op in graph.of_kind("param") if op.target == "attention.qkv.weight")
    assert sorted(weight.outputs[0].shape) == [WIDTH, FUSED], "the parameter is the user's"


def test_under_a_precision_policy():
    model, batch = grouped_models.build()
    graph = trace(model, batch, loss_fn=grouped_models.loss, precision=Precision(param="bf16", master="fp32", reduce="fp32")).graph
    assert not fused(graph)
    gradient = graph.op(next(op for op in graph.of_kind("output") if str(op.target) == "grad:attention.qkv.weight").refs[0].op)
    assert gradient.target is aten._to_copy.default and graph.op(gradient.refs[0].op).target is aten.cat.default, "one gradient is reduced"


class Checkpointed(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = Attention("split")

    def forward(self, x):
        return checkpoint(self.inner, x, use_reentrant=False).square().sum()


def test_recomputed_in_backward():
    graph = checked(Checkpointed(), (torch.randn(2, 5, WIDTH, dtype=torch.float64),))
    assert not fused(graph) and any(op.name.endswith("_recompute") for op in graph.of_kind("call"))


class Reader(nn.Module):
    """`read` of a projection."""

    def __init__(self, read, features=FUSED):
        super().__init__()
        self.read, self.w = read, nn.Linear(WIDTH, features)

    def forward(self, x):
        return self.read(self.w(x))


def heads(t):
    return t.unflatten(-1, (-1, HEAD)).sin()


def without_keys(y):
    q, _, v = y.split((WIDTH, KEYS, KEYS), -1)
    return heads(q).sum() * heads(v).sum()


def test_a_part_without_a_gradient():
    graph = checked(Reader(without_keys), (torch.randn(2, 5, WIDTH, dtype=torch.float64),))
    assert not fused(graph)


def split_read(y, *lengths, view=heads):
    return sum(view(t).sum() for t in y.split(lengths, -1))


@pytest.mark.parametrize("features, read", [
    (FUSED, lambda y: (split_read(y, WIDTH, KEYS, KEYS), y)),                                # the user sees the fused value
    (WIDTH + 2 * HEAD, lambda y: split_read(y, WIDTH, HEAD, HEAD)),                           # one head of keys
    (FUSED, lambda y: split_read(y, WIDTH, KEYS, KEYS, view=torch.sin)),                      # not read as heads
    (WIDTH + 4 * KEYS, lambda y: split_read(y, WIDTH, 2 * KEYS, 2 * KEYS)),                   # six heads cannot share four
    (FUSED, lambda y: heads(y[..., :WIDTH]).sum() + heads(y[..., WIDTH - KEYS:]).sum()),      # parts overlap
    (3 * WIDTH, lambda y: split_read(y, WIDTH, WIDTH, WIDTH)),                                # a dim made of equal parts
])
def test_other_projections_stay(features, read):
    graph = checked(Reader(read, features), (torch.randn(2, 5, WIDTH, dtype=torch.float64),))
    products = [op for op in graph.of_kind("call") if op.target in PRODUCTS and op.phase == "forward"]
    assert [op.outputs[0].shape[-1] for op in products] == [features]


class Picked(nn.Module):
    def __init__(self, index):
        super().__init__()
        self.index, self.w = index, nn.Linear(6, 8)

    def forward(self, x):
        return self.w(x)[:, self.index].square().sum()


@pytest.mark.parametrize("index, target", [([-2, -1], aten.slice.Tensor), ([3], aten.slice.Tensor), ([2, 1], aten.index.Tensor), ([1, 3], aten.index.Tensor),
                                           ([-1, 0], aten.index.Tensor)])
def test_constant_ranges_are_slices(index, target):
    graph = checked(Picked(index), (torch.randn(4, 6, dtype=torch.float64),))
    assert [op.target for op in graph.of_kind("call") if op.target in (aten.slice.Tensor, aten.index.Tensor)] == [target]
