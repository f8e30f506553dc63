"""Simplified graphs are smaller, give the same results and keep what must stay."""
import functools

import pytest
import torch
import torch.nn.functional as F
from test_trace import MODELS, Block, Stack, Weighted, float64, x48  # noqa: F401  (float64 is a fixture)
from torch import nn
from torch.utils.checkpoint import checkpoint
from trace_parity import check_parity

from autoshard.base.graph import Ref
from autoshard.base.precision import Precision
from autoshard.base.roles import Role
from autoshard.program.calling import Traced
from autoshard.program.interpret import run
from autoshard.program.simplify import simplify, stats
from autoshard.program.trace import trace

aten = torch.ops.aten
recorded = functools.partial(trace, raw=True)


def calls(graph, *targets):
    return [op for op in graph.of_kind("call") if op.target in targets]


@pytest.mark.parametrize("name", MODELS)
def test_models_keep_their_results(name):
    model, example = MODELS[name].build("tiny")
    traced = check_parity(model, example, loss_fn=MODELS[name].loss, rewrite=simplify)
    simple = simplify(traced.graph)
    assert len(simple.ops) < len(traced.graph.ops)
    assert simplify(simple) == simple, "a second pass finds nothing"
    assert [op.target for op in simple.of_kind("output")] == [op.target for op in traced.graph.of_kind("output")]
    assert not calls(simple, aten.detach.default, aten.alias.default, aten.lift_fresh.default, aten._unsafe_view.default)


def folded(body):
    """The calls left of a model that returns `body(x * w)`."""
    traced = check_parity(Weighted(lambda m, x: body(x * m.w)), (torch.randn(4, 8),), rewrite=simplify)
    forward = [op for op in simplify(traced.graph).of_kind("call") if op.phase == "forward"]
    return [str(op.target).split(".")[1] for op in forward][1:]


@pytest.mark.parametrize("body, left", [
    (lambda y: y.t().t(), []),
    (lambda y: y.transpose(0, 1).transpose(-1, 0), []),
    (lambda y: y.view(2, 2, 8).permute(2, 0, 1).permute(1, 2, 0), ["view"]),
    (lambda y: y.view(2, 2, 8).permute(2, 0, 1).permute(2, 0, 1), ["view", "permute"]),
    (lambda y: y.view(2, 16).view(-1, 4), ["view"]),
    (lambda y: y.view(2, 16).view(4, 8), []),
    (lambda y: y.expand(4, 8)[:, 0:8], []),
    (lambda y: y.clone() + 1, ["add"]),
    (lambda y: y ** 1, []),
    (lambda y: y.to(torch.float32).to(torch.float64), ["_to_copy", "_to_copy"]),
    (lambda y: y.t().contiguous().view(-1), ["t", "clone", "view"]),
    (lambda y: y.sin() + y.sin(), ["sin", "add"]),
    (lambda y: y.as_strided((4, 8), (8, 1)), ["clone"]),
    (lambda y: y.as_strided((2, 16, 1), (16, 1, 7)), ["clone", "view"]),
    (lambda y: y.as_strided((2, 8), (16, 1)), ["clone", "as_strided"]),
    (lambda y: y.as_strided((4, 8), (1, 4)), ["clone", "as_strided"]),
    (lambda y: torch.zeros_like(y).copy_(y) + 1, ["add"]),
    (lambda y: torch.zeros_like(y).copy_(y[0]) + 1, ["zeros_like", "select", "copy", "add"]),
    (lambda y: y.t(), ["t"]),
])
def test_folds(body, left):
    assert folded(body) == left


def test_clone_that_the_caller_gets_stays():
    graph = simplify(recorded(Weighted(lambda m, x: (x * m.w, x.clone())), (x48(),)).graph)
    (copy,) = calls(graph, aten.clone.default)
    assert graph.op("user:1").args == (Ref(copy.name),)


def test_random_ops_are_not_shared():
    def twice(m, x):
        return F.dropout(x * m.w, 0.5) + F.dropout(x * m.w, 0.5)

    graph = simplify(check_parity(Weighted(twice), (x48(),), rewrite=simplify).graph)
    assert len(calls(graph, aten.native_dropout.default)) == 2
    assert len([op for op in calls(graph, aten.mul.Tensor) if op.phase == "forward"]) == 1


def test_recomputation_is_not_merged_with_the_forward():
    model = Stack(lambda block, x: checkpoint(block, x, use_reentrant=False))
    graph = simplify(check_parity(model, (x48(),), rewrite=simplify).graph)
    matmuls = calls(graph, aten.addmm.default)
    assert sum(op.name.endswith("_recompute") for op in matmuls) == 3
    saved = {r.op for op in graph.ops if op.phase == "backward" for r in op.refs if graph.op(r.op).phase == "forward"}
    assert not any(graph.op(n).target is aten.gelu.default for n in saved)


