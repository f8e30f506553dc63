"""Dims made of parts: found where the model takes them apart, and every rule with such dims under the oracle."""
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from autoshard.base.graph import TensorMeta
from autoshard.program.trace import trace
from autoshard.rules import registry
from autoshard.rules.check.oracle import wrong_rows
from autoshard.rules.part_dims import with_parts, without_parts
from tests.support import fused_models
from tests.support.fused_models import WAYS, WIDTH


def fused_graph(way="split"):
    model, batch = fused_models.build(way)
    return trace(model.double(), batch, loss_fn=fused_models.loss).graph


def parts(graph):
    """Of every parameter with such dims, its factors."""
    return {op.target: op.outputs[0].factors for op in graph.of_kind("param") if op.outputs[0].part_dims}





@pytest.mark.parametrize("way", WAYS)
def test_fused_projections_are_found_however_they_are_taken_apart(way):
    assert parts(fused_graph(way)) == {"attention.qkv.weight": ((3, WIDTH), (WIDTH,)), "attention.qkv.bias": ((3, WIDTH),),
                                       "gate_up.weight": ((2, 2 * WIDTH), (WIDTH,))}


@pytest.mark.parametrize("way", WAYS)
def test_gradients_have_the_parts_of_their_parameters(way):
    graph = fused_graph(way)
    for name, op in graph.ties.items():
        if graph.op(op).kind == "param":
            gradient, param = graph.meta(graph.op(name).refs[0]), graph.op(op).outputs[0]
            assert (gradient.factors, gradient.part_dims) == (param.factors, param.part_dims), graph.op(op).target


def calls_with_parts(graph):
    calls = {graph.calls[op.name] for op in graph.of_kind("call")}
    return [c for c in calls if any(m is not None and m.part_dims for m in (*c.inputs, *c.outputs))]


@pytest.mark.parametrize("way", WAYS)
def test_every_rule_holds_with_dims_made_of_parts(way):
    found = calls_with_parts(fused_graph(way))
    generator = torch.Generator().manual_seed(0)
    split = 0
    for call in found:
        tensors = [torch.randn(m.shape, generator=generator, dtype=m.dtype) for m in call.inputs]
        wrong = wrong_rows(call, tensors, size=2, pairs=12)
        assert not wrong, str(wrong[0])
        split += any(p >= 0 for row in registry.rows(call) for p, m in zip((*row.inputs, *row.outputs), (*call.inputs, *call.outputs), strict=True)
                     if m is not None and m.part_dims and p > min(m.part_dims))
    assert split == len(found) >= 10, "every op on the way passes a share of the parts"


def test_the_number_of_parts_is_never_split():
    for call in calls_with_parts(fused_graph()):
        for row in registry.rows(call):
            assert not any(p in m.part_dims for p, m in zip((*row.inputs, *row.outputs), (*call.inputs, *call.outputs), strict=True) if m is not None)


class Halves(nn.Module):
    """A dim that is no weight's is taken apart, as rotary embeddings do."""

    def __init__(self):
        super().__init__()
        self.w = nn.Linear(8, 12)

    def forward(self, x):
        y = self.w(x).view(4, 3, 2, 2)
        a, b = y.chunk(2, dim=-1)
        return torch.cat((-b, a), -1).sum()


class Rows(nn.Module):
    """The batch is taken apart."""

    def __init__(self):
        super().__init__()
        self.w = nn.Linear(8, 8)

    def forward(self, x):
        a, b = self.w(x).chunk(2)
        return (a * b).sum()


class Unequal(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Linear(8, 8)

    def forward(self, x):
        a, b, c = self.w(x).split((4, 2, 2), dim=-1)
        return (a.sum() * b * c).sum()


class Grouped(nn.Module):
    """Groups of channels would lie across the shares."""

    def __init__(self):
        super().__init__()
        self.w, self.conv = nn.Conv1d(4, 12, 1), nn.Conv1d(12, 12, 3, groups=3)

    def forward(self, x):
        a, b = self.conv(self.w(x)).chunk(2, dim=1)
        return (a * b).sum()


class Returned(nn.Module):
    """The user sees the fused value."""

    def __init__(self):
        super().__init__()
        self.w = nn.Linear(8, 12)

    def forward(self, x):
        y = self.w(x)
        a, b = y.chunk(2, dim=-1)
        return (a * b).sum(), y


@pytest.mark.parametrize("model, shape", [(Halves, (4, 8)), (Rows, (4, 8)), (Unequal, (4, 8)), (Grouped, (2, 4, 9)), (Returned, (4, 8))])
def test_other_dims_stay_plain(model, shape):
    graph = trace(model(), (torch.randn(shape),)).graph
    assert not calls_with_parts(graph) and not parts(graph)


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.LSTM(6, 8, batch_first=True)

    def forward(self, x):
        return self.inner(x)[0].square().sum()


class Packed(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.MultiheadAttention(6, 3, batch_first=True)

    def forward(self, x):
        return self.inner(x, x, x, need_weights=False)[0].square().sum()


@pytest.mark.parametrize("model, name, factors", [(Recurrent, "weight_hh_l0", ((4, 8), (8,))), (Packed, "in_proj_weight", ((3, 6), (6,)))])
def test_parts_of_torch_modules(model, name, factors):
    graph = trace(model().double(), (torch.randn(2, 5, 6, dtype=torch.float64),)).graph
    assert parts(graph)[f"inner.{name}"] == factors
    generator = torch.Generator().manual_seed(0)
    for call in calls_with_parts(graph):
        wrong = wrong_rows(call, [torch.randn(m.shape, generator=generator, dtype=m.dtype) for m in call.inputs], pairs=8)
        assert not wrong, str(wrong[0])


def test_stored_parameters_keep_the_parts_they_have():
    graph = fused_graph()
    plain = without_parts(graph)
    assert not parts(plain)
    metas = {op.target: op.outputs[0] for op in graph.of_kind("param")}
    assert with_parts(plain, metas) == graph == with_parts(graph)
    whole = {op.target: op.outputs[0] for op in plain.of_kind("param")}
    assert with_parts(graph, whole) == plain


def test_parts_that_nothing_shows_are_read_whole():
    """A variant of the model that does not take the dim apart, after one that did."""
    class Plain(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Linear(8, 12, bias=False)

        def forward(self, x):
            return F.relu(self.w(x))

    graph = trace(Plain(), (torch.randn(4, 8),), training=False).graph
    stored = {"w.weight": TensorMeta((12, 8), torch.float32, ((3, 4), (8,)), (0,))}
    made = with_parts(graph, stored)
    assert parts(made) == {"w.weight": ((3, 4), (8,))}
    for call in calls_with_parts(made):
        for row in registry.rows(call):
            assert all(p != 1 for p, m in zip(row.inputs, call.inputs, strict=True) if m.part_dims), "a reader that cannot tell the parts splits them"
