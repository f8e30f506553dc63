"""Random ops: replicas agree, shards differ, equal keys repeat, the ambient generator is left alone."""
import pytest
import torch

from autoshard.graph import Call, Slot, TensorMeta
from autoshard.mesh import Mesh
from autoshard.rules import oracle, registry
from autoshard.rules.oracle import ThreadContext, run_sharded
from autoshard.rules.samples import T, build, sample
from autoshard.spec import PSUM, R

aten = torch.ops.aten
MESH = Mesh(("a", "b"), (2, 2))
BIG = (256, 64)
OPS = [
    sample(aten.native_dropout.default, T(*BIG), 0.25, True),
    sample(aten.bernoulli.p, T(*BIG), 0.3),
    sample(aten.rand.default, BIG),
    sample(aten.rand_like.default, T(*BIG)),
    sample(aten.uniform.default, T(*BIG), -1.0, 3.0),
    sample(aten.randn.default, BIG),
    sample(aten.randn_like.default, T(*BIG)),
    sample(aten.normal_functional.default, T(*BIG), 2.0, 0.5),
    sample(aten.normal.Tensor_float, T(*BIG), 0.5),
    sample(aten.normal.float_float, 1.0, 2.0, BIG),
    sample(aten.randint.default, 7, BIG),
    sample(aten.randint.low, 3, 9, BIG),
    sample(aten.randint_like.default, T(*BIG), 5),
    sample(aten.exponential.default, T(*BIG), 2.0),
]


def draws(s, placements):
    call, tensors = build(s)
    inputs = (placements,) * len(call.inputs)
    outputs = (placements,) * len(call.outputs)
    return run_sharded(call, tensors, inputs, outputs, MESH, torch.Generator().manual_seed(0))


@pytest.mark.parametrize("s", OPS, ids=str)
def test_replicas_agree_and_shards_differ(s):
    ranks = draws(s, (0, R))
    pick = -1 if s.op is aten.native_dropout.default else 0
    (a, b, c, d) = (r[pick] for r in ranks)
    assert torch.equal(a, b) and torch.equal(c, d), "ranks that hold the same shard drew different numbers"
    assert not torch.equal(a, c), "different shards drew the same numbers"
    both = draws(s, (0, 0))
    assert len({tuple(r[pick].flatten().tolist()) for r in both}) == 4


@pytest.mark.parametrize("s", OPS, ids=str)
def test_distribution_is_that_of_the_op(s):
    """Mean and standard deviation of the joined shards against the op's own draw."""
    call, tensors = build(s)
    torch.manual_seed(99)
    wanted = oracle.run_whole(call, tensors)[-1].double()
    got = torch.cat([r[-1] for r in draws(s, (0, 0))]).double()
    assert got.shape == wanted.shape
    assert got.dtype == wanted.dtype and {r[-1].dtype for r in draws(s, (0, 0))} == {call.outputs[-1].dtype}
    spread = wanted.std() / wanted.numel() ** 0.5
    assert abs(got.mean() - wanted.mean()) < 8 * spread
    assert abs(got.std() / wanted.std() - 1) < 0.05


def context(call, spec, rank=0, key=0, seed=0):
    class Seeded(ThreadContext):
        def seed(self):
            return torch.tensor(seed)

    return Seeded(call, (spec,) * len(call.inputs), (spec,) * len(call.outputs), MESH, rank, oracle._Exchange(MESH), key)


def test_equal_keys_repeat_and_others_do_not():
    call, (x,) = build(OPS[0])
    spec = (R, R)
    first = registry.run_local(context(call, spec), x, 0.25, True)
    again = registry.run_local(context(call, spec, rank=3), x, 0.25, True)
    other_op = registry.run_local(context(call, spec, key=1), x, 0.25, True)
    other_step = registry.run_local(context(call, spec, seed=1), x, 0.25, True)
    assert torch.equal(first[1], again[1]) and torch.equal(first[0], again[0])
    assert not torch.equal(first[1], other_op[1]) and not torch.equal(first[1], other_step[1])


def test_ambient_generator_is_neither_read_nor_advanced():
    call, (x,) = build(OPS[0])
    torch.manual_seed(1)
    state = torch.get_rng_state()
    first = registry.run_local(context(call, (R, R)), x, 0.25, True)
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(2)
    assert torch.equal(registry.run_local(context(call, (R, R)), x, 0.25, True)[1], first[1])


def test_dropout_scales_what_it_keeps():
    call, (x,) = build(OPS[0])
    y, keep = registry.run_local(context(call, (R, R)), x, 0.25, True)
    assert torch.allclose(y, torch.where(keep, x / 0.75, 0.0))
    y, keep = registry.run_local(context(call, (R, R)), x, 1.0, True)
    assert not keep.any() and not y.any()
    for p, train in ((0.25, False), (0.0, True)):
        y, keep = registry.run_local(context(call, (R, R)), x, p, train)
        assert torch.equal(y, x) and keep.all()


def test_dropout_never_lets_partial_through():
    call, _ = build(OPS[0])
    assert all(PSUM not in row.inputs for row in registry.rows(call))
    assert {row.outputs for row in registry.rows(call)} == {(R, R), (0, 0), (1, 1)}


@pytest.mark.parametrize("op", [aten.bernoulli.default, aten.bernoulli.Tensor])
def test_bernoulli_follows_the_probability_of_each_element(op):
    p = torch.linspace(0, 1, 5, dtype=torch.float64).repeat(4000, 1)
    meta = TensorMeta((4000, 5), torch.float64)
    n = 2 if op is aten.bernoulli.Tensor else 1
    call = Call(op, tuple(Slot(i) for i in range(n)), (), (meta,) * n, (meta,))
    y = registry.run_local(context(call, (R, R)), *[p] * n)
    assert torch.allclose(y.mean(0), p[0], atol=0.04) and set(y.unique().tolist()) == {0.0, 1.0}
    assert not y[:, 0].any() and y[:, -1].all()


@pytest.mark.parametrize("replacement", [False, True])
def test_multinomial_follows_the_weights(replacement):
    weights = torch.tensor([0.0, 1.0, 2.0, 5.0], dtype=torch.float64)
    meta, out = TensorMeta((8000, 4), torch.float64), TensorMeta((8000, 2), torch.int64)
    call = Call(aten.multinomial.default, (Slot(0), 2, replacement), (), (meta,), (out,))
    x = weights.expand(8000, 4)
    ids = registry.run_local(context(call, (R, R)), x, 2, replacement)
    assert ids.shape == (8000, 2) and ids.dtype == torch.int64
    assert torch.allclose(torch.bincount(ids[:, 0], minlength=4).double() / 8000, weights / 8, atol=0.03)
    if not replacement:
        assert (ids[:, 0] != ids[:, 1]).all()


def test_randperm_is_a_permutation():
    call = Call(aten.randperm.default, (100,), (), (), (TensorMeta((100,), torch.int64),))
    p = registry.run_local(context(call, (R, R)), 100)
    assert sorted(p.tolist()) == list(range(100)) and p.tolist() != list(range(100))
