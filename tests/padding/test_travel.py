"""Every op that pads pass: the padded graph computes what the plain one does, and what it says is behind a dim is there."""
from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from autoshard.base.mesh import Mesh
from autoshard.padding.padded import marked, padded, travel_of, without_factors
from autoshard.padding.values import ANY, FINITE
from autoshard.padding.walk import Walk
from autoshard.program.calling import Traced
from autoshard.program.interpret import run, values_of
from autoshard.program.trace import trace

N, WIDTH, ROWS = 11, 6, 5
"""11 is padded to 12 on four ranks; 6 is left alone, for its pad would be a third."""
MESH = Mesh(("tp",), (4,))


class Layer(nn.Module):
    """`fn(module, x)` on a table of N words, two linear layers around N features, and a vector of N."""

    def __init__(self, fn):
        super().__init__()
        g = torch.Generator().manual_seed(3)
        self.fn, self.words, self.up, self.down = fn, nn.Embedding(N, WIDTH), nn.Linear(WIDTH, N), nn.Linear(N, WIDTH)
        self.scale = nn.Parameter(torch.empty(N))
        for p in self.parameters():
            p.data = torch.randn(p.shape, generator=g, dtype=torch.float64)

    def forward(self, x, ids):
        return self.fn(self, x, ids)


STAYS = {  # name: fn; no dim is cut, but for what the user gets
    "mlp": lambda m, x, i: m.down(F.gelu(m.up(x))),
    "tanh of sums": lambda m, x, i: m.down(torch.tanh(m.up(x) + m.scale) * torch.sigmoid(m.up(x))),
    "exp is one behind zero": lambda m, x, i: m.down(torch.exp(m.up(x) * 0.1)),
    "log of zero": lambda m, x, i: m.down(torch.log(m.up(x).abs())),
    "zero over zero": lambda m, x, i: m.down(m.up(x) / m.scale),
    "relu, silu": lambda m, x, i: m.down(F.relu(m.up(x)) + F.silu(m.up(x))),
    "where": lambda m, x, i: m.down(torch.where(m.up(x) > 0.5, m.up(x), m.scale)),
    "masked fill": lambda m, x, i: m.down(m.up(x).masked_fill(m.scale > 0, 2.0)),
    "softmax": lambda m, x, i: m.down(torch.softmax(m.up(x), -1)),
    "softmax of a scaled one": lambda m, x, i: m.down(torch.softmax(m.up(x) * 0.5, -1)),
    "softcapped": lambda m, x, i: F.cross_entropy(torch.tanh(m.up(x) / 3.0).flatten(0, 1) * 3.0, i.flatten()),
    "log softmax": lambda m, x, i: -torch.log_softmax(m.up(x), -1).amax(-1),
    "cross entropy": lambda m, x, i: F.cross_entropy(m.up(x).flatten(0, 1), i.flatten()),
    "cross entropy, weighted": lambda m, x, i: F.cross_entropy(m.up(x).flatten(0, 1), i.flatten(), weight=m.scale.detach().abs()),
    "cross entropy, smooth": lambda m, x, i: F.cross_entropy(m.up(x).flatten(0, 1), i.flatten(), label_smoothing=0.2),
    "cross entropy, each": lambda m, x, i: F.cross_entropy(m.up(x).flatten(0, 1), i.flatten(), reduction="none"),
    "cross entropy of images": lambda m, x, i: F.cross_entropy(m.up(x).movedim(-1, 1).unsqueeze(-1), i.unsqueeze(-1)),
    "tied": lambda m, x, i: F.cross_entropy((m.words(i) @ m.words.weight.t()).flatten(0, 1), i.flatten()),
    "embedding, then loss and logits": lambda m, x, i: (F.cross_entropy(m.up(m.words(i)).flatten(0, 1), i.flatten()), m.up(m.words(i))),
    "sum": lambda m, x, i: m.up(x).sum(-1),
    "sum of all": lambda m, x, i: torch.exp(m.up(x)).sum(),
    "mean": lambda m, x, i: torch.exp(m.up(x)).mean(-1, keepdim=True),
    "mean of all": lambda m, x, i: torch.cos(m.up(x)).mean(),
    "mean of rows": lambda m, x, i: m.down(m.up(x).mean(0)),
    "norm made of sums": lambda m, x, i: m.down(m.up(x) * torch.rsqrt(m.up(x).pow(2).mean(-1, keepdim=True) + 1e-6) * m.scale),
    "largest of negative numbers": lambda m, x, i: (-m.up(x).abs()).amax(-1) + (m.up(x) - 9.0).max(-1).values,
    "position of the largest": lambda m, x, i: (m.up(x).sum(), m.up(x).argmax(-1)),
    "transposed": lambda m, x, i: m.down(m.up(x).transpose(1, 2).transpose(0, 1).permute(1, 2, 0)),
    "merged": lambda m, x, i: m.down(m.up(x).view(-1, N)).view(x.shape),
    "merged with minor dims": lambda m, x, i: (m.up(x).transpose(1, 2).reshape(2, N * ROWS) ** 2).sum(),
    "cat and slices of others": lambda m, x, i: m.down(torch.cat([m.up(x), m.scale.expand(2, 1, N)], 1)[:, 1:4]),
    "stacked and taken apart": lambda m, x, i: sum(m.down(t) for t in torch.stack([m.up(x), m.up(2 * x)]).unbind(0)),
    "picked": lambda m, x, i: m.down(m.up(x)[:, 2]),
    "padded elsewhere": lambda m, x, i: m.down(F.pad(m.up(x), (0, 0, 1, 0), value=3.0)),
    "batches of products": lambda m, x, i: m.up(x) @ m.up(x).transpose(1, 2),
    "products of pads": lambda m, x, i: (m.up(x).transpose(1, 2) @ torch.exp(m.up(x))).sum(),
    "masks of two forms": lambda m, x, i: torch.exp(m.up(x)).transpose(1, 2).sum(1).sum() + torch.exp(m.up(x[0])).t().sum(0).sum(),
    "expanded": lambda m, x, i: m.down(m.up(x) - m.up(x).sum(-1, keepdim=True)),
    "of float32": lambda m, x, i: m.down(m.up(x).float().double()),
}
CUT = {  # an op that is not known is on the way: the dim stays whole
    "sorted": lambda m, x, i: m.down(m.up(x).sort(-1).values),
    "layer norm": lambda m, x, i: m.down(F.layer_norm(m.up(x), (N,))),
    "cumulated": lambda m, x, i: m.down(m.up(x).cumsum(-1)),
    "flat position": lambda m, x, i: (m.up(x).sum(), m.up(x).argmax()),
    "with a buffer of the length": lambda m, x, i: m.down(m.up(x)[..., :4] @ x.new_ones(4, N)),
}


