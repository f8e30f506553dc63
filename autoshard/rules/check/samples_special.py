"""Samples of the special rules: see samples.py. One tuple per family file."""
from __future__ import annotations

from math import prod

import torch

from autoshard.base.checked import CHECKED
from autoshard.rules.check.samples import Fixed, Sample, T, sample
from autoshard.rules.ops.embedding_bag import EMBEDDING_BAG, EMBEDDING_BAG_BACKWARD
from autoshard.rules.ops.rms_norm import RMS_NORM, RMS_NORM_BACKWARD

aten = torch.ops.aten

_b, _f32, _f64, _bf16 = torch.bool, torch.float32, torch.float64, torch.bfloat16


def _ids(*shape: int, high: int, seed: int = 0, low: int = 0) -> Fixed:
    return Fixed(torch.randint(low, high, shape, generator=torch.Generator().manual_seed(seed)))


def _positive(*shape: int, factors: tuple[tuple[int, ...], ...] = (), dtype: torch.dtype = _f64) -> Fixed:
    """Values in (0, 1): probabilities, standard deviations."""
    values = torch.rand(shape, generator=torch.Generator().manual_seed(3), dtype=_f64) * 0.8 + 0.1
    return Fixed(values.to(dtype), factors)


def _targets(*shape: int, classes: int) -> Fixed:
    """Targets of which one in a few is ignored (-100), unevenly over the batch."""
    t = _ids(*shape, high=classes).tensor.clone()
    t.view(-1)[:1] = -100
    t.view(-1)[-3:-1] = -100
    return Fixed(t)


def _flat(f: Fixed, *factors: tuple[int, ...]) -> Fixed:
    return Fixed(f.tensor, factors)


_BAGS = Fixed(torch.tensor([0, 1, 4, 4]))


def _bag_facts(mode: int) -> tuple[Fixed, ...]:
    """offset2bag, bag_size, maximum_indices, as the forward gives them."""
    weight = T(8, 6).make(torch.Generator().manual_seed(0))
    return tuple(map(Fixed, aten._embedding_bag(weight, _ids(6, high=8).tensor, _BAGS.tensor, False, mode)[1:]))


EMBEDDING: tuple[Sample, ...] = (
    sample(aten.embedding.default, T(8, 6), _ids(4, 2, high=8)),
    sample(aten.embedding.default, T(8, 6), _ids(4, high=8), 3),
    sample(aten.embedding.default, T(8, 6), _flat(_ids(8, high=8), (2, 4))),
    sample(aten.embedding.default, T((2, 4), 6), _ids(4, high=8)),
    sample(aten.embedding_dense_backward.default, T(4, 2, 6), _ids(4, 2, high=8), 8, -1, False),
    sample(aten.embedding_dense_backward.default, T(8, 6), _ids(8, high=8), 8, 3, False),
    sample(aten.embedding_dense_backward.default, T((2, 4), 6), _flat(_ids(8, high=8), (2, 4)), 8, 3, False),
    sample(aten.embedding_dense_backward.default, T(8, 6), _ids(8, high=4), 8, 1, True),
)

EMBEDDING += tuple(made for ids, scale in (
    (_ids(4, 2, high=8), None), (_ids(4, 2, high=8), T(4, 2)), (_flat(_ids(8, 2, high=8), (2, 4), (2,)), None)) for skip in (None, 3)
    for made in (sample(EMBEDDING_BAG, T(8, 6), ids, scale, skip),
                 sample(EMBEDDING_BAG_BACKWARD, T(*ids.tensor.shape[:1], 6), ids, scale, 8, skip)))
EMBEDDING += tuple(sample(aten._embedding_bag.default, T(8, 6), _ids(6, high=8), _BAGS, False, mode)
                   for mode in (0, 1, 2))
EMBEDDING += tuple(sample(aten._embedding_bag_backward.default, T(4, 6), _ids(6, high=8), _BAGS, *_bag_facts(mode), 8,
                          False, mode, False, None) for mode in (0, 1, 2))

