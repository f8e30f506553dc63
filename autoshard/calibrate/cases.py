"""The ops that are measured: kernels that models spend their time in, called as the lowered program calls them.

A case makes the arguments of one aten overload for a size. Amounts (FLOP or bytes) come from the same functions that
price the op, so a fitted curve means what the cost model reads from it.
"""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch

from autoshard.base.graph import Call, Slot, TensorMeta
from autoshard.cost.compute import call_bytes, compute_dtype, op_name
from autoshard.rules.device_kernels import on_device
from autoshard.rules.family import Family
from autoshard.rules.ops.rms_norm import RMS_NORM, RMS_NORM_BACKWARD
from autoshard.rules.registry import rule_of

aten = torch.ops.aten
ATTENTION = aten._scaled_dot_product_flash_attention_for_cpu.default
"""As graphs have it; another device runs what stands for it there."""
COLUMNS = 512
"""Width of the tensors of ops that work on rows."""
LINE = 64
"""Elements: tensors begin at multiples of so many, as those of an allocator do."""

ELEMENTS = (2**12, 2**14, 2**16, 2**17, 2**18, 2**19, 2**20, 2**21, 2**22)
HELD_ELEMENTS = (2**13, 3 * 2**15, 3 * 2**17, 3 * 2**19)
PRODUCTS = ((64, 64, 64), (256, 64, 256), (256, 256, 256), (1024, 256, 256), (512, 512, 512), (1024, 256, 1024),
            (2048, 512, 512), (1024, 1024, 1024), (2048, 512, 2048), (256, 2048, 2048))
HELD_PRODUCTS = ((128, 128, 128), (512, 256, 512), (2048, 256, 256), (1024, 512, 1024), (512, 2048, 512))
HEADS = ((1, 4, 64, 64), (2, 4, 128, 64), (4, 4, 256, 64), (4, 8, 512, 64))
HELD_HEADS = ((2, 4, 64, 64), (4, 4, 128, 32), (2, 8, 256, 64))
IMAGES = ((1, 16, 16, 16), (4, 16, 32, 32), (16, 64, 8, 64), (4, 64, 28, 28), (8, 256, 7, 256), (8, 64, 28, 64), (8, 128, 28, 128))
HELD_IMAGES = ((4, 32, 16, 32), (16, 128, 4, 128), (4, 128, 14, 128), (16, 64, 28, 64))
DEEP, HELD_DEEP = ((2, 128, 4, 128), (2, 256, 4, 256), (4, 512, 4, 512), (4, 384, 2, 384)), ((4, 256, 2, 256), (4, 256, 4, 256))
"""Small images with many channels, whose weights are most of what is moved: the last stages of residual networks."""

ON_GPUS = {
    ELEMENTS: tuple(2**k for k in (14, 18, 20, 22, 23, 24, 25, 26)),
    HELD_ELEMENTS: (2**19, 3 * 2**21, 3 * 2**23),
    PRODUCTS: ((256, 256, 256), (1024, 1024, 1024), (4096, 768, 768), (4096, 768, 3072), (4096, 2048, 2048), (8192, 768, 2304), (8192, 1024, 4096),
               (8192, 2048, 8192), (8192, 4096, 4096), (8192, 4096, 14336), (4096, 4096, 32768), (16384, 768, 50304)),
    HELD_PRODUCTS: ((512, 512, 512), (2048, 1024, 1024), (8192, 768, 3072), (4096, 4096, 4096), (8192, 2048, 2048), (8192, 1024, 32768)),
    HEADS: ((1, 8, 256, 64), (2, 12, 512, 64), (8, 12, 1024, 64), (4, 32, 2048, 64), (2, 32, 2048, 128), (1, 32, 4096, 128), (1, 32, 8192, 128)),
    HELD_HEADS: ((4, 12, 512, 64), (8, 16, 1024, 64), (2, 16, 4096, 128)),
    (*IMAGES, *DEEP): ((16, 64, 56, 64), (64, 64, 56, 64), (64, 128, 28, 128), (64, 256, 14, 256), (64, 512, 7, 512), (64, 64, 112, 64)),
    (*HELD_IMAGES, *HELD_DEEP): ((32, 64, 56, 64), (32, 128, 28, 256), (32, 512, 7, 512)),
    IMAGES: ((16, 64, 56, 64), (64, 64, 56, 64), (64, 128, 28, 128), (64, 64, 112, 64)),
    HELD_IMAGES: ((32, 64, 56, 64), (32, 128, 28, 128)),
}
"""Sizes that keep a GPU busy, in place of those of a CPU: the smallest are what a launch costs, the largest do not fit into its caches."""

