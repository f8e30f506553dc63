"""Attention heads and rows of the batch that do not divide, padded where they are read (`pad="all"`)."""
from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import autoshard
from autoshard.base.mesh import Mesh, mesh_of
from autoshard.padding.padded import ALL, WEIGHTS, padded, travel_of, without_factors
from autoshard.padding.values import ANY, BESIDE, FINITE
from autoshard.padding.walk import Walk
from autoshard.padding.where_read import groups
from autoshard.program.calling import Traced
from autoshard.program.interpret import run, values_of
from autoshard.program.trace import trace

HEADS, HEAD, VOCAB, ROWS, SEQ = 6, 4, 251, 5, 7
WIDTH = HEADS * HEAD


class Block(nn.Module):
    def __init__(self, shared):
        super().__init__()
        self.shared, self.one, self.two = shared, nn.LayerNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.q, self.k, self.v = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, shared * HEAD), nn.Linear(WIDTH, shared * HEAD, bias=False)
        self.out, self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 40), nn.Linear(40, WIDTH)

    def forward(self, x):
        q, k, v = (w(self.one(x)).unflatten(-1, (-1, HEAD)).transpose(1, 2) for w in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.shared != HEADS)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        y = self.up(self.two(x))
        return x + self.down(0.5 * y * (1 + torch.tanh(y + 0.04 * y ** 3)))


class Decoder(nn.Module):
    """With types of tokens that a buffer has for all rows, positions, and a loss beside the logits."""

    def __init__(self, shared=HEADS):
        super().__init__()
        self.words, self.types, self.places = (nn.Embedding(n, WIDTH) for n in (VOCAB, 3, SEQ))
        self.blocks, self.head = nn.ModuleList(Block(shared) for _ in range(2)), nn.Linear(WIDTH, VOCAB, bias=False)
        self.register_buffer("kinds", torch.tensor([[0, 1, 2, 0, 1, 2, 0]]))

    def forward(self, ids, target):
        x = self.words(ids) + self.types(self.kinds.expand(ids.shape)) + self.places(torch.arange(ids.shape[1]))
        for block in self.blocks:
            x = block(x)
        logits = self.head(x)
        return F.cross_entropy(logits.flatten(0, 1), target.flatten()), logits


def program(shared):
    torch.manual_seed(0)
    model = Decoder(shared).double()
    batch = tuple(torch.randint(VOCAB, (ROWS, SEQ)) for _ in range(2))
    state = {n: t.detach() for n, t in (*model.named_parameters(), *model.named_buffers())}
    return model, trace(model, batch, training=True), batch, state


def shapes(graph):
    return {op.outputs[0].shape for op in graph.of_kind("call") if op.phase == "forward" and "attention" in str(op.target)}


@pytest.mark.parametrize("shared, mesh, attention", [
    (6, "tp=4", (8, 8, SEQ, HEAD)), (3, "tp=4", (8, 8, SEQ, HEAD)), (1, "tp=4", (8, 8, SEQ, HEAD)), (6, "dp=2", (6, 6, SEQ, HEAD)),
    (3, "dp=2,tp=4", (6, 8, SEQ, HEAD)), (2, "tp=8", (8, 6, SEQ, HEAD)), (6, "tp=1", (5, 6, SEQ, HEAD))])
def test_computes_the_same(shared, mesh, attention):
    """Six heads with two of keys on eight ranks would be 24: too many, so heads stay as they are."""
    _, plain, batch, state = program(shared)
    wide = padded(plain, mesh_of(mesh), pad=ALL)
    assert shapes(wide.graph) == {attention}
    want, got = run(plain, state, batch), run(wide, state, batch)
    assert all(a.shape == b.shape and torch.allclose(a, b, rtol=1e-12, atol=1e-12) for a, b in zip(got.users, want.users, strict=True))
    assert got.grads.keys() == want.grads.keys()
    assert all(torch.allclose(got.grads[n], want.grads[n], rtol=1e-9, atol=1e-12) for n in want.grads)
    masks = [op for op in wide.graph.of_kind("call") if "masked_fill" in str(op.target)]
    assert len(masks) <= 6  # two norms; ignored targets and types of tokens, forward and backward