_SOFTMAX = tuple(
    sample(op, T(*shape, dtype=dtype), dim, False)
    for op in (aten._softmax.default, aten._log_softmax.default)
    for shape, dim, dtype in (((4, 6), 1, _f64), ((4, 6, 8), 1, _f64), (((2, 4), 8), -1, _f64), ((4, 6), 1, _f32)))

_SOFTMAX_BACKWARD = tuple(
    sample(op, T(*shape), _positive(*plain, factors=factors), dim, _f64)
    for op in (aten._softmax_backward_data.default, aten._log_softmax_backward_data.default)
    for shape, plain, factors, dim in (((4, 6), (4, 6), (), 1), ((4, 6, 8), (4, 6, 8), (), 1),
                                       (((2, 4), 8), (8, 8), ((2, 4), (8,)), -1)))

_NLL = tuple(
    sample(aten.nll_loss_forward.default, T(n, 6), t, w, reduction, -100)
    for n, t in ((8, _targets(8, classes=6)), ((2, 4), _flat(_targets(8, classes=6), (2, 4))),
                 ((2, 4), _targets(8, classes=6)))
    for w in (None, _positive(6)) for reduction in (0, 1, 2))

_NLL += (sample(aten.nll_loss_forward.default, T(4, (2, 4)), _targets(4, classes=8), None, 1, -100),
         sample(aten.nll_loss_backward.default, T(), T(4, (2, 4)), _targets(4, classes=8), None, 1, -100,
                Fixed(torch.tensor(3.5, dtype=_f64))))

_NLL_BACKWARD = tuple(
    sample(aten.nll_loss_backward.default, T() if reduction else T(n), T(n, 6), t, w, reduction, -100,
           Fixed(torch.tensor(3.5, dtype=_f64)))
    for n, t in ((8, _targets(8, classes=6)), ((2, 4), _flat(_targets(8, classes=6), (2, 4))))
    for w in (None, _positive(6)) for reduction in (0, 1, 2))

_NLL2D = tuple(
    s for w in (None, _positive(6)) for reduction in (0, 1, 2) for s in (
        sample(aten.nll_loss2d_forward.default, T(4, 6, 2, 8), _targets(4, 2, 8, classes=6), w, reduction, -100),
        sample(aten.nll_loss2d_backward.default, T() if reduction else T(4, 2, 8), T(4, 6, 2, 8),
               _targets(4, 2, 8, classes=6), w, reduction, -100, Fixed(torch.tensor(3.5, dtype=_f64)))))

_ELEMENTWISE = tuple(
    s for reduction in (0, 1, 2) for s in (
        sample(aten.mse_loss.default, T((2, 4), 6), T((2, 4), 6), reduction),
        sample(aten.smooth_l1_loss.default, T(4, 6), T(4, 6), reduction, 0.5),
        sample(aten.huber_loss.default, T(4, 6), T(4, 6), reduction, 0.5),
        sample(aten.soft_margin_loss.default, T(4, 6), T(4, 6), reduction),
        sample(aten.binary_cross_entropy.default, _positive(4, 6), _positive(4, 6), None, reduction),
        sample(aten.binary_cross_entropy.default, _positive(4, 6), _positive(4, 6), T(4, 6), reduction),
        sample(aten.binary_cross_entropy_with_logits.default, T(4, 6), _positive(4, 6), None, T(6), reduction),
        sample(aten.binary_cross_entropy_with_logits.default, T(4, 6), _positive(4, 6), T(4, 6), None, reduction)))

