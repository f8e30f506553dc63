"""Repeated layers solved once: nodes of one group take one choice.

The quotient has a node per group (and per free node), with the costs, edges and items of all its members added up; a
choice of it lifts to the whole problem at exactly the same cost. Its optimum is the best among tied choices."""
from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from autoshard.search.problem import Edge, Items, Problem


@dataclass(frozen=True, eq=False)
class Tied:
    """`quotient` node of every node of the whole problem is `node_of[n]`."""

    quotient: Problem
    node_of: np.ndarray

    def lift(self, choice: np.ndarray) -> np.ndarray:
        """Choice of the whole problem, at the quotient's cost."""
        return choice[self.node_of]


def tie(problem: Problem) -> Tied | None:
    """The quotient by `problem.groups`; None where nothing repeats. Members whose number of choices differs from
    their group's first one stay free."""
    if problem.groups is None or problem.intervals is not None:
        return None
    node_of = _number(problem)
    count = int(node_of.max(initial=-1)) + 1
    if count == problem.n:
        return None
    costs: list[np.ndarray | None] = [None] * count
    for n, cost in enumerate(problem.node_costs):
        costs[node_of[n]] = cost if costs[node_of[n]] is None else costs[node_of[n]] + cost
    edges = _edges(problem, node_of, costs)
    items = problem.items
    return Tied(Problem(tuple(costs), edges, problem.row_limit, problem.row_price,
                        Items(node_of[items.node], items.strategy, items.row, items.amount)), node_of)


def _number(problem: Problem) -> np.ndarray:
    first: dict[tuple[int, int], int] = {}
    out = np.zeros(problem.n, dtype=np.int64)
    count = 0
    for n, (group, cost) in enumerate(zip(problem.groups.tolist(), problem.node_costs, strict=True)):
        key = (group, len(cost)) if group >= 0 else (-1 - n, 0)
        if key not in first:
            first[key], count = count, count + 1
        out[n] = first[key]
    return out


def _edges(problem: Problem, node_of: np.ndarray, costs: list) -> tuple[Edge, ...]:
    """Edges of the quotient: equal ones once, times how often they occur; one inside a group adds to its cost."""
    seen: dict[tuple[int, int, int, int, int], list] = {}
    for e in problem.edges:
        u, v = int(node_of[e.u]), int(node_of[e.v])
        if u == v:
            costs[u] = costs[u] + e.table[e.rows, e.cols]
        else:
            seen.setdefault((u, v, id(e.table), id(e.rows), id(e.cols)), [0, e])[0] += 1
    scaled: dict[tuple[int, int], np.ndarray] = {}
    out = []
    for (u, v, table, _, _), (times, e) in seen.items():
        if times > 1 and (table, times) not in scaled:
            scaled[table, times] = e.table * times
        out.append(Edge(u, v, e.table if times == 1 else scaled[table, times], e.rows, e.cols))
    return tuple(out)
