"""Ties the copies of repeated layers: one node for all nodes of a group.

The choices of the tied problem are the choices of the whole problem with equal copies, so its optimum is a starting choice.
It is not a bound: layers may differ at the optimum. All costs, loads and limits are counted per layer (divided by the
most common number of copies), so the arrays of a layer equal those in the whole problem, and results of the
reductions for one hold for the other."""
from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace

import numpy as np

from autoshard.search.problem import Edge, Items, Problem, distinct
from autoshard.search.reductions.core import Core, build


@dataclass(frozen=True, eq=False)
class Tied:
    """`problem`'s choices, lifted, cost `copies` times as much and load rows `copies` times as much in the whole problem."""

    problem: Problem
    copies: int
    place: np.ndarray  # per node of the whole problem, its node here

    @property
    def first(self) -> np.ndarray:
        """Per node here, the first of the whole problem that it stands for."""
        return np.unique(self.place, return_index=True)[1]

    def lift(self, choice: np.ndarray) -> np.ndarray:
        """The choice of the whole problem that treats the copies alike."""
        return np.asarray(choice)[self.place]

    def spread(self, choice: np.ndarray) -> list[np.ndarray]:
        """Per layer, the choice of the whole problem in which all layers do what it does in `choice`; each of these once. A group of fewer
        nodes than others repeats its last one."""
        order, size = np.argsort(self.place, kind="stable"), np.bincount(self.place)
        begin = np.cumsum(size) - size
        return distinct(choice[order[begin + np.minimum(layer, size - 1)]][self.place] for layer in range(int(size.max(initial=0))))


def tie(problem: Problem) -> Tied:
    """The quotient of `problem`. A group whose members differ in their number of strategies is left free. Several items of
    one strategy on one row add up; loads of copies add up too, so rows keep their limits."""
    node = _representatives(problem)
    order, quotient, sizes = np.unique(node, return_inverse=True, return_counts=True)
    copies = Counter(sizes[sizes > 1].tolist()).most_common(1)[0][0] if problem.n > len(order) else 1
    costs = _costs(problem, quotient, len(order), copies)
    edges = _edges(problem, quotient, costs, copies)
    times = problem.intervals
    tied = Problem(tuple(costs), edges, problem.row_limit / copies, problem.row_price, _items(problem, quotient, copies),
                   None if times is None else replace(times, limit=times.limit / copies, node=quotient[times.node],
                                                      amount=times.amount / copies),
                   names=tuple(problem.names[v] for v in order) if problem.names else ())
    return Tied(tied, copies, quotient)


def tied_core(problem: Problem, core: Core) -> tuple[Tied, Core] | None:
    """The quotient of `problem`, not reduced, sharing the memo of the problem's own `core`. None where no layers can be tied."""
    tied = tie(problem)
    return (tied, build(tied.problem, core)[0]) if tied.problem.n < problem.n else None


def _costs(problem: Problem, quotient: np.ndarray, count: int, copies: int) -> list[np.ndarray]:
    """Per copy: the very array of a group's members where all of them have one and are as many as layers."""
    kinds: list[dict[int, tuple[np.ndarray, int]]] = [{} for _ in range(count)]
    for v, q in enumerate(quotient.tolist()):
        cost = problem.node_costs[v]
        kinds[q][id(cost)] = cost, kinds[q].get(id(cost), (cost, 0))[1] + 1
    return [_scaled_sum(list(of.values()), copies) for of in kinds]


def _scaled_sum(parts: list[tuple[np.ndarray, int]], copies: int) -> np.ndarray:
    first, count = parts[0]
    if len(parts) == 1 and count == copies:
        return first
    return sum((count / copies * part for part, count in parts), np.zeros_like(first))


def _items(problem: Problem, quotient: np.ndarray, copies: int) -> Items:
    """Items of one strategy on one row as one; where all copies load alike it is the load of one of them, unrounded."""
    items = problem.items
    if not len(items.node):
        return items
    node = quotient[items.node]
    order = np.lexsort((items.row, items.strategy, node))
    node, strategy, row, amount = node[order], items.strategy[order], items.row[order], items.amount[order]
    new = np.flatnonzero(np.concatenate([[True], (np.diff(node) != 0) | (np.diff(strategy) != 0) | (np.diff(row) != 0)]))
    count = np.diff(np.append(new, len(node)))
    alike = np.minimum.reduceat(amount, new) == np.maximum.reduceat(amount, new)
    total = np.where(alike, amount[new] * (count / copies), np.add.reduceat(amount, new) / copies)
    return Items(node[new], strategy[new], row[new], total)


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


def _edges(problem: Problem, quotient: np.ndarray, costs: list[np.ndarray], copies: int) -> tuple[Edge, ...]:
    """Edges between the same two groups add up, equal ones by multiplication; one within a group is its diagonal."""
    counts: dict[tuple[int, int], Counter[tuple[int, int, int, bool]]] = {}
    kinds: dict[tuple[int, int, int, bool], Edge] = {}
    scaled: dict[tuple[int, int], np.ndarray] = {}
    place = quotient.tolist()
    for e in problem.edges:
        u, v = place[e.u], place[e.v]
        kind = (id(e.table), id(e.rows), id(e.cols), u > v)
        kinds.setdefault(kind, e)
        counts.setdefault((min(u, v), max(u, v)), Counter())[kind] += 1
    out = []
    for (u, v), kinds_here in counts.items():
        for kind, count in kinds_here.items():
            e, table = kinds[kind], kinds[kind].table
            if u == v:
                costs[u] = costs[u] + count / copies * table[e.rows, e.cols]
                continue
            if count != copies:
                if (id(table), count) not in scaled:
                    scaled[id(table), count] = count / copies * table
                table = scaled[id(table), count]
            out.append(Edge(*((v, u) if kind[3] else (u, v)), table, e.rows, e.cols))
    return tuple(out)
