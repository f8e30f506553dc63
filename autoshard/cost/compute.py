"""Seconds of an op on one device: a roofline on local shapes, and the optimizer update.

    seconds = max(FLOPs / (peak x e x filled), bytes / (bandwidth x e'), overhead)        views: 0

e is the profile's efficiency of the op's family, e' the share of the bandwidth that it reaches (its own, or e), filled the share of the device
that the shape of a matrix product can use (tiles.py), where the profile says how many multiprocessors there are. Where
the profile holds a measured curve for the op or its family
(`autoshard calibrate` writes them), seconds = curve(bytes), or max(curve(FLOPs + k x bytes), bytes / (bandwidth x e)) for the
families that count FLOPs; k is 0 or the profile's `byte_flop`. Bytes are those of all local inputs and outputs, except
that an op which only picks rows of an input is charged for what it picks. What a rule says that its local kernels move
besides is added, as one pointwise op, and an overhead for each of their small kernels. Every shape entry may be a numpy array with one element
per strategy; one call then prices all strategies of an op.
Source: Williams, Waterman, Patterson, "Roofline", CACM 52(4), 2009.
"""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from autoshard.base.graph import Call
from autoshard.cost.cluster import OPTIMIZER, Device, HostLink
from autoshard.cost.fusion import NOTHING, Fused
from autoshard.cost.optimizers import OPTIMIZERS, optimizer_row
from autoshard.cost.tiles import filled_by
from autoshard.errors import UsageError
from autoshard.rules.family import Family
from autoshard.rules.registry import rule_of
from autoshard.rules.states import ROW_WRITES
from autoshard.rules.types import Rule

# Ops that read only as much of one input as they write: op -> position of that tensor input.
PICKS_FROM = {
    "aten::embedding": 0, "autoshard::embedding_bag": 0, "aten::index_select": 0, "aten::gather": 0, "aten::index.Tensor": 0,
    "aten::_unsafe_index.Tensor": 0, "aten::take": 0, "aten::nll_loss_forward": 0, "aten::nll_loss2d_forward": 0,
    "aten::slice.Tensor": 0, "aten::slice_copy.Tensor": 0, "aten::select.int": 0, "aten::select_copy.int": 0,
    "aten::narrow_copy": 0,
}
# Ops that only ask one input for its shape and dtype.
NEVER_READS = {
    "aten::zeros_like": 0, "aten::ones_like": 0, "aten::full_like": 0, "aten::empty_like": 0, "aten::rand_like": 0,
    "aten::randn_like": 0, "aten::new_zeros": 0, "aten::new_ones": 0, "aten::new_full": 0, "aten::new_empty": 0,
    "aten::nll_loss_backward": 1, "aten::nll_loss2d_backward": 1,
}


def op_seconds(family: Family, flops: Any, nbytes: Any, dtype: torch.dtype, device: Device, op: str = "",
               overhead: float | None = None, filled: Any = 1.0) -> Any:
    """Seconds of an op; `flops` (FLOP) and `nbytes` (bytes moved) may be arrays, `op` is its name for measured curves.
    Views cost 0. `overhead`: what a kernel costs at least, if not the device's (0 for one that another kernel runs). `filled`: share of
    the peak rate that its shape can use.

    >>> op_seconds(Family.MATMUL, 2 * 4096**3, 3 * 2 * 4096**2, torch.bfloat16, h100)
    1.98...e-04                                # 137.4e9 / (989.4e12 x 0.70), compute bound
    """
    flops, nbytes = np.asarray(flops, np.float64), np.asarray(nbytes, np.float64)
    if family.free:
        out = np.zeros(np.broadcast_shapes(flops.shape, nbytes.shape))
    else:
        e, curve = device.efficiency_of(family), device.curve_of(op, family, dtype)
        memory = nbytes / device.reached_bandwidth(family)
        if curve is None:
            least = device.kernel_overhead if overhead is None else overhead
            out = np.maximum(np.maximum(flops / (device.peak_flops(dtype) * e * filled), memory), least)
        else:
            out = np.maximum(curve(flops + curve.per_byte * nbytes), memory) if family.heavy else curve(nbytes)
            out = np.broadcast_to(out, np.broadcast_shapes(flops.shape, nbytes.shape))
    return out if out.ndim else float(out)