_ELEMENTWISE_BACKWARD = tuple(
    s for reduction in (0, 1, 2) for g in (T(4, 6) if reduction == 0 else T(),) for s in (
        sample(aten.mse_loss_backward.default, g, T(4, 6), T(4, 6), reduction),
        sample(aten.smooth_l1_loss_backward.default, g, T(4, 6), T(4, 6), reduction, 0.5),
        sample(aten.huber_loss_backward.default, g, T(4, 6), T(4, 6), reduction, 0.5),
        sample(aten.soft_margin_loss_backward.default, g, T(4, 6), T(4, 6), reduction),
        sample(aten.binary_cross_entropy_backward.default, g, _positive(4, 6), _positive(4, 6), None, reduction)))

LOSS = (sample(aten._safe_softmax.default, T(4, 2, 6), -1),
        *_SOFTMAX, *_SOFTMAX_BACKWARD, *_NLL, *_NLL_BACKWARD, *_NLL2D, *_ELEMENTWISE, *_ELEMENTWISE_BACKWARD,
        sample(aten.mse_loss.default, T(4, 6), T(4, 6)))


def _attention(queries: int = 6, kv_heads: int = 4, mask: tuple[int, ...] | None = None,
               causal: bool = False, hidden: slice | None = None, keys: int = 6, heads: int = 4) -> tuple[Sample, Sample]:
    """Forward and backward of CPU flash attention, the backward fed with the forward's own results. `hidden`: keys that the mask
    hides from the first half of the batch."""
    rng = torch.Generator().manual_seed(5)

    def make(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=rng, dtype=_f64)

    q, k, v = make(4, heads, queries, 8), make(4, kv_heads, keys, 8), make(4, kv_heads, keys, 8)
    bias = None if mask is None else make(*mask)
    if bias is not None and hidden is not None:
        bias[:2, ..., hidden] = -torch.inf
    op = aten._scaled_dot_product_flash_attention_for_cpu
    out, lse = op(q, k, v, 0.0, causal, attn_mask=bias)
    qkv, made = (Fixed(q), Fixed(k), Fixed(v)), (Fixed(out), Fixed(lse.contiguous()))
    grad, attn_mask = Fixed(make(*out.shape)), None if bias is None else Fixed(bias)
    return (sample(op.default, *qkv, 0.0, causal, attn_mask=attn_mask),
            sample(aten._scaled_dot_product_flash_attention_for_cpu_backward.default, grad, *qkv, *made, 0.0,
                   causal, attn_mask=attn_mask))


ATTENTION = (
    *_attention(), *_attention(causal=True), *_attention(queries=8, keys=8, kv_heads=2, causal=True), *_attention(queries=12, keys=12, causal=True),
    *_attention(kv_heads=1), *_attention(queries=8, keys=8, kv_heads=1, causal=True), *_attention(kv_heads=2, mask=(4, 4, 6, 6)),
    *_attention(kv_heads=2, mask=(4, 1, 6, 6)), *_attention(queries=4, causal=True), *_attention(queries=2), *_attention(kv_heads=2),
    *_attention(mask=(6, 6)), *_attention(mask=(4, 1, 6, 6)), *_attention(mask=(1, 4, 6, 6)),
    *_attention(queries=2, mask=(4, 1, 1, 6)),
    _attention(queries=1, kv_heads=2)[0],
    *_attention(heads=6, kv_heads=3), *_attention(heads=12, kv_heads=6, queries=4, causal=True),
    *(_attention(queries=q, mask=(4, 1, q, 6), hidden=keys)[0] for q in (1, 2) for keys in (slice(0, 3), slice(2, 6), slice(None))),
    _attention(queries=2, mask=(4, 4, 2, 1))[0],
)


def _conv(x: T, weight: T, out: T, bias: int | None = None, stride: int = 1, padding: int = 1, groups: int = 1,
          transposed: bool = False, mask: tuple[bool, ...] = (True, True, True)) -> tuple[Sample, Sample]:
    n = len(x.factors) - 2
    tail = ((stride,) * n, (padding,) * n, (1,) * n, transposed, (0,) * n, groups)
    return (sample(aten.convolution.default, x, weight, bias and T(bias), *tail),
            sample(aten.convolution_backward.default, out, x, weight, (bias,) if bias else None, *tail,
                   mask if bias else (*mask[:2], False)))


