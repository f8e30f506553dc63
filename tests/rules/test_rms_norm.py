"""RMS norm as one op: torch's numbers, dtypes and strides, in every way it is run; and which calls of a model become it."""
from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from autoshard.errors import TraceError
from autoshard.program.trace import trace
from autoshard.rules.device_kernels import on_device
from autoshard.rules.ops import rms_norm
from autoshard.rules.ops.rms_norm import DECOMPOSED, ON_GPU, RMS_NORM, RMS_NORM_BACKWARD
from autoshard.verification.check import verify

WITHIN = {torch.float64: 1e-12, torch.float32: 3e-6, torch.bfloat16: 1e-2, torch.float16: 2e-3}
SHAPES = [((4, 6), (6,)), ((6,), (6,)), ((2, 5, 3, 6), (3, 6)), ((2, 0, 6), (6,)), ((3, 50257 // 64), (50257 // 64,))]


def made(shape: tuple[int, ...], normed: tuple[int, ...], dtype: torch.dtype, affine: bool) -> tuple[Tensor, Tensor | None, Tensor]:
    """Input, weight and gradient."""
    generator = torch.Generator().manual_seed(0)
    x, w, g = (torch.randn(s, generator=generator, dtype=torch.float64).to(dtype) for s in (shape, normed, shape))
    return x.requires_grad_(), (w + 1).requires_grad_() if affine else None, g


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("dtype", WITHIN, ids=str)
@pytest.mark.parametrize("shape, normed", SHAPES)
def test_numbers_dtypes_and_strides_are_those_of_torch(shape, normed, dtype, affine):
    x, w, g = made(shape, normed, dtype, affine)
    want, got = F.rms_norm(x, normed, w, 1e-5), RMS_NORM(x, normed, w, 1e-5)[0]
    leaves = [t for t in (x, w) if t is not None]
    for n in range(1, len(leaves) + 1):
        for some in itertools.combinations(leaves, n):
            for a, b in zip((want, *torch.autograd.grad(want, some, g, retain_graph=True)),
                            (got, *torch.autograd.grad(got, some, g, retain_graph=True)), strict=True):
                assert (a.dtype, a.shape, a.stride()) == (b.dtype, b.shape, b.stride())
                assert not a.numel() or (a - b).abs().max() <= WITHIN[dtype] * a.abs().max()


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("dtype", WITHIN, ids=str)
@pytest.mark.parametrize("shape, normed", SHAPES)
def test_a_compiler_is_given_the_same_formula(shape, normed, dtype, affine):
    x, w, g = (t if t is None else t.detach() for t in made(shape, normed, dtype, affine))
    out, rstd = RMS_NORM(x, normed, w, 1e-5)
    backward = (g, x, normed, rstd, w, (True, affine))
    for a, b in zip((out, rstd, *RMS_NORM_BACKWARD(*backward)),
                    (*DECOMPOSED[RMS_NORM](x, normed, w, 1e-5), *DECOMPOSED[RMS_NORM_BACKWARD](*backward)), strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            assert (a.dtype, a.shape) == (b.dtype, b.shape) and torch.allclose(a, b, 10 * WITHIN[dtype], 10 * WITHIN[dtype])


@pytest.mark.parametrize("affine", [True, False])
def test_a_gradient_has_a_gradient(affine):
    x, w, _ = made((3, 2, 4), (2, 4), torch.float64, affine)
    leaves = [t for t in (x, w) if t is not None]
    assert torch.autograd.gradgradcheck(lambda *t: RMS_NORM(t[0], (2, 4), t[1] if affine else None, 1e-5)[0], leaves)


def test_a_transposed_input_gives_a_contiguous_result_as_in_torch():
    x = torch.randn(2, 3, 4, 6).transpose(1, 2)
    want = F.rms_norm(x, (6,))
    assert RMS_NORM(x, (6,), None, torch.finfo(x.dtype).eps)[0].stride() == want.stride() == want.contiguous().stride()
    with FakeTensorMode() as mode:
        assert RMS_NORM(mode.from_tensor(x), (6,), None, 1e-5)[0].stride() == want.stride()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("op", ON_GPU, ids=str)
def test_a_gpu_makes_what_a_plan_knows_of(op, dtype):
    x, w, g = (t.detach().to("meta") for t in made((4, 8, 6), (6,), dtype, True))
    args = (x, (6,), w, 1e-5) if op is RMS_NORM else (g, x, (6,), x.new_empty(4, 8, 1, dtype=torch.float32), w, (True, True))
    with FakeTensorMode() as mode:
        want = op(*(mode.from_tensor(a) if isinstance(a, Tensor) else a for a in args))
    assert on_device(op, torch.device("cuda")) is ON_GPU[op] and on_device(op, torch.device("cpu")) is op
    assert [(t.dtype, t.shape) for t in ON_GPU[op](*args)] == [(t.dtype, t.shape) for t in want]


def test_half_precision_is_said_to_take_memory():
    x, y = torch.empty(4, 6, dtype=torch.bfloat16, device="meta"), torch.empty(4, 6, device="meta")
    assert rms_norm.workspace(RMS_NORM, (x, (6,))) == 2 * 4 * 24 and not rms_norm.workspace(RMS_NORM, (y, (6,)))
    assert rms_norm.workspace(RMS_NORM_BACKWARD, (y, y, (6,))) == 3 * 4 * 4 and not rms_norm.workspace(F.silu, (x,))


# ---- models

class Normed(nn.Module):
    def __init__(self, call: Any, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.call, self.weight = call, nn.Parameter(torch.rand(6, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        return self.call(x, self.weight)


TAKEN = {
    "positions": lambda x, w: F.rms_norm(x, (6,), w, 1e-5),
    "names": lambda x, w: F.rms_norm(input=x, normalized_shape=[6], weight=w, eps=1e-5),
    "no eps": lambda x, w: F.rms_norm(x, [6], w),
    "no weight": lambda x, w: F.rms_norm(x * w, x.shape[-1:]),
    "torch's own": lambda x, w: torch.rms_norm(x, (6,), w, 1e-5),
    "torch's own, names": lambda x, w: torch.rms_norm(input=x, normalized_shape=(6,), weight=w),
}
LEFT = {
    "mixed dtypes": lambda x, w: F.rms_norm(x, (6,), w.float()),
    "vmap": lambda x, w: torch.func.vmap(lambda row: F.rms_norm(row, (6,), w, 1e-5))(x),
}


def targets(model: nn.Module, x: Tensor) -> list[str]:
    graph = trace(model, (x,)).graph
    return [str(op.target) for op in graph.ops if "rms_norm" in str(op.target)]


@pytest.mark.parametrize("form", TAKEN)
def test_every_form_of_the_call_is_one_op(form):
    assert targets(Normed(TAKEN[form]), torch.randn(4, 6, dtype=torch.float64)) == ["autoshard.rms_norm.default", "autoshard.rms_norm_backward.default"]


@pytest.mark.parametrize("form", LEFT)
def test_other_calls_stay_as_torch_has_them(form):
    assert not targets(Normed(LEFT[form]), torch.randn(4, 6, dtype=torch.float64))


def test_autocast_is_left_to_torch():
    def call(x: Tensor, w: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return F.rms_norm(x, (6,), w)

    assert not targets(Normed(call, torch.float32), torch.randn(4, 6))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_an_input_that_torch_does_not_keep_may_be_written_into(dtype):
    """torch keeps a wider copy of a bfloat16 input, and none of an input without a gradient."""
    def call(x: Tensor, w: Tensor) -> Tensor:
        y = x * w.to(x.dtype) if dtype == torch.bfloat16 else x.clone()
        z = F.rms_norm(y, (6,), w, 1e-5)
        return z + y.add_(1.0)

    model, x = Normed(call, dtype), torch.randn(4, 6, dtype=dtype)
    model(x).sum().backward()
    graph = trace(model, (x,)).graph
    assert sum("rms_norm" in str(op.target) for op in graph.ops) == 2 and not any("clone" in str(op.target) for op in graph.ops)
    report = verify(model, "d=2", (x,), plans=("split",), dtype=dtype)
    assert report.ok, str(report)


def test_errors_are_those_of_torch():
    with pytest.raises((TraceError, RuntimeError), match="normalized_shape"):
        targets(Normed(lambda x, w: F.rms_norm(x, (5,), w)), torch.randn(4, 6, dtype=torch.float64))
