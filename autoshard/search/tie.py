"""Tie the copies of repeated layers: one node for all nodes of a group.

The quotient's choices are the choices of the whole problem that treat the copies alike, at the same cost, so its optimum
is an incumbent. It is no bound: layers may differ at the optimum."""
from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from autoshard.search.problem import Edge, Intervals, Items, Problem

Lift = Callable[[np.ndarray], np.ndarray]


def tie(problem: Problem) -> tuple[Problem, Lift]:
    """(quotient, lift): `lift(choice of the quotient)` is a choice of `problem` of the same cost.

    A group whose members differ in their number of strategies is left free. Several items of one strategy on one row
    add up; loads of copies add up too, so rows keep their limits."""
    node = _representatives(problem)
    order, quotient = np.unique(node, return_inverse=True)
    members = np.argsort(quotient, kind="stable")
    splits = np.split(members, np.cumsum(np.bincount(quotient))[:-1]) if problem.n else []
    costs = [np.sum([problem.node_costs[v] for v in group], axis=0) for group in splits]
    edges = _edges(problem, quotient, costs)
    items = replace(problem.items, node=quotient[problem.items.node]) if len(problem.items.node) else Items.empty()
    times = problem.intervals
    tied = Problem(tuple(costs), edges, problem.row_limit, problem.row_price, items,
                   None if times is None else Intervals(times.limit, quotient[times.node], times.strategy, times.lo, times.hi, times.amount),
                   names=tuple(problem.names[v] for v in order) if problem.names else ())
    return tied, lambda choice: np.asarray(choice)[quotient]


def _representatives(problem: Problem) -> np.ndarray:
    """For every node the first node of its group, or itself."""
    out = np.arange(problem.n)
    if problem.groups is None:
        return out
    first: dict[int, int] = {}
    sizes = [len(c) for c in problem.node_costs]
    mixed = {g for g, v in zip(problem.groups.tolist(), range(problem.n), strict=True)
             if g >= 0 and sizes[first.setdefault(g, v)] != sizes[v]}
    for v, g in enumerate(problem.groups.tolist()):
        if g >= 0 and g not in mixed:
            out[v] = first[g]
    return out


def _edges(problem: Problem, quotient: np.ndarray, costs: list[np.ndarray]) -> tuple[Edge, ...]:
    """Edges between the same two groups add up, equal ones by multiplication; one within a group is its diagonal."""
    counts: dict[tuple[int, int], Counter] = {}
    kinds: dict[tuple, Edge] = {}
    for e in problem.edges:
        u, v = int(quotient[e.u]), int(quotient[e.v])
        kind = (id(e.table), id(e.rows), id(e.cols), u > v)
        kinds.setdefault(kind, e)
        counts.setdefault((min(u, v), max(u, v)), Counter())[kind] += 1
    out = []
    for (u, v), kinds_here in counts.items():
        if u == v:
            for kind, count in kinds_here.items():
                costs[u] = costs[u] + count * np.diagonal(kinds[kind].dense())
            continue
        if len(kinds_here) == 1 and next(iter(kinds_here.values())) == 1:
            (kind,) = kinds_here
            e = kinds[kind]
            out.append(Edge(v, u, e.table, e.rows, e.cols) if kind[3] else Edge(u, v, e.table, e.rows, e.cols))
            continue
        table = sum(count * (kinds[kind].dense().T if kind[3] else kinds[kind].dense()) for kind, count in kinds_here.items())
        out.append(Edge(u, v, table, np.arange(len(costs[u])), np.arange(len(costs[v]))))
    return tuple(out)