Make = Callable[[Any, Callable[..., torch.Tensor]], tuple[Any, ...]]


@dataclass(frozen=True)
class Case:
    """`make(size, new)` gives the arguments; `new(*shape)` is a random tensor of the case's dtype and device. `fresh`: the arguments that the
    op before it in a step has just written."""

    target: Any
    make: Make
    sizes: tuple[Any, ...] = ELEMENTS
    held: tuple[Any, ...] = HELD_ELEMENTS
    low_precision: bool = False
    fresh: tuple[int, ...] = (0,)


@dataclass(frozen=True)
class Prepared:
    """A case at one size: `run()` does it once, `twin()` with other tensors."""

    key: str
    family: Family
    dtype: str
    amount: float
    moved: float
    held_out: bool
    run: Callable[[], Any]
    twin: Callable[[], Any]
    fresh: tuple[torch.Tensor, ...]


def cases(device: torch.device) -> tuple[Case, ...]:
    """The catalogue. A GPU computes in half precision what a CPU computes in float32: all is measured in both there, at larger sizes."""
    if device.type == "cpu":
        return ALL
    return tuple(replace(case, sizes=ON_GPUS[case.sizes], held=ON_GPUS[case.held], low_precision=True) for case in ALL)


def rows(n: int) -> tuple[int, int]:
    """A matrix of n elements, COLUMNS wide where it is large enough."""
    return n // min(n // 8, COLUMNS), min(n // 8, COLUMNS)


