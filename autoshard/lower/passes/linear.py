"""Matmuls by a weight as one call each: what was `t`, `reshape`, `mm` and `reshape` in the graph is `linear`, which calls the same kernel.

Three calls from Python less for each weight; of a small decode step that is a good part of what is no kernel.
"""
from __future__ import annotations

import torch
from torch.fx import Graph, Node

aten = torch.ops.aten
VIEWS = (aten.reshape.default, aten.view.default, aten._unsafe_view.default)


def join_linears(graph: Graph) -> int:
    """Rewrites the graph; returns how many matmuls it joined. Needs fake values in `meta["val"]`. Comes before whatever counts positions
    (`Lifetimes`). No value lives longer, and none is copied that was not: rows are joined where that is a view."""
    count = 0
    for node in list(graph.nodes):
        weight = _weight(node)
        if weight is None:
            continue
        rows, out = node.args[0], _as_rows_were(node)
        given = rows.args[0] if out is not node else rows
        with graph.inserting_before(node):
            joined = graph.call_function(aten.linear.default, (given, weight), name=f"linear_{node.name}")
        joined.meta = dict(out.meta)
        out.replace_all_uses_with(joined)
        for gone in dict.fromkeys((out, node, node.args[1], rows)):
            if not gone.users and gone.op == "call_function":
                graph.erase_node(gone)
        count += 1
    return count


def _weight(node: Node) -> Node | None:
    """Of a matmul by a transposed matrix that nobody else reads transposed."""
    if node.target is not aten.mm.default or node.kwargs:
        return None
    turned = node.args[1]
    return turned.args[0] if turned.target is aten.t.default and set(turned.users) == {node} and turned is not node.args[0] else None


def _as_rows_were(node: Node) -> Node:
    """What gives the product the dims that its rows had before they were joined for it; the product itself where nothing does."""
    rows, users = node.args[0], list(node.users)
    if rows.target not in VIEWS or len(users) != 1 or users[0].target not in VIEWS:
        return node
    before, after = rows.args[0].meta["val"], users[0].meta["val"]
    fits = before.is_contiguous() and before.ndim > 1 and tuple(after.shape) == (*before.shape[:-1], node.meta["val"].shape[-1])
    return users[0] if fits else node
