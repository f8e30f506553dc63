"""Small calls on which the oracle tries the rules: one line per sample. Sizes are even and mutually
different where that tells dims apart; `T((2, 4), 6)` is a flat tensor: dim 0 has the factors 2 and 4."""
from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from autoshard.graph import Call, Slot, TensorMeta, map_args
from autoshard.rules import registry
from autoshard.rules.oracle import run_whole

aten = torch.ops.aten


@dataclass(frozen=True, init=False)
class T:
    """A random tensor. `high` > 0 makes int64 in [0, high); bool needs dtype; floats are normal."""

    factors: tuple[tuple[int, ...], ...]
    dtype: torch.dtype
    high: int

    def __init__(self, *shape: int | tuple[int, ...], dtype: torch.dtype = torch.float64, high: int = 0) -> None:
        object.__setattr__(self, "factors", tuple(n if isinstance(n, tuple) else (n,) for n in shape))
        object.__setattr__(self, "dtype", torch.int64 if high else dtype)
        object.__setattr__(self, "high", high)

    def make(self, rng: torch.Generator) -> torch.Tensor:
        shape = tuple(prod(f) for f in self.factors)
        if self.high:
            return torch.randint(self.high, shape, generator=rng)
        if self.dtype == torch.bool:
            return torch.rand(shape, generator=rng) < 0.5
        return torch.randn(shape, generator=rng, dtype=torch.float64).to(self.dtype)


@dataclass(frozen=True)
class Fixed:
    """A given tensor."""

    tensor: torch.Tensor
    factors: tuple[tuple[int, ...], ...] = ()

    @property
    def dtype(self) -> torch.dtype:
        return self.tensor.dtype

    def make(self, rng: torch.Generator) -> torch.Tensor:
        return self.tensor


@dataclass(frozen=True)
class Sample:
    """An op with arguments. values=False: its output is unset memory, only shapes count."""

    op: Any
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...] = ()
    values: bool = True

    def __str__(self) -> str:
        return f"{self.op}-{'-'.join('x'.join(map(str, m.shape)) for m in build(self)[0].inputs)}"


def sample(op: Any, *args: Any, values: bool = True, **kwargs: Any) -> Sample:
    return Sample(op, args, tuple(sorted(kwargs.items())), values)


def build(s: Sample) -> tuple[Call, list[torch.Tensor]]:
    """The call with metas (outputs have the factors the rule gives them), and its real tensors."""
    rng, tensors, metas = torch.Generator().manual_seed(0), [], []

    def replace(leaf: Any) -> Any:
        if not isinstance(leaf, (T, Fixed)):
            return leaf
        tensors.append(leaf.make(rng))
        metas.append(TensorMeta(tuple(tensors[-1].shape), tensors[-1].dtype, leaf.factors))
        return Slot(len(tensors) - 1)

    args = map_args(replace, s.args)
    kwargs = tuple((k, map_args(replace, v)) for k, v in s.kwargs)
    call = Call(s.op, args, kwargs, tuple(metas), ())
    outputs = tuple(None if y is None else TensorMeta(tuple(y.shape), y.dtype) for y in run_whole(call, tensors))
    call = Call(s.op, args, kwargs, tuple(metas), outputs)
    flat = tuple(None if m is None else TensorMeta(m.shape, m.dtype, f)
                 for m, f in zip(outputs, registry.factors(call), strict=True))
    return Call(s.op, args, kwargs, tuple(metas), flat), tensors


_b = torch.bool
_f32 = torch.float32

CONTRACTION = (
    sample(aten.mm.default, T(4, 8), T(8, 6)),
    sample(aten.mm.default, T((2, 4), 6), T(6, 10)),
    sample(aten.mm.default, T(6, (2, 4)), T((2, 4), 10)),
    sample(aten.mm.default, T(6, (2, 4)), T(8, 10)),
    sample(aten.bmm.default, T(2, 4, 8), T(2, 8, 6)),
    sample(aten.bmm.default, T((2, 4), 6, 8), T((2, 4), 8, 10)),
    sample(aten.bmm.default, T((2, 4), 6, 8), T(8, 8, 10)),
    sample(aten.mv.default, T(4, 6), T(6)),
    sample(aten.dot.default, T(8), T(8)),
    sample(aten.addmm.default, T(6), T(4, 8), T(8, 6)),
    sample(aten.addmm.default, T(4, 6), T(4, 8), T(8, 6), beta=2, alpha=0.5),
    sample(aten.addmm.default, T(6), T((2, 4), 8), T(8, 6)),
    sample(aten.addmm.default, T(1, 6), T((2, 4), 8), T(8, 6)),
    sample(aten.baddbmm.default, T(4, 1, 6), T(4, 2, 8), T(4, 8, 6), alpha=0.5),
    sample(aten.addmv.default, T(4), T(4, 6), T(6)),
)

