"""Factor propagation: merged leading dims stay visible until a view splits them again."""
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from autoshard.base.graph import Graph, Op, Ref, TensorMeta
from autoshard.rules import registry
from autoshard.rules.check.oracle import wrong_rows
from autoshard.rules.check.samples import T, build, sample
from autoshard.rules.factors import factor_graph
from autoshard.rules.ops.view import reshape_factors

aten = torch.ops.aten


def op(name, target, *args, shape):
    return Op(name, "call", target, args, outputs=(TensorMeta(shape, torch.float32),))


def given_tensor(name, kind, *shape):
    return Op(name, kind, name, outputs=(TensorMeta(shape, torch.float32),))


def test_sequence_survives_flatten_matmul_unflatten():
    g = factor_graph(Graph((
        given_tensor("x", "input", 2, 4, 8), given_tensor("w", "param", 6, 8),
        op("flat", aten.view.default, Ref("x"), (8, 8), shape=(8, 8)),
        op("t", aten.t.default, Ref("w"), shape=(8, 6)),
        op("mm", aten.mm.default, Ref("flat"), Ref("t"), shape=(8, 6)),
        op("relu", aten.relu.default, Ref("mm"), shape=(8, 6)),
        op("back", aten.view.default, Ref("relu"), (2, 4, 6), shape=(2, 4, 6)),
        op("heads", aten.view.default, Ref("back"), (2, 4, 3, 2), shape=(2, 4, 3, 2)),
        op("merged", aten.view.default, Ref("heads"), (2, 4, 6), shape=(2, 4, 6)),
        op("flat_t", aten.t.default, Ref("flat"), shape=(8, 8))), training=False))
    for name, dims in (("flat", ((2, 4), (8,))), ("mm", ((2, 4), (6,))), ("relu", ((2, 4), (6,))),
                       ("back", ((2,), (4,), (6,))), ("merged", ((2,), (4,), (6,))), ("flat_t", ((8,), (2, 4)))):
        assert g.op(name).outputs[0].factors == dims, name
    assert ((1, -1), (1,)) in {(r.inputs, r.outputs) for r in registry.rows(g.calls["mm"])}
    assert g.op("x").outputs[0].factors == ((2,), (4,), (8,))


def test_heads_pass_a_shard_through_a_trailing_merge():
    call, _ = build(sample(aten.view.default, T(2, 4, 6, 8), (2, 4, 48)))
    assert ((2,), (2,)) in {(r.inputs, r.outputs) for r in registry.rows(call)}
    assert not any(r.inputs == (3,) for r in registry.rows(call))


def test_dims_that_become_others_are_cut_alike() -> None:
    """batch, heads x width -> batch x heads, width, as attention that gives its weights views them."""
    call, _ = build(sample(aten.view.default, T(5, 2, 12), (5, 8, 3)))
    assert call.outputs[0].factors == ((5,), (2, 4), (3,))
    assert {((1,), (1,)), ((2,), (2,))} <= {(r.inputs, r.outputs) for r in registry.rows(call)}
    call, _ = build(sample(aten.view.default, T(6, 4), (8, 3)))
    assert call.outputs[0].factors == ((8,), (3,)), "there is no number at which both can be cut"


def test_batch_of_one_leaves_a_plain_sequence():
    call, _ = build(sample(aten.view.default, T(1, 4, 6), (4, 6)))
    assert call.outputs[0].factors == ((4,), (6,))
    assert ((1,), (0,)) in {(r.inputs, r.outputs) for r in registry.rows(call)}


@st.composite
def reshapes(draw):
    """Two shapes with the same product, the first perhaps flat in dim 0."""
    sizes = draw(st.lists(st.sampled_from([1, 2, 3, 4]), min_size=1, max_size=4))
    def merge(parts):
        out = [[]]
        for n in parts:
            out[-1].append(n)
            if draw(st.booleans()):
                out.append([])
        return [g for g in out if g]
    first = merge(sizes)
    old = [tuple(first[0]), *(torch.Size(g).numel() for g in first[1:])]
    return T(*old), tuple(torch.Size(g).numel() for g in merge(sizes))


@given(reshapes())
@settings(max_examples=60, deadline=None)
def test_reshape_rows_are_true(case):
    tensor, shape = case
    call, tensors = build(sample(aten.view.default, tensor, shape))
    assert not wrong_rows(call, tensors, pairs=16)


@pytest.mark.parametrize("old, new, factors", [
    (T(2, 4, 6), (48,), ((2, 4, 6),)),
    (T((2, 4), 6), (8, 6), ((2, 4), (6,))),
    (T((2, 4), 6), (4, 12), ((2, 2), (2, 6))),
    (T(6, (2, 4)), (6, 8), ((6,), (2, 4))),
    (T(6, 2, 4), (6, 8), ((6,), (8,))),
    (T(1, 2, 4), (1, 8), ((1,), (8,))),
])
def test_reshape_factors(old, new, factors):
    call, _ = build(sample(aten.view.default, old, new))
    assert reshape_factors(call) == (factors,)