def call_seconds(call: Call, inputs: Sequence[Sequence[Any]], outputs: Sequence[Sequence[Any] | None],
                 device: Device, kept: Fused = NOTHING) -> Any:
    """Seconds of one call on local logical shapes: one shape per tensor input and output (None for an
    absent output). Entries are ints, or int arrays [n_strategies], and then so is the result. `kept`: what stays in
    registers or in its place (fusion.py); a call that reads from registers starts no kernel. A call that is made of others
    (program/opaque/opaque.py) costs what they cost, on whole tensors.

    Pricing one strategy gives bit for bit the element of pricing many: both take the same numpy path."""
    if inside := getattr(call.target, "inside", ()):
        return sum(call_seconds(c, [m.logical_shape for m in c.inputs], [m and m.logical_shape for m in c.outputs], device) for c in inside)
    rule = rule_of(call.target)
    ins, outs = [_int64(s) for s in inputs], [None if s is None else _int64(s) for s in outputs]
    flops = rule.flops(call, ins, outs) if rule.flops is not None else 0
    tiled = rule.family is Family.MATMUL and rule.flops is not None and device.multiprocessors
    share = filled_by(outs[0] or (), flops, int(tiled)) if tiled and outs else 1.0
    seconds = op_seconds(rule.family, flops, call_bytes(call, ins, outs, kept), compute_dtype(call), device,
                         op_name(call.target), 0.0 if kept.unread else None, share)
    return _with_local(rule, call, ins, outs, device, seconds)


def started_seconds(call: Call, device: Device, kept: Fused = NOTHING) -> float:
    """Seconds of one call however small its tensors are: what its kernel costs at least. `kept`: as of `call_seconds`."""
    if inside := getattr(call.target, "inside", ()):
        return sum(started_seconds(c, device) for c in inside)
    return float(op_seconds(rule_of(call.target).family, 0.0, 0.0, compute_dtype(call), device, op_name(call.target), 0.0 if kept.unread else None))


def _with_local(rule: Rule, call: Call, ins: Sequence[Any], outs: Sequence[Any], device: Device, seconds: Any) -> Any:
    """`seconds` and those of what the rule says that its local kernels do besides."""
    if rule.moved is not None:
        moved = rule.moved(call, ins, outs)
        seconds = seconds + (moved > 0) * op_seconds(Family.POINTWISE, 0, moved, compute_dtype(call), device, overhead=0.0)
    return seconds if rule.kernels is None else seconds + rule.kernels(call, ins, outs) * device.kernel_overhead


def call_bytes(call: Call, inputs: Sequence[Sequence[Any]], outputs: Sequence[Sequence[Any] | None], kept: Fused = NOTHING) -> Any:
    """Bytes a call reads and writes on local logical shapes (see `PICKS_FROM`, `NEVER_READS`), but for what is `kept`: of a write
    in place those of the new rows, read and written, and of what says where they go."""
    if kept.in_place:
        return _row_bytes(call, inputs)
    name = op_name(call.target)
    made = [_numel(s) * m.dtype.itemsize if s is not None and m is not None else 0
            for s, m in zip(outputs, call.outputs, strict=True)]
    written = sum(made)
    total = sum(n for i, n in enumerate(made) if i not in kept.unwritten)
    for i, (shape, meta) in enumerate(zip(inputs, call.inputs, strict=True)):
        if NEVER_READS.get(name) != i and i not in kept.unread:
            size = _numel(shape) * meta.dtype.itemsize
            total = total + (np.minimum(size, written) if PICKS_FROM.get(name) == i else size)
    return total


def _row_bytes(call: Call, inputs: Sequence[Sequence[Any]]) -> Any:
    read = sum(_numel(s) * m.dtype.itemsize for s, m in zip(inputs[1:], call.inputs[1:], strict=True))
    rows = call.argument(ROW_WRITES[call.target])
    return read + _numel(inputs[rows.index]) * call.inputs[0].dtype.itemsize