CONV = (
    *_conv(T(2, 4, 6, 6), T(8, 4, 3, 3), T(2, 8, 6, 6), bias=8),
    *_conv(T(2, 4, 6, 6), T(8, 4, 3, 3), T(2, 8, 6, 6), bias=8, mask=(False, True, True)),
    *_conv(T(2, 4, 8, 8), T(8, 4, 2, 2), T(2, 8, 4, 4), stride=2, padding=0),
    *_conv(T((2, 4), 4, 6), T(8, 4, 3), T((2, 4), 8, 6), bias=8),
    *_conv(T(2, 4, 6, 6), T(4, 8, 3, 3), T(2, 8, 6, 6), bias=8, transposed=True),
    *_conv(T(2, 4, 6, 6), T(8, 1, 3, 3), T(2, 8, 6, 6), bias=8, groups=4),
    *_conv(T(2, 8, 6, 6), T(4, 4, 3, 3), T(2, 4, 6, 6), bias=4, groups=2),
    sample(aten.max_pool2d_with_indices.default, T(2, 4, 6, 6), (2, 2)),
    sample(aten.max_pool2d_with_indices_backward.default, T(2, 4, 3, 3), T(2, 4, 6, 6), (2, 2), (2, 2), (0, 0), (1, 1),
           False, _ids(2, 4, 3, 3, high=36)),
    sample(aten.avg_pool2d.default, T((2, 4), 4, 6, 6), (2, 2)),
    sample(aten.avg_pool2d_backward.default, T(2, 4, 3, 3), T(2, 4, 6, 6), (2, 2), (2, 2), (0, 0), False, True, None),
    sample(aten._adaptive_avg_pool2d.default, T(2, 4, 6, 6), (2, 2)),
    sample(aten._adaptive_avg_pool2d_backward.default, T(2, 4, 2, 2), T(2, 4, 6, 6)),
    sample(aten.adaptive_max_pool2d.default, T(2, 4, 6, 6), (2, 2)),
    sample(aten.reflection_pad2d.default, T(2, 4, 6, 6), (1, 1, 1, 1)),
    sample(aten.upsample_nearest2d.vec, T(2, 4, 6, 6), None, (2.0, 2.0)),
    sample(aten.upsample_nearest2d_backward.default, T(2, 4, 8, 8), (8, 8), (2, 4, 4, 4)),
    sample(aten.upsample_bilinear2d.default, T(2, 4, 4, 4), (8, 8), False),
    sample(aten.upsample_bilinear2d_backward.default, T(2, 4, 8, 8), (8, 8), (2, 4, 4, 4), False),
)


def batch_norms(batch: int | tuple[int, ...], c: int, *dims: int, dtype: torch.dtype = _f64, affine: bool = True) -> tuple[Sample, ...]:
    x, mean, var = T(batch, c, *dims, dtype=dtype), T(c, dtype=dtype), _positive(c, dtype=dtype)
    w = b = mean if affine else None
    functional, backward = aten._native_batch_norm_legit_functional.default, aten.native_batch_norm_backward.default
    return (
        sample(functional, x, w, b, mean, var, True, 0.1, 1e-5),
        sample(functional, x, w, b, mean, var, False, 0.1, 1e-5),
        sample(aten._native_batch_norm_legit_no_training.default, x, w, b, mean, var, 0.1, 1e-5),
        sample(aten._native_batch_norm_legit.no_stats, x, w, b, True, 0.1, 1e-5),
        sample(backward, x, x, w, mean, var, mean, var, True, 1e-5, (True, affine, affine)),
        sample(backward, x, x, w, mean, var, mean, var, False, 1e-5, (True, affine, affine)),
    )


_UPDATE = aten._batch_norm_with_update_functional.default

