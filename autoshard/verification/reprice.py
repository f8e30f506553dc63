"""What a lowered program costs, read off its nodes alone: an independent check of a plan's objective.

Walks the two local graphs. Each op call is priced from the shapes of the tensors that really go in and out of
it, each collective from the buffer it is called on, rearranging copies from the nodes that make them. No
search table, no strategy and no planned collective is looked at. Equal, up to rounding, to `plan.objective_s` and, with what buckets
save, to `plan.predicted["bucketed_s"]`.
"""
from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from math import gcd, prod

import torch

from autoshard import collectives
from autoshard.base.graph import Call, Graph, TensorMeta
from autoshard.base.plan import IN_FLIGHT
from autoshard.cost.cluster import Cluster
from autoshard.cost.compute import call_seconds, host_seconds, op_seconds, optimizer_seconds
from autoshard.cost.fusion import NOTHING, Fused, untouched
from autoshard.cost.shared_calls import Together, share_seconds, small_gradients
from autoshard.errors import LoweringError
from autoshard.experts.ops import EXPERTS, EXPERTS_BACKWARD
from autoshard.lower.emit import Part
from autoshard.lower.lower import Called, LocalGraph, Lowered, call_of
from autoshard.lower.schedule import CollectiveCall
from autoshard.program.interpret import VIEWS
from autoshard.rules import registry
from autoshard.rules.family import Family

aten = torch.ops.aten

@dataclass(frozen=True)
class Seen(CollectiveCall):
    """A collective call found in a lowered graph."""

    window: str = ""
    hideable: bool = False
    inner: bool = False


@dataclass(frozen=True)
class Repriced:
    """Seconds of one step. `planned_s`: every planned collective, small gradients' as shares of calls, as the objective has it; `executed_s`: the
    calls that are made, buckets of gradients as one call and one copy."""

    planned_s: float
    executed_s: float


def collectives_in(lowered: Lowered) -> tuple[Seen, ...]:
    """Every collective of one step, in the order it is issued."""
    graphs = lowered.windows
    return tuple(seen_at(node) for g in graphs for node in g.graph.nodes if node.target in collectives.KIND_OF)


def seen_at(node: torch.fx.Node) -> Seen:
    part: Part = node.meta["part"]
    call = call_of(node, str(node.args[-1]).removeprefix("axis:"))
    return Seen(call.kind, call.axis, call.nbytes, call.bucket, window=part.window, hideable=part.hideable, inner=part.kind == "compute")


def reprice(graph: Graph, lowered: Lowered, cluster: Cluster, optimizer: str, offload: Collection[str] = (),
            on_their_way: int = IN_FLIGHT) -> Repriced:
    """Seconds of one step: compute + optimizer + blocking collectives + what stays of those that can hide.

    `graph` only says what each op is (target, arguments) and which parameters are trained; `offload`: those whose optimizer state
    lies on the host; `on_their_way`: bytes of gradients that may be, at once."""
    compute = 0.0
    untouched_by, small = untouched(graph, cluster.device), small_gradients(graph, on_their_way)
    overlap, update = cluster.overlap, _update_seconds(graph, lowered, cluster, optimizer, offload)
    communication = [0.0, 0.0]
    for local in lowered.windows:
        heavy, runs = 0.0, graph.runs_of(local.window)
        loads = {called.op: _load(graph, called, cluster) for called in local.calls}
        for called in local.calls:
            seconds = loads[called.op] * _op_seconds(graph, called, cluster, untouched_by.get(called.op, NOTHING))
            compute += runs * seconds
            heavy += runs * seconds if registry.is_heavy(graph.op(called.op)) else 0.0
        for i, executed in enumerate((False, True)):
            hide, block = (runs * seconds for seconds in _communication_seconds(local, lowered, cluster, executed, small, loads))
            exposed = max(0.0, hide - overlap.eta * heavy)
            communication[i] += block + overlap.interference * hide + (1.0 - overlap.interference) * exposed
    return Repriced(*(update + compute + seconds for seconds in communication))


def _op_seconds(graph: Graph, called: Called, cluster: Cluster, kept: Fused) -> float:
    call = graph.calls[called.op]
    inputs = [_logical(m, t, graph.calls[called.op]) for m, t in zip(call.inputs, called.inputs, strict=True)]
    outputs = [None if m is None else _logical(m, t, call) for m, t in zip(call.outputs, called.outputs, strict=True)]
    return float(call_seconds(call, inputs, outputs, cluster.device, kept))


def _load(graph: Graph, called: Called, cluster: Cluster) -> float:
    """What the busiest rank takes for a call over an even load: rows come as the data says where a rank has some of the experts only."""
    call = graph.calls[called.op]
    if call.target not in (EXPERTS, EXPERTS_BACKWARD):
        return 1.0
    up = call.argument("up").index
    return cluster.device.imbalance if len(called.inputs[up]) < call.inputs[up].shape[0] else 1.0


