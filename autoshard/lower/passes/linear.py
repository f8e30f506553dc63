"""Matmuls by a weight as one call each: what was `t`, `reshape`, `mm` or `addmm` and `reshape` in the graph is `linear`, which calls the same
kernel. The same for the gradient of its bias: a sum that keeps its dims and a `reshape` that drops them are one sum.

Up to three calls from Python less for each weight; of a small step that is a good part of what is no kernel.
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
        found = _by_weight(node)
        if found is None:
            continue
        rows, turned, bias = found
        out = _as_rows_were(node, rows)
        given = rows.args[0] if out is not node else rows
        with graph.inserting_before(node):
            joined = graph.call_function(aten.linear.default, (given, turned.args[0], *bias), name=f"linear_{node.name}")
        joined.meta = dict(out.meta)
        out.replace_all_uses_with(joined)
        for gone in dict.fromkeys((out, node, turned, rows)):
            if not gone.users and gone.op == "call_function":
                graph.erase_node(gone)
        count += 1
    return count


def join_sums(graph: Graph) -> int:
    """Rewrites the graph; returns how many sums it joined with the `reshape` that drops the dims they keep. Needs fake values in `meta["val"]`."""
    count = 0
    for node in list(graph.nodes):
        if node.target is not aten.sum.dim_IntList or node.args[2:] != (True,) or not node.args[1] or len(node.users) != 1:
            continue
        out, shape = next(iter(node.users)), node.meta["val"].shape
        summed = {d % len(shape) for d in node.args[1]}
        if out.target in VIEWS and out.meta["val"].shape == tuple(n for d, n in enumerate(shape) if d not in summed):
            node.args, node.meta = node.args[:2], {**node.meta, "val": out.meta["val"]}
            out.replace_all_uses_with(node)
            graph.erase_node(out)
            count += 1
    return count


def _by_weight(node: Node) -> tuple[Node, Node, tuple[Node, ...]] | None:
    """(rows, transposed matrix, bias) of a matmul by a matrix that nobody else reads transposed; no bias where none is added."""
    if node.target not in (aten.mm.default, aten.addmm.default) or any(factor != 1 for factor in node.kwargs.values()):
        return None  # addmm's factors of both terms
    *bias, rows, turned = node.args
    if turned.target is not aten.t.default or set(turned.users) != {node} or turned in (rows, *bias):
        return None
    if bias and not (bias[0].meta["val"].ndim == 1 and bias[0].meta["val"].shape[0] == node.meta["val"].shape[-1]):
        return None  # `linear` adds a vector to each row; addmm also spreads a single number, or adds a matrix
    return rows, turned, tuple(bias)


def _as_rows_were(node: Node, rows: Node) -> Node:
    """What gives the product the dims that its rows had before they were joined for it; the product itself where nothing does."""
    users = list(node.users)
    if rows.target not in VIEWS or len(users) != 1 or users[0].target not in VIEWS:
        return node
    before, after = rows.args[0].meta["val"], users[0].meta["val"]
    fits = before.is_contiguous() and before.ndim > 1 and tuple(after.shape) == (*before.shape[:-1], node.meta["val"].shape[-1])
    return users[0] if fits else node
