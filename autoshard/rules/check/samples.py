"""Small calls on which the oracle tries the rules: one line per sample. Sizes are even and mutually
different where that tells dims apart; `T((2, 4), 6)` is a flat tensor: dim 0 has the factors 2 and 4."""
from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from autoshard.base.graph import Call, Slot, TensorMeta, map_args
from autoshard.rules import registry
from autoshard.rules.check.oracle import run_whole

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
    flat = tuple(None if m is None or f is None else TensorMeta(m.shape, m.dtype, f)
                 for m, f in zip(outputs, registry.factors(call), strict=True))
    return Call(s.op, args, kwargs, tuple(metas), flat), tensors


def emptied(s: Sample) -> Iterator[Sample]:
    """The sample with every dim of one size made 0, for each size that its tensors have: with the lists of numbers among its
    arguments (shapes, mostly) as they are, and with that size 0 there too. Torch refuses many of them; what it takes, rules must
    take. Not for ops whose kernels crash on such calls (`CRASHES`)."""
    tensors: list[T | Fixed] = []
    map_args(lambda leaf: tensors.append(leaf) if isinstance(leaf, (T, Fixed)) else None, (s.args, tuple(v for _, v in s.kwargs)))
    sizes = () if s.op in CRASHES else sorted({size for t in tensors for factors in _dims(t) for size in factors})
    for n in sizes:
        for lists_too in (False, True):
            def change(leaf: Any, n: int = n, now: bool = lists_too) -> Any:
                if isinstance(leaf, tuple):
                    return tuple(0 if now and type(v) is int and v == n else change(v, n, now) for v in leaf)
                return _without(leaf, n) if isinstance(leaf, (T, Fixed)) else leaf

            yield Sample(s.op, tuple(map(change, s.args)), tuple((k, change(v)) for k, v in s.kwargs), s.values)


def _dims(t: T | Fixed) -> tuple[tuple[int, ...], ...]:
    """Factors of every dim."""
    return t.factors if isinstance(t, T) or t.factors else tuple((n,) for n in t.tensor.shape)


def _without(t: T | Fixed, n: int) -> T | Fixed:
    factors = tuple(tuple(0 if k == n else k for k in f) for f in _dims(t))
    if isinstance(t, T):
        return T(*factors, dtype=t.dtype, high=t.high)
    kept = t.tensor[tuple(slice(prod(f)) for f in factors)]
    return Fixed(kept, factors if t.factors else ())


CRASHES: frozenset[Any] = frozenset({
    aten._embedding_bag.default, aten._embedding_bag_backward.default, aten.nll_loss_backward.default, aten.nll_loss2d_backward.default,
    aten._adaptive_avg_pool2d_backward.default, aten.native_layer_norm_backward.default, aten.native_batch_norm_backward.default,
    aten.batch_norm_backward.default, aten._grouped_mm.default, aten._scaled_dot_product_flash_attention_for_cpu.default,
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default, aten._weight_norm_interface.default,
    aten._weight_norm_interface_backward.default})
"""Torch's CPU kernels read outside of their arguments, divide by zero or leave the result unset, where one of size 0 does not fit the
others."""
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
    sample(aten.vdot.default, T(8, dtype=torch.complex128), T(8, dtype=torch.complex128)),
    sample(aten._trilinear.default, T(4, 6), T(8, 6, 10), T(4, 10), (1, 3), (0,), (1, 2), (2, 3)),
    sample(aten._trilinear.default, T((2, 4), 6), T(8, 2), T(8, 10), (1, 2), (2, 3), (1, 3), (0,)),
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
    sample(aten.floor_divide.default, T(4, 6, high=9), 2),
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
    sample(aten.hardswish.default, T((2, 4), 6)),
    sample(aten.log_sigmoid_forward.default, T(4, 6)),
    sample(aten.complex.default, T(4, 6), T(4, 6)),
    sample(aten.polar.default, T(4, 6), T(4, 6)),
    sample(aten._prelu_kernel.default, T(4, 6, 2), T(1, 6, 1)),
    sample(aten._prelu_kernel.default, T(4, 6), T(1, 1)),
    sample(aten._prelu_kernel_backward.default, T(4, 6, 2), T(4, 6, 2), T(1, 6, 1)),
    sample(aten.glu.default, T((2, 4), 6, 8)),
    sample(aten.glu.default, T(4, 6, 8), 1),
    sample(aten.glu_backward.default, T((2, 4), 6, 2), T((2, 4), 6, 4), -1),
    sample(aten.glu_backward.default, T(4, 6, 8), T(4, 12, 8), 1),
    sample(aten.native_dropout_backward.default, T(4, 6), T(4, 6, dtype=_b), 2.0),
)