def _logical(meta: TensorMeta, local: torch.Tensor, call: Call) -> tuple[int, ...]:
    """Logical local shape of a tensor whose flattened dims torch sees as one. How many pieces a flattened dim
    is in is known, not which factor they cut; prices depend on products over a tensor dim alone."""
    out: list[int] = []
    for size, factors in zip(local.shape, meta.factors, strict=True):
        pieces = prod(factors) // size if size else 1  # nothing in any number of pieces is nothing
        out += _cut(factors, pieces, call)
    return tuple(out)


def _cut(factors: tuple[int, ...], pieces: int, call: Call) -> list[int]:
    """Factors with `pieces` taken out, major first."""
    out = []
    for n in factors:
        common = gcd(n, pieces)
        out.append(n // common)
        pieces //= common
    if pieces != 1:
        raise LoweringError(f"a local tensor of {call.target} is no even piece of the factors {factors}")
    return out


def _communication_seconds(local: LocalGraph, lowered: Lowered, cluster: Cluster, executed: bool,
                           small: Together | None, loads: Mapping[str, float]) -> tuple[float, float]:
    """(hideable, blocking) seconds of the collectives of one window and the copies that rearrange their buffers: as they are
    `executed`, or as they were planned, each small gradient in a call with all of them. `loads`: by op, for the calls that are made inside of it."""
    mesh = lowered.mesh
    link_of = lru_cache(maxsize=None)(lambda axis: cluster.link_of(mesh, mesh.axes(axis)))
    overlaps = cluster.overlap.eta > 0
    hide = block = 0.0
    for node in local.graph.nodes:
        if node.target not in collectives.KIND_OF:
            continue
        seen = seen_at(node)
        calls = (seen,) if executed else seen.planned()
        others = small if seen.hideable and not executed else None
        seconds = sum(share_seconds(call.kind, call.nbytes, others, link_of(call.axis), cluster.device) for call in calls)
        seconds *= loads[node.meta["part"].name] if seen.inner else 1.0
        seconds += sum(float(op_seconds(Family.COPY, 0, 2 * n, torch.uint8, cluster.device)) for n in _copied(node, seen, executed) if n)
        if overlaps and seen.hideable:
            hide += seconds
        else:
            block += seconds
    return hide, block


def _copied(node: torch.fx.Node, seen: Seen, executed: bool) -> list[int]:
    """Bytes of every copy that rearranges a collective's buffers, that of a bucket included if it is `executed`."""
    if seen.inner:
        return []
    if not seen.bucket:
        return [_rearranged_before(node.args[0]) + _rearranged_after(node)]
    flat = [_unviewed(x) for x in node.args[0].args[0]]
    return [*map(_rearranged_before, flat), *([_bytes(node.args[0])] if executed else [])]


def _unviewed(node: torch.fx.Node) -> torch.fx.Node:
    return node.args[0] if node.target in VIEWS else node


def _rearranged_before(buffer: torch.fx.Node) -> int:
    """Bytes copied to bring the pieces of the buffer that is sent to its front."""
    if buffer.target is aten.contiguous.default and buffer.args[0].target is aten.permute.default:
        moved = buffer.args[0]
        return _bytes(moved) if moved.meta.get("part") == buffer.meta["part"] else 0
    return 0


def _rearranged_after(collective: torch.fx.Node) -> int:
    """Bytes copied to put received pieces where they belong."""
    (wait,) = collective.users
    for node in _views_of(wait):
        if node.target is aten.permute.default and node.meta.get("part") == collective.meta["part"]:
            return _bytes(node)
    return 0


def _views_of(node: torch.fx.Node) -> Iterator[torch.fx.Node]:
    """What a received buffer is turned into before the next step of the redistribution reads it."""
    for user in node.users:
        if user.target in VIEWS or user.target is aten.permute.default:
            yield user
            if user.target in VIEWS:
                yield from _views_of(user)


def _bytes(node: torch.fx.Node) -> int:
    return node.meta["val"].numel() * node.meta["val"].dtype.itemsize


def _update_seconds(graph: Graph, lowered: Lowered, cluster: Cluster, optimizer: str, offload: Collection[str]) -> float:
    """The optimizer's update of every parameter whose gradient the backward hands out."""
    params = {op.target for op in graph.of_kind("param")}
    total = 0.0
    for window in lowered.windows:
        out = next(n for n in window.graph.nodes if n.op == "output")
        for port, node in zip(window.gives, out.args[0], strict=True):
            if port.kind == "grad" and port.name in params:
                price = host_seconds if port.name in offload else optimizer_seconds
                total += price(optimizer, _bytes(node), cluster.device)
    return total
