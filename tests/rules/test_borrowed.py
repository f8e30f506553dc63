"""Rows borrowed from DTensor's registry are as true as our own."""
import pytest
import torch

from autoshard.rules import registry
from autoshard.rules.borrowed import borrowed
from autoshard.rules.check.oracle import wrong_rows
from autoshard.rules.check.samples import Fixed, T, build, sample

aten = torch.ops.aten

POSITIVE = Fixed(torch.eye(2, dtype=torch.float64) * torch.arange(1.0, 5.0, dtype=torch.float64)[:, None, None])

BORROWED = (
    sample(aten.upsample_trilinear3d.default, T(2, 4, 2, 2, 2), (4, 4, 4), False),
    sample(aten.upsample_nearest3d_backward.default, T(2, 4, 4, 4, 4), (4, 4, 4), (2, 4, 2, 2, 2)),
    sample(aten.upsample_linear1d_backward.default, T(2, 4, 8), (8,), (2, 4, 4), False),
    sample(aten._upsample_bilinear2d_aa.default, T(2, 4, 4, 6), (2, 3), False),
    sample(aten.max_unpool2d.default, T(2, 4, 2, 2), T(2, 4, 2, 2, high=16), (4, 4)),
    sample(aten.linalg_inv_ex.default, T(2, 4, 4)),
    sample(aten.linalg_cross.default, T(4, 6, 3), T(4, 6, 3)),
    sample(aten._fft_c2c.default, T(4, 6, 8, dtype=torch.complex128), (2,), 0, True),
    sample(aten._fft_r2c.default, T(4, 6, 8), (1,), 0, True),
    sample(aten.linalg_lu_factor_ex.default, T(4, 2, 2)),
    sample(aten.linalg_cholesky_ex.default, POSITIVE),
    sample(aten._linalg_solve_ex.default, POSITIVE, T(4, 2, 6)),
    sample(aten._linalg_solve_ex.default, POSITIVE, T(4, 2)),
    sample(aten.cholesky_inverse.default, POSITIVE),
)


@pytest.mark.parametrize("s", BORROWED, ids=[str(s.op) for s in BORROWED])
def test_borrowed_rows_are_true(s):
    call, tensors = build(s)
    assert registry.origin(call) == "dtensor"
    assert len(registry.rows(call)) > 1
    wrong = wrong_rows(call, tensors)
    assert not wrong, "\n".join(map(str, wrong))


def test_flat_dims_shard_their_major_factor():
    call, tensors = build(sample(aten.linalg_inv_ex.default, T((2, 4), 4, 4)))
    assert {row.inputs for row in registry.rows(call)} == {(-1,), (0,)}
    assert not wrong_rows(call, tensors)


def test_random_ops_are_refused():
    assert borrowed(aten.rrelu_with_noise_functional.default) is None


def test_unknown_ops_are_replicated():
    call, _ = build(sample(aten.cholesky_inverse.default, T(4, 4)))
    odd, _ = build(sample(aten.trace.default, T(4, 4)))
    assert registry.origin(odd) == "replicate" and len(registry.rows(odd)) == 1
    assert registry.origin(call) in ("dtensor", "replicate")