def rms_norms(*x: int | tuple[int, ...], shape: tuple[int, ...], affine: bool = True, dtype: torch.dtype = _f64) -> tuple[Sample, ...]:
    given, weight = T(*x, dtype=dtype), T(*shape, dtype=dtype) if affine else None
    lead = [(n,) if isinstance(n, int) else n for n in x[:len(x) - len(shape)]]
    rstd = _positive(*map(prod, lead), *(1 for _ in shape), factors=(*lead, *(() for _ in shape)), dtype=dtype)
    masks = ((True, True), (True, False), (False, True)) if affine else ((True, False),)
    return (sample(RMS_NORM, given, shape, weight, 1e-5),
            *(sample(RMS_NORM_BACKWARD, given, given, shape, rstd, weight, mask) for mask in masks))


NORM = (
    sample(aten.native_layer_norm.default, T((2, 4), 6), (6,), T(6), T(6), 1e-5),
    sample(aten.native_layer_norm.default, T(4, 2, 6), (2, 6), None, None, 1e-5),
    sample(aten.native_layer_norm_backward.default, T(4, 2, 6), T(4, 2, 6), (6,), T(4, 2, 1), _positive(4, 2, 1), T(6),
           T(6), (True, True, True)),
    sample(aten.native_layer_norm_backward.default, T(4, 2, 6), T(4, 2, 6), (6,), T(4, 2, 1), _positive(4, 2, 1), T(6),
           None, (True, True, False)),
    sample(aten._fused_rms_norm.default, T(4, 2, 6), (6,), T(6), 1e-5),
    *rms_norms(4, 2, 6, shape=(6,)), *rms_norms(4, 2, 6, shape=(2, 6)), *rms_norms(4, 6, shape=(6,), affine=False), *rms_norms(6, shape=(6,)),
    *rms_norms((2, 4), 6, shape=(6,)), *rms_norms(4, 2, 6, shape=(6,), dtype=_f32),
    sample(aten.native_group_norm.default, T(4, 8, 6), T(8), T(8), 4, 8, 6, 4, 1e-5),
    sample(aten.native_group_norm.default, T(4, 8, 2, 6), None, None, 4, 8, 12, 2, 1e-5),
    sample(aten.native_group_norm.default, T(4, 8, 6), T(8), T(8), 4, 8, 6, 1, 1e-5),
    sample(aten.native_group_norm_backward.default, T(4, 8, 6), T(4, 8, 6), T(4, 4), _positive(4, 4), T(8), 4, 8, 6, 4,
           (True, True, True)),
    *batch_norms(4, 6, 2, 2), *batch_norms((2, 4), 6), *batch_norms(4, 6, 8, dtype=_f32),
    *batch_norms(4, 6, 2, affine=False),
    sample(_UPDATE, T(4, 6, 2, 2), T(6), T(6), T(6), _positive(6), 0.1, 1e-5),
    sample(aten.batch_norm_backward.default, T(4, 6, 2), T(4, 6, 2), T(6), T(6), _positive(6), T(6), _positive(6), True,
           1e-5, (True, True, True), Fixed(torch.empty(0, dtype=torch.uint8))),
    sample(aten._weight_norm_interface.default, T(4, 6, 2), T(4, 1, 1)),
    sample(aten._weight_norm_interface.default, T(4, 6), T(1, 6), 1),
    *(sample(aten._weight_norm_interface_backward.default, T(4, 6), T(4, 6), g, Fixed(torch.rand(shape, dtype=_f64) + 1), d)
      for g, shape, d in ((T(4, 1), (4, 1), 0), (T(1, 6), (1, 6), 1))),
)

_PERM = Fixed(torch.tensor([3, 0, 5, 1, 7, 2]))
_rows, _columns = _ids(4, 2, high=6, low=-6), _ids(2, high=8)