class Pool:
    """Random tensors as views of one buffer, one behind the other and from the start again: made one by one they would take gigabytes. The tensors of
    one case do not overlap, as long as it asks for no more than there is; those of different cases seldom do, so that one does not find in the
    caches what another one has read."""

    def __init__(self, dtype: torch.dtype, device: torch.device, most: int | None = None) -> None:
        self.device = device
        largest = max(ELEMENTS if device.type == "cpu" else ON_GPUS[ELEMENTS])
        self._buffer = torch.randn(most or 4 * largest, device=device).to(dtype)
        self._next = 0

    def new(self, *shape: int) -> torch.Tensor:
        """A tensor of `shape`."""
        numel = prod(shape)
        start = self._next if self._next + numel <= len(self._buffer) else 0
        self._next = start + -(-numel // LINE) * LINE
        return self._buffer[start:start + numel].view(shape)


def prepare(case: Case, size: Any, pool: Pool, held_out: bool) -> Prepared:
    """Make the arguments and count what the op moves and computes, from the rules that price it."""
    other, args, run = case.make(size, pool.new), case.make(size, pool.new), on_device(case.target, pool.device)
    call = as_call(case.target, args, run(*args))
    rule = rule_of(case.target)
    ins, outs = [m.logical_shape for m in call.inputs], [None if m is None else m.logical_shape for m in call.outputs]
    moved = float(call_bytes(call, ins, outs))
    amount = float(rule.flops(call, ins, outs)) if rule.family.heavy else moved
    return Prepared(op_name(case.target), rule.family, str(compute_dtype(call)).removeprefix("torch."), amount, moved, held_out,
                    lambda: run(*args), lambda: run(*other), tuple(x for i in case.fresh for x in _tensors(args[i])))


def _tensors(value: Any) -> tuple[torch.Tensor, ...]:
    return tuple(value) if isinstance(value, list) else (value,)


def as_call(target: Any, args: tuple[Any, ...], result: Any) -> Call:
    """The call as the cost model sees it: tensors replaced by slots."""
    inputs: list[TensorMeta] = []

    def slotted(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            inputs.append(TensorMeta(tuple(value.shape), value.dtype))
            return Slot(len(inputs) - 1)
        return tuple(slotted(v) for v in value) if isinstance(value, (list, tuple)) else value

    plain = tuple(slotted(a) for a in args)
    results = result if isinstance(result, (tuple, list)) else (result,)
    outputs = tuple(TensorMeta(tuple(r.shape), r.dtype) if isinstance(r, torch.Tensor) else None for r in results)
    return Call(target, plain, (), tuple(inputs), outputs)


def _unary(target: Any, *rest: Any) -> Case:
    return Case(target, lambda n, new: (new(*rows(n)), *rest))


def _binary(target: Any, *rest: Any) -> Case:
    return Case(target, lambda n, new: (new(*rows(n)), new(*rows(n)), *rest))


def _product(target: Any, make: Make, low_precision: bool = False, fresh: tuple[int, ...] = (0,)) -> Case:
    return Case(target, make, PRODUCTS, HELD_PRODUCTS, low_precision, fresh)


MATMUL = (
    _product(aten.mm.default, lambda s, new: (new(s[0], s[1]), new(s[2], s[1]).t()), True),     # x w', forward
    _product(aten.mm.default, lambda s, new: (new(s[0], s[1]), new(s[1], s[2]))),               # dy w, backward
    _product(aten.mm.default, lambda s, new: (new(s[1], s[0]).t(), new(s[1], s[2]))),           # dy' x, backward
    _product(aten.addmm.default, lambda s, new: (new(s[2]), new(s[0], s[1]), new(s[2], s[1]).t()), fresh=(1,)),
    _product(aten.bmm.default, lambda s, new: (new(4, s[0] // 4, s[1]), new(4, s[1], s[2] // 4))),
)
POINTWISE = (
    Case(aten.add.Tensor, lambda n, new: (new(*rows(n)), new(*rows(n))), low_precision=True),
    _binary(aten.mul.Tensor), _unary(aten.gelu.default), _binary(aten.gelu_backward.default), _unary(aten.silu.default),
    _binary(aten.silu_backward.default), _unary(aten.tanh.default), _binary(aten.tanh_backward.default), _unary(aten.exp.default),
    _unary(aten.sigmoid.default), _unary(aten.relu.default), _binary(aten.threshold_backward.default, 0),
    _unary(aten.pow.Tensor_Scalar, 2), _unary(aten.neg.default), _unary(aten.mul.Scalar, 0.5),
    _unary(aten.clone.default), Case(aten.cat.default, lambda n, new: ([new(*rows(n // 2)), new(*rows(n // 2))],)),
    Case(aten.clone.default, lambda n, new: (new(8, rows(n)[0] // 8, rows(n)[1]).transpose(0, 1),)),
    Case(aten.native_dropout.default, lambda n, new: (new(*rows(n)), 0.1, True)),
)
ROWS = (
    Case(aten.sum.dim_IntList, lambda n, new: (new(*rows(n)), [0], True), fresh=()),  # a bias's gradient, after two products have read the same
    Case(aten.mean.dim, lambda n, new: (new(*rows(n)), [1], True)),
    Case(aten._softmax.default, lambda n, new: (new(*rows(n)), 1, False)),
    Case(aten._log_softmax.default, lambda n, new: (new(*rows(n)), 1, False)),
    Case(aten._softmax_backward_data.default, lambda n, new: (new(*rows(n)), new(*rows(n)).softmax(1), 1, new(1).dtype)),
    Case(aten._log_softmax_backward_data.default, lambda n, new: (new(*rows(n)), new(*rows(n)), 1, new(1).dtype)),
    Case(aten.native_layer_norm.default, lambda n, new: (new(*rows(n)), [rows(n)[1]], new(rows(n)[1]), new(rows(n)[1]), 1e-5)),
    Case(aten.native_layer_norm_backward.default, lambda n, new: (
        new(*rows(n)), new(*rows(n)), [rows(n)[1]], *(_statistics(new, rows(n)[0], 1) for _ in range(2)), new(rows(n)[1]), new(rows(n)[1]),
        [True, True, True])),
    Case(RMS_NORM, lambda n, new: (new(*rows(n)), [rows(n)[1]], new(rows(n)[1]), 1e-5)),
    Case(RMS_NORM_BACKWARD, lambda n, new: (
        new(*rows(n)), new(*rows(n)), [rows(n)[1]], _statistics(new, rows(n)[0], 1), new(rows(n)[1]), [True, True])),
)
LOOKUPS = (
    Case(aten.embedding.default, lambda n, new: (new(1024, rows(n)[1]), _numbers(rows(n)[0], 1024, new)), fresh=(1,)),
    Case(aten.embedding_dense_backward.default, lambda n, new: (new(*rows(n)), _numbers(rows(n)[0], 1024, new), 1024, -1, False)),
)
CONVOLUTIONS = (
    Case(aten.convolution.default, lambda s, new: (new(s[0], s[1], s[2], s[2]), new(s[3], s[1], 3, 3), None, [1, 1], [1, 1], [1, 1],
                                                   False, [0, 0], 1), (*IMAGES, *DEEP), (*HELD_IMAGES, *HELD_DEEP)),
    Case(aten.convolution_backward.default, lambda s, new: (
        new(s[0], s[3], s[2], s[2]), new(s[0], s[1], s[2], s[2]), new(s[3], s[1], 3, 3), None, [1, 1], [1, 1], [1, 1], False, [0, 0],
        1, [True, True, False]), (*IMAGES, *DEEP), (*HELD_IMAGES, *HELD_DEEP)),
    Case(aten.max_pool2d_with_indices.default, lambda s, new: (new(s[0], s[1], s[2], s[2]), [3, 3], [2, 2], [1, 1]), IMAGES, HELD_IMAGES),
    Case(aten._native_batch_norm_legit_functional.default, lambda n, new: (
        new(8, 32, n // 256), *(_statistics(new, 32) for _ in range(4)), True, 0.1, 1e-5)),
    Case(aten.native_batch_norm_backward.default, lambda n, new: (
        new(8, 32, n // 256), new(8, 32, n // 256), *(_statistics(new, 32) for _ in range(5)), True, 1e-5,
        [True, True, True])),
)


def _statistics(new: Callable[..., torch.Tensor], *shape: int) -> torch.Tensor:
    """Positive, and in float32 where their tensor is in half precision: so kernels of norms want them."""
    return new(*shape).float().abs()


def _numbers(n: int, below: int, new: Callable[..., torch.Tensor]) -> torch.Tensor:
    return torch.randint(below, (n,), device=new(1).device)


def _heads_backward(s: Any, new: Callable[..., torch.Tensor]) -> tuple[Any, ...]:
    q, k, v = _heads(s, new)
    out, lse = on_device(ATTENTION, q.device)(q, k, v, 0.0, True)
    return (new(*s), q, k, v, out, lse, 0.0, True)


def _heads(s: Any, new: Callable[..., torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Queries, keys and values as models make them: [batch, seq, heads, dim] with the middle dims swapped."""
    b, h, n, d = s
    return tuple(new(b, n, h, d).transpose(1, 2) for _ in range(3))


ATTEND = (
    Case(ATTENTION, lambda s, new: (*_heads(s, new), 0.0, True), HEADS, HELD_HEADS, fresh=(0, 1, 2)),
    Case(aten._scaled_dot_product_flash_attention_for_cpu_backward.default, _heads_backward, HEADS, HELD_HEADS),
)
ALL = (*MATMUL, *POINTWISE, *ROWS, *LOOKUPS, *CONVOLUTIONS, *ATTEND)