def test_what_is_said_of_a_pad_is_so():
    _, plain, batch, state = program(3)
    graph = without_factors(plain.graph)
    read = {source: n for group in groups(graph, Mesh(("tp",), (4,))) for source, n in group.items()}
    walk = Walk(graph, {("words.weight", 0): 252, ("head.weight", 0): 252}, travel_of, read)
    wide = Traced(walk.run(), plain.calling)
    assert not walk.spilled
    found = values_of(wide, {**state, **walk.constants}, wide.calling.flatten(batch, {}))
    looked = 0
    for value in walk.values.values():
        for dim, pad in value.pads.items() if value.ref.op in found else ():
            if pad.fill == ANY:
                continue
            made = found[value.ref.op][value.ref.index]
            for other, its in value.pads.items() if pad.fill == BESIDE else ():
                made = made if other == dim else made.narrow(other, 0, its.true)
            behind = made.narrow(dim, pad.true, pad.length - pad.true).double()
            assert bool(behind.isfinite().all() if pad.fill in (FINITE, BESIDE) else (behind == pad.fill).all()), f"{value.ref} along {dim}: {pad}"
            looked += 1
    assert looked > 200


def test_heads_and_rows_stay_where_an_op_reads_true_values():
    class Sorted(Decoder):
        def forward(self, ids, target):
            return super().forward(ids, target)[0] + self.blocks[0].q(self.words(ids)).sort(0).values.sum()

    torch.manual_seed(0)
    model, batch = Sorted(), tuple(torch.randint(VOCAB, (ROWS, SEQ)) for _ in range(2))
    wide = padded(trace(model, batch, training=True), mesh_of("dp=2"), pad=ALL)
    assert shapes(wide.graph) == {(ROWS, HEADS, SEQ, HEAD)}


def test_any_dim_of_a_weight_that_does_not_divide():
    """Nine words are twelve on four ranks, the last of which has none; 30 that two ranks divide are 32 where four ranks shall, too."""
    class Words(nn.Module):
        def __init__(self):
            super().__init__()
            self.words, self.up, self.down = nn.Embedding(9, WIDTH), nn.Linear(WIDTH, 30), nn.Linear(30, WIDTH)

        def forward(self, ids):
            return (self.down(self.up(self.words(ids)).relu()) @ self.words.weight.t()).log_softmax(-1)

    torch.manual_seed(0)
    model, batch = Words().double(), (torch.randint(9, (4, SEQ)),)
    plain = trace(model, batch, training=True)
    state = {n: t.detach() for n, t in model.named_parameters()}
    wide, usual = (padded(plain, mesh_of("dp=2,tp=4"), pad=pad).graph for pad in (ALL, WEIGHTS))
    lengths = {op.target: op.outputs[0].shape for op in wide.of_kind("param")}
    assert lengths["words.weight"] == (12, WIDTH) and lengths["up.weight"] == (32, WIDTH) and lengths["up.bias"] == (32,)
    assert {op.outputs[0].shape[0] for op in usual.of_kind("param")} == {9, 30, WIDTH}, "such pads are asked for"
    want, got = (run(p, state, batch) for p in (plain, padded(plain, mesh_of("dp=2,tp=4"), pad=ALL)))
    assert torch.allclose(got.users[0], want.users[0], rtol=1e-12, atol=1e-12)
    assert all(torch.allclose(got.grads[n], want.grads[n], rtol=1e-9, atol=1e-12) for n in want.grads)


def test_dims_of_one_still_broadcast():
    """A head with one feature, and as long a factor: two would fit two features just as well, with other numbers."""
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale, self.head = nn.Parameter(torch.full((1,), 0.5)), nn.Linear(2, 1)

        def forward(self, x):
            return self.scale * x, self.head(x)

    torch.manual_seed(0)
    report = autoshard.verify(Scaled(), "d=2", (torch.randn(4, 2),), plans=("random:0",), pad=ALL)
    assert report.ok, str(report)


def test_runs_on_all_ranks_and_is_kept_by_the_plan():
    model, _, batch, _ = program(3)
    report = autoshard.verify(model, "tp=4", batch, pad=ALL, plans=("split", "searched"), cluster="cpu-gloo")
    assert report.ok, report
    seeds = {"blocks.*.q.weight": (None, "tp")}
    plan = autoshard.plan(model, "tp=4", batch, pad=ALL, seeds=seeds)
    assert any("24 computed as 32 (blocks.0.q.weight" in note for note in plan.notes), plan.notes
    assert autoshard.verify(model, "tp=4", batch, plan=plan).ok
    with pytest.raises(autoshard.AutoshardError, match="pad"):
        autoshard.plan(model, "tp=4", batch, pad="everything")