INDEX = (
    sample(aten.gather.default, T(4, 6), 1, _ids(4, 2, high=6)),
    sample(aten.gather.default, T(4, 6, 8), -1, _ids(4, 6, 2, high=8)),
    sample(aten.gather.default, T((2, 4), 6), 1, _flat(_ids(8, 2, high=6), (2, 4), (2,))),
    sample(aten.gather.default, T(4, 6), 0, _ids(2, 4, high=4)),
    sample(aten.scatter_add.default, T(4, 8), 1, _ids(4, 6, high=8), T(4, 6)),
    sample(aten.scatter_add.default, T(4, 8), 0, _ids(2, 8, high=4), T(2, 8)),
    sample(aten.scatter.src, T(4, 8), 1, Fixed(torch.tensor([[0, 5], [7, 2], [3, 4], [6, 1]])), T(4, 2)),
    sample(aten.scatter.value, T(4, 8), 1, _ids(4, 2, high=8), 2.0),
    sample(aten.scatter_reduce.two, T(4, 8), 1, _ids(4, 6, high=8), T(4, 6), "amax"),
    sample(aten.index_select.default, T(4, 8, 6), 1, _ids(2, high=8)),
    sample(aten.index_select.default, T(8, 6), 0, _ids(4, high=8)),
    sample(aten.index_add.default, T(4, 8), 1, _ids(6, high=8), T(4, 6), alpha=2),
    sample(aten.index_add.default, T(8, 6), 0, _ids(4, high=8), T(4, 6)),
    sample(aten.index_copy.default, T(4, 8), 1, _PERM, T(4, 6)),
    *(sample(aten.index_copy.default, T(4, 8, 6), 1, Fixed(torch.tensor(rows)), T(4, len(rows), 6)) for rows in ([6], [0], [3, 4, 5], [1, 0])),
    sample(aten.index_fill.int_Scalar, T(4, 8), 1, _ids(2, high=8), 3.0),
    sample(aten.index.Tensor, T(8, 6), (_ids(4, high=8),)),
    sample(aten.index.Tensor, T(6, 8), (_rows,)),
    sample(aten.index.Tensor, T(4, 6, 8), (None, _rows)),
    sample(aten.index.Tensor, T(4, 6, 8), (None, _rows, _columns)),
    sample(aten.index.Tensor, T(6, 4, 8), (_rows, None, _columns)),
    sample(aten.index.Tensor, T(8, 6, high=9), (_ids(4, high=8),)),
    sample(aten.index.Tensor, T((2, 4), 6), (_ids(4, high=8),)),
    sample(aten.gather.default, T((2, 4), 6), 0, _ids(2, 6, high=8)),
    sample(aten.index_select.default, T(2, (4, 2)), 1, _ids(4, high=8)),
    sample(aten.index_put.default, T((2, 4), 6), (_ids(4, high=8),), T(4, 6), True),
    sample(aten.scatter_add.default, T((2, 4), 6), 0, _ids(2, 6, high=8), T(2, 6)),
    sample(aten.index_put.default, T(6, 8), (_rows,), T(4, 2, 8), True),
    sample(aten.index_put.default, T(6, 8), (_rows,), T(8), True),
    sample(aten.index_put.default, T(6, 8), (_rows,), T(4, 1, 8), True),
    sample(aten.index_put.default, T(6, 8), (_rows,), T(), True),
    sample(aten.index_put.default, T(8, 6), (_PERM,), T(6, 6), False),
    sample(aten.index_put.default, T(4, 8, 6), (None, Fixed(torch.tensor([3, -2])),), T(4, 2, 6)),
    sample(aten.index_put.default, T(4, 2, 8, 6), (None, None, Fixed(torch.tensor([7]))), T(4, 2, 1, 6)),
    sample(aten.index_put.default, T(8, 6), (_PERM,), T(6)),
    sample(aten.index_put.default, T(4, 6, 8), (None, _rows, _columns), T(4, 4, 2), True),
    sample(aten.index_put.default, T(6, 4, 8), (_rows, None, _columns), T(4, 2, 4), True),
    sample(aten._unsafe_index_put.default, T(6, 8), (_rows,), T(4, 2, 8), True),
    sample(aten.topk.default, T((2, 4), 6), 2),
    sample(aten.topk.default, T(4, 6, 8), 2, 1),
    sample(aten.sort.default, T(4, 6)),
    sample(aten.sort.stable, T(4, 6), stable=True, dim=0),
    sample(aten.argsort.default, T(4, 6), 0),
    sample(aten.argsort.stable, T(4, 6), stable=True, dim=0),
    sample(aten.searchsorted.Tensor, _positive(6), T(4, 2)),
    sample(aten.searchsorted.Tensor, Fixed(torch.arange(24.0, dtype=_f64).view(4, 6)), T(4, 2)),
    sample(aten.bucketize.Tensor, T(4, 2), Fixed(torch.arange(6.0, dtype=_f64))),
    sample(aten.histc.default, T(8), 4, -1, 1),
    sample(aten.histc.default, T(8), 4),
    sample(aten.take.default, T(4, 6), _ids(4, 2, high=24)),
)

