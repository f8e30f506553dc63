"""FLOP of a step as seconds at peak: what model and hardware FLOP utilisation are made of.

Each op's FLOP, which its sharding rule counts (attention with a causal mask as half), are divided by the device's peak at the op's dtype:

    MFU   of the model: every op of forward and backward once, whole, without what is computed again; over all ranks
    HFU   of what ranks execute: local shapes, with recomputation and work that ranks repeat
"""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

from autoshard.base.graph import Call, Graph
from autoshard.base.plan import RECOMPUTE_SUFFIX, Plan
from autoshard.base.spec import Spec, local_shape
from autoshard.cost.cluster import Device
from autoshard.cost.compute import compute_dtype
from autoshard.rules.registry import rule_of

Shapes = Callable[[tuple[int, ...], Spec], tuple[int, ...]]


def model_seconds(graph: Graph, plan: Plan, device: Device) -> float:
    """At peak on one device, of all ranks' work together: the numerator of MFU times the number of ranks."""
    return sum(_at_peak(graph, plan, device, lambda shape, spec: shape, lambda name: not name.endswith(RECOMPUTE_SUFFIX)))


def executed_seconds(graph: Graph, plan: Plan, device: Device) -> float:
    """At peak, of one rank's work."""
    return sum(_at_peak(graph, plan, device, lambda shape, spec: local_shape(shape, spec, plan.spec_mesh.sizes), lambda name: True))


def _at_peak(graph: Graph, plan: Plan, device: Device, local: Shapes, counts: Callable[[str], bool]) -> list[float]:
    known: dict[object, float] = {}
    out = []
    for op in graph.of_kind("call"):
        call, chosen = graph.calls[op.name], plan.ops[op.name]
        if counts(op.name):
            if (call, chosen) not in known:
                ins = [local(m.logical_shape, s) for m, s in zip(call.inputs, chosen.inputs, strict=True)]
                outs = [None if m is None else local(m.logical_shape, s) for m, s in zip(call.outputs, chosen.outputs, strict=True)]
                known[call, chosen] = _seconds(call, ins, outs, device)
            out.append(graph.runs_of(op.phase) * known[call, chosen])
    return out


def _seconds(call: Call, ins: list[Any], outs: list[Any], device: Device) -> float:
    if inside := getattr(call.target, "inside", ()):
        return sum(_seconds(c, [m.logical_shape for m in c.inputs], [m and m.logical_shape for m in c.outputs], device) for c in inside)
    flops = rule_of(call.target).flops
    return 0.0 if flops is None else float(flops(call, ins, outs)) / device.peak_flops(compute_dtype(call))