def compute_dtype(call: Call) -> torch.dtype:
    """The dtype an op computes in: that of its first floating input, else output, else float32."""
    metas = [m for m in (*call.inputs, *call.outputs) if m is not None]
    return next((m.dtype for m in metas if m.dtype.is_floating_point or m.dtype.is_complex), torch.float32)


def optimizer_seconds(name: str, nbytes: Any, device: Device) -> Any:
    """Seconds of one fused update of a parameter of `nbytes` local bytes (may be an array): tensors read or written
    x nbytes / (bandwidth x e_pointwise), gradient and state being held in the parameter's own dtype; no overhead per
    parameter, as a fused update launches few kernels for the whole model. Where the profile has a measured curve
    "optimizer", it is read at those bytes: the figure of one parameter in the form that was measured.

    Raises UsageError for an unknown optimizer.
    >>> optimizer_seconds("adamw", 4 * 8.03e9, h100)                # 7 x 4 x 8.03e9 / (3.35e12 x 0.85)
    0.07896...
    """
    out = optimizer_row(name).moved * np.asarray(nbytes, np.float64)
    curve = device.curve_of(f"{OPTIMIZER}/{name}", OPTIMIZER, torch.float32)
    if curve is None or name == "none":
        out = out / (device.memory_bandwidth * device.efficiency_of(Family.POINTWISE))
    else:
        out = np.asarray(curve(out))
    return out if out.ndim else float(out)


def host_seconds(name: str, nbytes: Any, device: Device) -> Any:
    """Seconds of the update of one parameter of `nbytes` local bytes (may be an array) whose k tensors of state lie on the host:

        2 x k x (latency + nbytes / bandwidth) + max(update, tensors read or written x kernel overhead)

    The state comes down the host link, the update runs, the state goes up: one after the other (runtime/params/host_state.py), so the
    link's two directions are not used at once. A parameter that is updated alone also starts kernels of its own, some eight for
    Adam (torch/optim/adam.py), of which the seven tensors that its fused update reads or writes are taken as the number.

    Raises UsageError for an optimizer without such state, and where the device has no host link.
    >>> host_seconds("adamw", 4 * 4096**2, h100)           # 2 x 2 x (10e-6 + 67.1e6 / 56.7e9) + 165e-6
    0.00493...
    """
    link, row = host_link(name, device), optimizer_row(name)
    alone = np.maximum(optimizer_seconds(name, nbytes, device), row.moved * device.kernel_overhead)
    out = 2 * row.state * (link.latency + np.asarray(nbytes, np.float64) / link.bandwidth) + alone
    return out if out.ndim else float(out)


def host_link(name: str, device: Device) -> HostLink:
    """The link over which state of optimizer `name` may move. Raises UsageError where there is no such state, or no link."""
    if not optimizer_row(name).state:
        able = ", ".join(sorted(n for n, row in OPTIMIZERS.items() if row.state))
        raise UsageError(f"offload='optimizer': {name} keeps no state that autoshard.local_update could move; use one of {able}, or no offload")
    if device.host_link is None:
        raise UsageError(f"offload='optimizer': the cluster profile gives {device.name} no link to its host; add [device.host_link] with "
                         "latency and bandwidth (docs/add-a-cluster.md), or leave offload out")
    return device.host_link


def op_name(target: Any) -> str:
    """`aten::slice.Tensor`, without the overload where it is `default`."""
    schema = getattr(target, "_schema", None)
    if schema is None:
        return str(target)
    return f"{schema.name}.{schema.overload_name}" if schema.overload_name else schema.name


def _int64(shape: Sequence[Any]) -> tuple[Any, ...]:
    return tuple(np.asarray(n, np.int64) for n in shape)


def _numel(shape: Sequence[Any]) -> Any:
    out = np.ones((), np.int64)
    for n in shape:
        out = out * n
    return out