RESHAPES = (
    sample(aten.view.default, T(2, 4, 6), (8, 6)),
    sample(aten.view.default, T((2, 4), 6), (2, 4, -1)),
    sample(aten.view.default, T((2, 4), 6), (2, 4, 3, 2)),
    sample(aten.view.default, T((2, 4), 6), (8, 2, 3)),
    sample(aten.view.default, T(2, 4, 6, 8), (8, 6, 8)),
    sample(aten.view.default, T(2, 4, 6, 8), (2, 4, 48)),
    sample(aten.view.default, T(6, (2, 4)), (6, 2, 4)),
    sample(aten.view.default, T(6, (2, 4)), (2, 3, 8)),
    sample(aten.view.default, T(2, 4, 6), (2, 8, 3)),
    sample(aten.view.default, T(2, (4, 2), 6), (8, 12)),
    sample(aten.view.default, T(6, 4), (8, 3)),
    sample(aten.view.default, T(1, 4, 6), (4, 6)),
    sample(aten.view.default, T(4, 6), (1, 4, 1, 6)),
    sample(aten.view.default, T(4, 6), (24,)),
    sample(aten.view.default, T(24), (4, 6)),
    sample(aten.view.default, T((2, 4), 6), (4, 12)),
    sample(aten.view.default, T(), (1, 1)),
    sample(aten._unsafe_view.default, T((4, 2), 8), (4, 2, 2, 4)),
    sample(aten.reshape.default, T(2, 4, 6), (-1, 6)),
    sample(aten._reshape_alias.default, T(2, 4, 6), (8, 6), (6, 1)),
    sample(aten._reshape_copy.default, T(2, 4, 6), (8, 6)),
    sample(aten.view_copy.default, T(2, 4, 6), (8, 6)),
)

VIEWS = (
    sample(aten.alias.default, T((2, 4), 6)),
    sample(aten.detach.default, T((2, 4), 6)),
    sample(aten.t.default, T((2, 4), 6)),
    sample(aten.t.default, T(6)),
    sample(aten.transpose.int, T(2, 4, 6), 1, -1),
    sample(aten.permute.default, T((2, 4), 6, 8), (2, 0, 1)),
    sample(aten.expand.default, T(4, 1, 6), (2, 4, 8, -1)),
    sample(aten.expand.default, T((2, 4), 6), (8, 6)),
    sample(aten.expand.default, T(), (4, 6)),
    sample(aten.unsqueeze.default, T((2, 4), 6), -1),
    sample(aten.unsqueeze.default, T(4, 6), 1),
    sample(aten.squeeze.default, T(4, 1, 6)),
    sample(aten.squeeze.dim, T(4, 1, 6), 1),
    sample(aten.squeeze.dim, T(4, 1, 6), 0),
    sample(aten.squeeze.dims, T(1, 4, 1, 6), (0, 2)),
    sample(aten.select.int, T(4, 6, 8), 1, -2),
    sample(aten.slice.Tensor, T((2, 4), 6), 1, 2, 6),
    sample(aten.slice.Tensor, T((2, 4), 6), 0, 0, 4),
    sample(aten.slice.Tensor, T((2, 4), 6), 1, 0, 9223372036854775807),
    sample(aten.slice.Tensor, T(4, 6), 0, -4, 9),
    sample(aten.split.Tensor, T((2, 4), 6), 2, -1),
    sample(aten.unsafe_split.Tensor, T((2, 4), 6), 2, 1),
    sample(aten.unsafe_split_with_sizes.default, T(4, 6), (2, 4), 1),
    sample(aten.chunk.default, T((2, 4), 6), 2, 1),
    sample(aten.split_with_sizes.default, T(4, 6), (2, 4), 1),
    sample(aten.unbind.int, T(4, 2, 6), 1),
    sample(aten.diagonal.default, T(4, 6, 6), 0, 1, 2),
    sample(aten.unfold.default, T(4, 8), 1, 4, 2),
    sample(aten.view_as_real.default, T(4, 6, dtype=torch.complex128)),
    sample(aten.view_as_complex.default, T(4, 6, 2)),
)

COPIES = (
    sample(aten.cat.default, (T((2, 4), 6), T((2, 4), 2)), 1),
    sample(aten.cat.default, (T(4, 6), T(2, 6), T(4, 6))),
    sample(aten.stack.default, (T(4, 6), T(4, 6)), -1),
    sample(aten.select_backward.default, T(4, 6), (4, 8, 6), 1, 3),
    sample(aten.slice_backward.default, T(4, 2), (4, 6), 1, 2, 4, 1),
    sample(aten.slice_backward.default, T(4, 6), (4, 6), 1, 0, 9223372036854775807, 1),
    sample(aten.diagonal_backward.default, T(4, 6), (4, 6, 6), 0, 1, 2),
    sample(aten.unfold_backward.default, T(4, 3, 4), (4, 8), 1, 4, 2),
    sample(aten.slice_scatter.default, T(4, 6), T(4, 2), 1, 2, 4),
    sample(aten.slice_scatter.default, T(4, 6, 2), T(4, 2, 2), 1, -2),
    sample(aten.slice_scatter.default, T(8, 6), T(3, 6), 0, 1, 6, 2),
    sample(aten.slice_scatter.default, T((2, 4), 6), T(3, 6), 0, 3, 6),
    sample(aten.select_scatter.default, T(4, 6, 8), T(4, 8), 1, 2),
    sample(aten.select_scatter.default, T(4, 6), T(4), -1, -1),
    sample(aten.repeat.default, T(4, 6), (2, 1, 3)),
    sample(aten.flip.default, T(4, 6), (1,)),
    sample(aten.roll.default, T(4, 6), (2,), (0,)),
    sample(aten.roll.default, T(4, 6), (2,)),
    sample(aten.constant_pad_nd.default, T(4, 6), (1, 1)),
    sample(aten.constant_pad_nd.default, T(4, 6), (0, 0, 2, -2), 1.0),
    sample(aten.tril.default, T(2, 4, 4)),
    sample(aten.triu.default, T(4, 6), 1),
)