def test_dead_code_and_unused_parameters():
    class Wasteful(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.wasted = nn.Linear(8, 2), nn.Linear(8, 2)

        def forward(self, x):
            self.wasted(x)
            return self.used(x)

    traced = recorded(Wasteful(), (x48(),))
    graph = simplify(traced.graph)
    assert traced.graph.unused == () and graph.unused == ("wasted.weight", "wasted.bias")
    assert len(calls(graph, aten.addmm.default)) == 1


def test_batch_norm_keeps_its_mutations():
    traced = check_parity(nn.Sequential(nn.BatchNorm1d(8), Block()), (x48(),), rewrite=simplify)
    graph = simplify(traced.graph)
    assert set(graph.outputs(Role.MUTATION)) == {"0.running_mean", "0.running_var", "0.num_batches_tracked"}
    assert graph.ties["mutation:0.running_var"] == "buffer:0.running_var"


def test_stats_counts_calls():
    graph = recorded(Block(), (x48(),)).graph
    counts = stats(graph)
    assert counts["aten.addmm.default"] == 2 and sum(counts.values()) == len(graph.of_kind("call"))
    assert list(counts.values()) == sorted(counts.values(), reverse=True)


def test_a_second_simplification_finds_nothing():
    """Two equal views become one, and only then the view before them has one reader and can go."""
    def f(x):
        middle = x.view(4, 6)
        return middle.view(2, 12).relu() + middle.view(2, 12).relu()

    class Model(nn.Module):
        def forward(self, x):
            return f(x * 2)

    once = simplify(recorded(Model(), (torch.randn(24),)).graph)
    assert [str(op.target) for op in once.of_kind("call")].count("aten.view.default") == 1
    assert simplify(once).ops == once.ops


def test_gradients_are_cast_where_they_are_made():
    """autograd would cast them all at the end, and only there could they be summed over ranks."""
    model, example = MODELS["gpt"].build("tiny")
    traced = recorded(model, example, loss_fn=MODELS["gpt"].loss, precision=Precision())
    graph = simplify(traced.graph)
    casts = [graph.op(op.refs[0].op) for op in graph.outputs(Role.GRADIENT).values()]
    assert len(casts) == len(graph.of_kind("param")) and all("_to_copy" in str(op.target) for op in casts)
    assert all(graph.order[op.name] - graph.order[op.refs[0].op] <= 2 for op in casts)
    assert simplify(graph).ops == graph.ops
    state = dict(model.named_parameters()) | dict(model.named_buffers())
    one, two = (run(Traced(g, traced.calling), state, example).grads for g in (traced.graph, graph))
    assert all(torch.equal(one[n], two[n]) for n in one | two)


def test_backward_of_batch_norm_in_training_reads_no_running_statistics():
    model, example = MODELS["resnet"].build("tiny")
    traced = check_parity(model, example, loss_fn=MODELS["resnet"].loss, rewrite=simplify)
    backward = calls(simplify(traced.graph), aten.native_batch_norm_backward.default)
    assert backward and all(op.args[3:5] == (None, None) for op in backward)


class Grouped(nn.Module):
    """Attention of four heads over two of keys, repeated as older models do."""

    def __init__(self, way, again=False):
        super().__init__()
        self.q, self.kv = nn.Linear(8, 16), nn.Linear(8, 16)
        self.way, self.again = way, again

    def forward(self, x):
        q = self.q(x).unflatten(-1, (4, 4)).transpose(1, 2)
        k, v = (t.unflatten(-1, (2, 4)).transpose(1, 2) for t in self.kv(x).chunk(2, -1))
        k, v = (self.way(t) for t in (k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return y + k if self.again else y


def repeat_kv(t):
    """As transformers writes it."""
    b, h, s, d = t.shape
    return t[:, :, None, :, :].expand(b, h, 2, s, d).reshape(b, 2 * h, s, d)


@pytest.mark.parametrize("way, again, heads", [
    (lambda t: t.repeat_interleave(2, dim=1), False, 2),
    (repeat_kv, False, 2),
    (repeat_kv, True, 4),                    # the repeated keys are read besides: their gradient is no sum alone
    (lambda t: t.repeat(1, 2, 1, 1), False, 4),  # another order of heads
])
def test_attention_reads_heads_that_are_not_repeated(way, again, heads):
    traced = check_parity(Grouped(way, again), (torch.randn(2, 6, 8),), rewrite=simplify)
    simple = simplify(traced.graph)
    attention = [op for op in simple.of_kind("call") if "attention" in str(op.target)]
    keys = {simple.meta(op.refs[2 if op.phase == "backward" else 1]).shape[1] for op in attention}
    assert len(attention) == 2 and keys == {heads}
    assert heads == 4 or not calls(simple, aten.expand.default)


def filled(y, made, *cuts):
    """`made`, with pieces of y written into it one by one: along dim 1, cut at `cuts`."""
    for a, b in zip((0, *cuts), (*cuts, 8), strict=True):
        made[:, a:b].copy_(y[:, a:b])
    return made


@pytest.mark.parametrize("cuts", [(3,), (2, 5)])
def test_an_empty_tensor_that_is_filled_is_its_pieces(cuts):
    left = folded(lambda y: filled(y, y.new_empty(4, 8), *cuts).sin())
    assert left == ["slice"] * (1 + len(cuts)) + ["cat", "sin"]


def with_steps(y):
    made = torch.zeros_like(y)
    made[:, ::2].copy_(y[:, ::2])
    made[:, 1::2].copy_(y[:, 1::2])
    return made


def across(y):
    made = y.new_zeros(8, 8)
    made[:4, :4].copy_(y[:, 4:])
    made[4:, 4:].copy_(y[:, :4])
    return made


def overlapping(y):
    made = y.new_empty(4, 8)
    made[:, :5].copy_(y[:, :5])
    made[:, 3:].copy_(y[:, 1:6])
    return made


def twice(y):
    made = filled(y, y.new_empty(4, 8), 3)
    made[:, :3].copy_(y[:, 5:])
    return made


@pytest.mark.parametrize("body", [with_steps, across, overlapping, twice, lambda y: filled(y, y.new_zeros(4, 8), 3)])
def test_what_is_not_filled_so_is_left(body):
    assert "slice_scatter" in folded(body)