POINTWISE = (
    sample(aten.add.Tensor, T(4, 6), T(4, 6)),
    sample(aten.add.Tensor, T((2, 4), 6), T(6), alpha=2),
    sample(aten.add.Tensor, T((2, 4), 6), T(8, 6)),
    sample(aten.add.Tensor, T(4, 1, 6), T(2, 6)),
    sample(aten.add.Tensor, T(4, 6), 2.0),
    sample(aten.add.Scalar, T(4, 6), 2.0),
    sample(aten.add.Tensor, T(4, 6, high=9), T(4, 6)),
    sample(aten.sub.Tensor, T(4, 6), T(4, 1)),
    sample(aten.rsub.Tensor, T(4, 6), T(4, 1)),
    sample(aten.rsub.Scalar, T(4, 6), 1.0),
    sample(aten.mul.Tensor, T(4, 6), T(4, 1)),
    sample(aten.mul.Tensor, T((2, 4), 6), T(1, 6)),
    sample(aten.mul.Tensor, T(4, 6), 3.0),
    sample(aten.mul.Scalar, T(4, 6), 3.0),
    sample(aten.div.Tensor, T(4, 6), T(6)),
    sample(aten.div.Scalar, T(4, 6), 3.0),
    sample(aten.div.Tensor_mode, T(4, 6), T(6), rounding_mode="floor"),
    sample(aten.neg.default, T(4, 6)),
    sample(aten.positive.default, T(4, 6)),
    sample(aten.real.default, T(4, 6, dtype=torch.complex128)),
    sample(aten.imag.default, T(4, 6, dtype=torch.complex128)),
    sample(aten._conj.default, T(4, 6, dtype=torch.complex128)),
    sample(aten.where.self, T(4, 6, dtype=_b), T(4, 6), T(6)),
    sample(aten.where.self, T((2, 4), 6, dtype=_b), T((2, 4), 6), T()),
    sample(aten.addcmul.default, T(4, 6), T(4, 6), T(6), value=2),
    sample(aten.addcdiv.default, T(4, 6), T(4, 6), T(6)),
    sample(aten.lerp.Scalar, T(4, 6), T(4, 6), 0.3),
    sample(aten.masked_fill.Scalar, T(4, 6), T(6, dtype=_b), 0),
    sample(aten.masked_fill.Scalar, T(4, 6), T(4, 6, dtype=_b), float("-inf")),
    sample(aten.masked_fill.Tensor, T(4, 6), T(4, 1, dtype=_b), T()),
    sample(aten.clone.default, T((2, 4), 6)),
    sample(aten._to_copy.default, T(4, 6, dtype=_f32), dtype=torch.float64),
    sample(aten._to_copy.default, T(4, 6), dtype=_f32),
    sample(aten._to_copy.default, T(4, 6, dtype=_b), dtype=torch.int64),
    sample(aten._to_copy.default, T(4, 6, high=5), dtype=torch.float64),
    sample(aten.copy.default, T(4, 6), T(6)),
    sample(aten.lift_fresh_copy.default, T(4, 6)),
    sample(aten.relu.default, T((2, 4), 6)),
    sample(aten.pow.Tensor_Scalar, T(4, 6), 2),
    sample(aten.eq.Tensor, T(4, 6, high=3), T(6, high=3)),
    sample(aten.minimum.default, T(4, 6), T(6)),
    sample(aten.clamp.default, T(4, 6), 0.0),
    sample(aten.threshold_backward.default, T(4, 6), T(4, 6), 0),
    sample(aten.gelu_backward.default, T(4, 6), T(4, 6), approximate="tanh"),
    sample(aten.silu_backward.default, T((2, 4), 6), T((2, 4), 6)),
    sample(aten.tanh_backward.default, T(4, 6), T(4, 6)),
    sample(aten.sigmoid_backward.default, T(4, 6), T(4, 6)),
    sample(aten.elu_backward.default, T(4, 6), 1.0, 1, 1, False, T(4, 6)),
    sample(aten.hardtanh_backward.default, T(4, 6), T(4, 6), -1, 1),
    sample(aten.hardswish_backward.default, T(4, 6), T(4, 6)),
    sample(aten.hardsigmoid_backward.default, T(4, 6), T(4, 6)),
    sample(aten.leaky_relu_backward.default, T(4, 6), T(4, 6), 0.1, False),
    sample(aten.softplus_backward.default, T(4, 6), T(4, 6), 1, 20),
    sample(aten.mish_backward.default, T(4, 6), T(4, 6)),
    sample(aten.logit_backward.default, T(4, 6), T(4, 6), 0.1),
    sample(aten.log_sigmoid_backward.default, T(4, 6), T(4, 6), T(4, 6)),
    sample(aten.native_dropout_backward.default, T(4, 6), T(4, 6, dtype=_b), 2.0),
)

SAMPLES: tuple[Sample, ...] = CONTRACTION + POINTWISE
