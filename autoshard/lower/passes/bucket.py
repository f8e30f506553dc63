"""Small gradients reduced together: one call instead of many, at the price of one copy.

The plan prices each gradient's reduction by itself, an upper bound; which gradients share a call is settled here, from
the lowered graph alone, so equally on all ranks. A large gradient gains nothing: its call is long already, and without
a bucket it is reduced where it lies.
"""
from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.fx import Graph, Node

from autoshard import _torch
from autoshard.collectives import RUN

aten = torch.ops.aten
SMALL = 1 << 20
"""Bytes of a gradient up to which a call's fixed cost outweighs copying it: 0.3 ms are 300 KB on a link of 1 GB/s."""
BUCKET = 16 << 20
"""Bytes of a bucket. More would only make the first gradient in it wait longer."""
REDUCTIONS = {kind.target: kind.runs for kind in RUN.values() if kind.runs.reduces}


def bucket_gradients(graph: Graph) -> None:
    """Merge reductions of small gradients that nobody waits for in between. The merged call carries the bytes of its
    gradients in `meta["bucket"]`. Needs fake values and parts in the nodes' meta."""
    for members in [b for b in _buckets(graph) if len(b) > 1]:
        _merge(graph, members)


def _buckets(graph: Graph) -> Iterator[list[Node]]:
    """Starts of reductions that may share a call, in the order they are issued."""
    position = {node: i for i, node in enumerate(graph.nodes)}
    filling: dict[Any, list[Node]] = {}
    for node in graph.nodes:
        if not _is_small_reduction(node):
            continue
        kind = (node.target, *node.args[1:], node.meta["val"].dtype)
        members = filling.setdefault(kind, [])
        waits = [position[_wait(m)] for m in members]
        if members and (position[node] > min(waits) or sum(map(_bytes, members)) + _bytes(node) > BUCKET):
            yield members
            members = filling[kind] = []
        members.append(node)
    yield from filling.values()


def _is_small_reduction(node: Node) -> bool:
    part = node.meta.get("part")
    return (node.target in REDUCTIONS and part is not None and part.hideable and part.kind == "redistribute"
            and part.window == "backward" and _bytes(node) <= SMALL)


def _bytes(start: Node) -> int:
    """Of the buffer that is reduced."""
    value = start.args[0].meta["val"]
    return value.numel() * value.dtype.itemsize


def _wait(start: Node) -> Node:
    (wait,) = start.users
    return wait


def _merge(graph: Graph, members: Sequence[Node]) -> None:
    """Rows of the buffer are what each rank gets: all of it for an all-reduce, its piece for a reduce-scatter."""
    first, waits = members[0], [_wait(m) for m in members]
    rows = 1 if REDUCTIONS[first.target].whole else first.args[2]
    order = {node: i for i, node in enumerate(graph.nodes)}
    with graph.inserting_after(max(members, key=order.__getitem__)):
        anchor = graph.create_node("call_function", aten.alias.default, (members[-1].args[0],))  # a place to write before
    with graph.inserting_before(anchor):
        flat = [_call(graph, first, aten.view.default, (m.args[0], [rows, m.args[0].meta["val"].numel() // rows])) for m in members]
        whole = _call(graph, first, aten.cat.default, (flat, 1))
        start = _call(graph, first, first.target, (whole, *first.args[1:]))
    graph.erase_node(anchor)
    start.meta["bucket"] = tuple(map(_bytes, members))
    with graph.inserting_before(min(waits, key=order.__getitem__)):
        done, at = _call(graph, first, _torch.WAIT, (start,)), 0
        for member, wait in zip(members, waits, strict=True):
            shape = list(wait.meta["val"].shape)
            size = wait.meta["val"].numel()
            piece = _call(graph, member, aten.slice.Tensor, (done, 1, at, at + size))
            own = _call(graph, member, aten.view.default, (piece, shape))
            own.meta.update({mark: wait.meta[mark] for mark in ("held", "copy") if mark in wait.meta})
            wait.replace_all_uses_with(own)
            at += size
    for wait, member in zip(waits, members, strict=True):
        graph.erase_node(wait)
        graph.erase_node(member)


def _call(graph: Graph, like: Node, target: Any, args: tuple[Any, ...]) -> Node:
    """A new node that belongs to what `like` belongs to, with its fake value."""
    node = graph.create_node("call_function", target, args)
    values = torch.fx.node.map_arg(args, lambda n: n.meta["val"])
    with like.meta["val"].fake_mode, torch.no_grad():
        node.meta.update(val=target(*values), part=like.meta["part"])
    return node
