"""Random ops: the rows, and that seeding by piece makes replicas agree and shards differ."""
import threading

import pytest
import torch

from autoshard.base.random import seeded
from autoshard.base.spec import PSUM, R
from autoshard.rules import registry
from autoshard.rules.check import oracle
from autoshard.rules.check.oracle import wrong_rows
from autoshard.rules.check.samples import Fixed, T, build, sample

aten = torch.ops.aten
BIG = (128, 64)
OPS = [
    sample(aten.native_dropout.default, T(*BIG), 0.25, True),
    sample(aten.rrelu_with_noise_functional.default, T(*BIG), T(*BIG), 0.1, 0.3, True),
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


@pytest.mark.parametrize("s", OPS, ids=str)
def test_every_dim_splits_and_partial_does_not_pass(s):
    call, tensors = build(s)
    rows = registry.rows(call)
    n = len(call.outputs)
    assert {row.outputs for row in rows} == {(R,) * n, (0,) * n, (1,) * n}
    assert all(PSUM not in row.inputs for row in rows)
    wrong = [w for w in wrong_rows(call, tensors, values=False) if "disagree" not in w.why]
    assert not wrong, "\n".join(map(str, wrong))


@pytest.mark.parametrize("s", OPS, ids=str)
def test_ops_are_seeded_by_the_lowering(s):
    """The lowering knows random ops by torch's tag."""
    assert torch.Tag.nondeterministic_seeded in s.op.tags


@pytest.mark.parametrize("s", OPS, ids=str)
def test_equal_pieces_agree_and_others_differ(s):
    call, tensors = build(s)
    args, _ = oracle._arguments(call, tensors)

    def draw(seed, salt, piece):
        out = seeded(s.op, seed, salt, piece, *args)
        return out[-1] if isinstance(out, tuple) else out

    torch.manual_seed(1)
    state = torch.get_rng_state()
    first = draw(5, 6, 7)
    assert torch.equal(torch.get_rng_state(), state), "the ambient generator advanced"
    torch.manual_seed(2)
    assert torch.equal(draw(5, 6, 7), first), "the ambient generator was read"
    for other in ((4, 6, 7), (5, 7, 7), (5, 6, 8)):
        assert not torch.equal(draw(*other), first), f"step, op, piece {other} drew the numbers of (5, 6, 7)"


def test_draws_of_weights_keep_them_together():
    rows = registry.rows(build(sample(aten.multinomial.default, _weights(), 2))[0])
    assert {(row.inputs, row.outputs) for row in rows} == {((R,), (R,)), ((0,), (0,))}
    assert len(registry.rows(build(sample(aten.randperm.default, 8))[0])) == 1


def _weights():
    return Fixed(torch.rand(4, 6) + 0.1)


def test_threads_of_one_process_do_not_mix_their_draws():
    """While one op draws, another thread comes to draw under a seed of its own."""
    inside, go, drawn = threading.Event(), threading.Event(), []

    def others(size):
        inside.set()
        go.wait(60)
        return torch.rand(size)

    def mine(size):
        other.start()
        inside.wait(0.2)  # it never is inside while this op draws
        return torch.rand(size)

    other = threading.Thread(target=lambda: drawn.append(seeded(others, 5, 6, 8, (4,))))
    first = seeded(mine, 5, 6, 7, (4,))
    go.set()
    other.join()
    assert torch.equal(first, seeded(torch.rand, 5, 6, 7, (4,)))
    assert torch.equal(drawn[0], seeded(torch.rand, 5, 6, 8, (4,)))