_ENDS = Fixed(torch.tensor([3, 4, 4, 8], dtype=torch.int32))

GROUPED = (
    sample(aten._grouped_mm.default, T(8, 16, dtype=_f32), T(4, 16, 32, dtype=_f32), _ENDS),
    sample(aten._grouped_mm.default, T(16, 8, dtype=_f32), T(8, 32, dtype=_f32), _ENDS),
)


def _definite(batch: int, n: int) -> torch.Tensor:
    """Symmetric matrices whose eigenvalues are at least 1."""
    x = torch.randn(batch, n, n, generator=torch.Generator().manual_seed(5), dtype=_f64)
    return x @ x.mT + torch.eye(n, dtype=_f64)


_MATRICES = Fixed(_definite(8, 6))
_ROOTS = Fixed(torch.linalg.cholesky(_MATRICES.tensor))
_LU, _PIVOTS = map(Fixed, torch.linalg.lu_factor(_MATRICES.tensor))

LINALG = (
    *(sample(aten._linalg_svd.default, T((2, 4), 6, 2), full, uv) for full in (False, True) for uv in (False, True)),
    *(sample(aten._linalg_eigh.default, _flat(_MATRICES, (2, 4), (6,), (6,)), "L", v) for v in (False, True)),
    *(sample(aten.linalg_qr.default, T(8, 6, 2), mode) for mode in ("reduced", "complete", "r")),
    sample(aten.linalg_qr.default, T(6, 2)),
    *(sample(op, T((2, 4), 6, 6)) for op in (aten._linalg_det.default, aten._linalg_slogdet.default)),
    sample(aten.linalg_pinv.atol_rtol_tensor, T(8, 6, 2)),
    sample(aten.linalg_pinv.atol_rtol_tensor, T(8, 6, 2), atol=_positive(8), rtol=_positive(1)),
    sample(aten.linalg_solve_triangular.default, _ROOTS, T(8, 6, 2), upper=False),
    sample(aten.linalg_solve_triangular.default, _ROOTS, T(8, 2, 6), upper=False, left=False),
    sample(aten.linalg_solve_triangular.default, Fixed(_ROOTS.tensor[0]), T(8, 6, 2), upper=False),
    sample(aten.linalg_lu_solve.default, _LU, _PIVOTS, T(8, 6, 2)),
    sample(aten.linalg_lu_solve.default, _LU, _PIVOTS, T(8, 2, 6), left=False),
    sample(aten.cholesky_solve.default, T(8, 6, 2), _ROOTS),
)

CHECKS = (
    sample(CHECKED, T(8, 6), (Fixed(torch.tensor(True)), Fixed(torch.tensor(True))), ("one", "two")),
    sample(CHECKED, T(), (Fixed(torch.tensor(True)),), ("one",)),
)

SPECIAL: tuple[Sample, ...] = CHECKS + EMBEDDING + LOSS + ATTENTION + CONV + NORM + INDEX + GROUPED + LINALG