def program(fn, training=True):
    g = torch.Generator().manual_seed(1)
    model = Layer(fn)
    batch = (torch.randn(2, ROWS, WIDTH, generator=g, dtype=torch.float64), torch.randint(N, (2, ROWS), generator=g))
    return model, trace(model, batch, training=training), batch


def state_of(model):
    return {n: p.detach() for n, p in model.named_parameters()}


def assert_same(plain: Traced, other: Traced, state, batch):
    want, got = run(plain, state, batch), run(other, state, batch)
    for a, b in zip(got.users, want.users, strict=True):
        assert a.shape == b.shape and torch.allclose(a.double(), b.double(), rtol=1e-10, atol=1e-12)
    assert got.grads.keys() == want.grads.keys()
    for name in want.grads:
        assert got.grads[name].shape == want.grads[name].shape and torch.allclose(got.grads[name], want.grads[name], rtol=1e-9, atol=1e-11), name


def padded_dims(graph):
    return {(op.target, d) for op in graph.of_kind("param") for d, n in enumerate(op.outputs[0].shape) if n != op.outputs[0].true_shape[d]}


@pytest.mark.parametrize("name", STAYS)
def test_pads_pass(name):
    model, plain, batch = program(STAYS[name])
    wide = padded(plain, MESH)
    read = {(op.target, d) for op in plain.graph.of_kind("param") for d, n in enumerate(op.outputs[0].shape) if n == N}
    assert padded_dims(wide.graph) == read
    assert_same(plain, wide, state_of(model), batch)


@pytest.mark.parametrize("name", {**STAYS, **CUT})
def test_what_is_said_of_a_pad_is_so(name):
    """The walk itself, with whatever it cuts; every value's pad is looked at."""
    model, plain, batch = program({**STAYS, **CUT}[name])
    sources = {(op.target, d): 12 for op in plain.graph.of_kind("param") for d, n in enumerate(op.outputs[0].shape) if n == N}
    walk = Walk(without_factors(plain.graph), sources, travel_of)
    wide = Traced(marked(walk.run()), plain.calling)
    state = {**state_of(model), **walk.constants}
    assert_same(plain, wide, state, batch)
    found = values_of(wide, state, wide.calling.flatten(batch, {}))
    looked = 0
    for value in walk.values.values():
        for dim, pad in value.pads.items() if value.ref.op in found else ():
            behind = found[value.ref.op][value.ref.index].narrow(dim, pad.true, pad.length - pad.true).double()
            assert pad.fill == ANY or bool(behind.isfinite().all() if pad.fill == FINITE else (behind == pad.fill).all()), f"{value.ref} along {dim}: {pad}"
            looked += 1
    assert looked > 2


@pytest.mark.parametrize("name", CUT)
def test_unknown_ops_read_true_values(name):
    model, plain, batch = program(CUT[name])
    wide = padded(plain, MESH)
    assert ("up.weight", 0) not in padded_dims(wide.graph)
    assert_same(plain, wide, state_of(model), batch)


def test_the_mask_is_a_bias_where_a_product_makes_the_logits():
    _, plain, _ = program(STAYS["tied"])
    ops = [str(op.target) for op in padded(plain, MESH).graph.of_kind("call")]
    assert "aten.masked_fill.Scalar" not in ops and "aten.addmm.default" in ops and "aten.constant_pad_nd.default" not in ops


def test_padding_twice_changes_nothing():
    _, plain, _ = program(STAYS["tied"])
    wide = padded(plain, MESH)
    assert padded(wide, MESH).graph.hash == wide.graph.hash != plain.graph.hash


def test_what_divides_is_left_alone():
    _, plain, _ = program(STAYS["mlp"])
    assert padded(plain, Mesh(("tp",), (11,))) is plain


def test_a_stored_parameter_keeps_its_pad_where_an_op_is_not_known():
    model, plain, batch = program(CUT["sorted"], training=False)
    _, trained, _ = program(STAYS["mlp"])
    stored = {op.target: op.outputs[0] for op in padded(trained, MESH).graph.of_kind("param")}
    wide = padded(plain, MESH, stored)
    assert ("up.weight", 0) in padded_dims(wide.graph)
    assert_same(plain, wide, state_of(model), batch)