REDUCTION = (
    sample(aten.sum.default, T((2, 4), 6)),
    sample(aten.sum.dim_IntList, T((2, 4), 6), (0,)),
    sample(aten.sum.dim_IntList, T(4, 6, 8), (0, 2), True),
    sample(aten.sum.dim_IntList, T(4, 6, high=9), (1,)),
    sample(aten.sum.dim_IntList, T(4, 6), None),
    sample(aten.mean.default, T((2, 4), 6)),
    sample(aten.mean.dim, T((2, 4), 6), (0,), True),
    sample(aten.mean.dim, T(4, 6, 8), (-1, 0)),
    sample(aten.amax.default, T((2, 4), 6), (0,)),
    sample(aten.amin.default, T(4, 6), (1,), True),
    sample(aten.max.default, T(4, 6)),
    sample(aten.min.default, T(4, 6)),
    sample(aten.max.dim, T(4, 6), 1),
    sample(aten.min.dim, T(4, 6), 0, True),
    sample(aten.argmax.default, T(4, 6), -1),
    sample(aten.argmax.default, T(4, 6)),
    sample(aten.argmin.default, T(4, 6), 0, True),
    sample(aten.any.dim, T(4, 6, dtype=_b), 1),
    sample(aten.all.default, T(4, 6, dtype=_b)),
    sample(aten.prod.dim_int, T(4, 6), 1),
    sample(aten.logsumexp.default, T((2, 4), 6), (1,)),
    sample(aten.linalg_vector_norm.default, T(4, 6), 2, (1,)),
    sample(aten.var.correction, T(4, 6), (1,), correction=1),
    sample(aten.var_mean.correction, T((2, 4), 6), (1,), correction=0, keepdim=True),
    sample(aten.std.correction, T(4, 6), (0,), correction=1),
    sample(aten.cumsum.default, T((2, 4), 6), 1),
    sample(aten.cumprod.default, T(4, 6), 0),
    sample(aten.logcumsumexp.default, T(4, 6), 1),
    sample(aten.median.dim, T(4, 6), 1),
)

FACTORY = (
    sample(aten.arange.default, 8),
    sample(aten.arange.start, 2, 10),
    sample(aten.arange.start_step, 0, 8, 2, dtype=torch.float64),
    sample(aten.arange.start_step, 1.0, 3.0, 0.25),
    sample(aten.arange.start_step, 0.1, -7.9, -1.0, dtype=torch.int64),
    sample(aten.arange.default, 1000, dtype=torch.bfloat16),
    sample(aten.zeros.default, (4, 6)),
    sample(aten.ones.default, (4, 6), dtype=_b),
    sample(aten.full.default, (4, 6), 2.5),
    sample(aten.empty.memory_format, (4, 6), values=False),
    sample(aten.scalar_tensor.default, 2.5),
    sample(aten.eye.default, 4),
    sample(aten.eye.m, 4, 6),
    sample(aten.triu_indices.default, 4, 4),
    sample(aten.tril_indices.default, 4, 4, -1),
    sample(aten.linspace.default, 0, 1, 4),
    sample(aten.zeros_like.default, T((2, 4), 6)),
    sample(aten.ones_like.default, T(4, 6)),
    sample(aten.full_like.default, T(4, 6), 2.5),
    sample(aten.empty_like.default, T(4, 6), values=False),
    sample(aten.new_zeros.default, T(4, 6), (2, 8)),
    sample(aten.new_ones.default, T(4), (2, 8)),
    sample(aten.new_full.default, T(4), (2, 8), 2.5),
    sample(aten.new_empty.default, T(4), (2, 8), values=False),
    sample(aten.new_empty_strided.default, T(4), (2, 8), (1, 2), values=False),
    sample(aten.zero.default, T((2, 4), 6)),
    sample(aten.fill.Scalar, T(4, 6), 2.0),
    sample(aten.fill.Tensor, T(4, 6), T()),
)

SAMPLES: tuple[Sample, ...] = CONTRACTION + POINTWISE + RESHAPES + VIEWS + COPIES + REDUCTION + FACTORY
