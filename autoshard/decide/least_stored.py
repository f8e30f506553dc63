"""Among plans of equal cost the one that stores least: nothing else breaks that tie for weights that are not trained.

To read a slice of a whole weight costs nothing, and neither does reading the slice where it alone is stored. The search has no reason to prefer
the second, so this pass comes after it: every weight in turn takes the placement of fewest bytes at which the choice costs no more and loads no
row more, with the copies of the weight and the views between it and its readers moved along. Readers stay as they are, so the
objective does, and with it bound and gap. It is a descent weight by weight, not a proof that no plan of that cost stores less. Weights that are
trained are left alone: their update is priced by stored bytes.
"""
from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import product

import numpy as np

from autoshard.base.graph import Op, Ref
from autoshard.decide.program import Program
from autoshard.formulate.problem_of import Formulation
from autoshard.formulate.values import local_bytes
from autoshard.rules import registry
from autoshard.search.problem import Edge, Problem, Solution, evaluate

ROUNDING = 1e-12
"""Share of the cost by which sums of the same seconds in another order may differ."""
MOST = 2_000
"""Ways to set a weight and its views that are tried."""


def with_least_stored(program: Program, found: Solution) -> Solution:
    """`found` with fewer stored bytes where that costs nothing and still fits."""
    formulation = program.formulation
    weights = [op for op in formulation.table.graph.of_kind("param") if op.name not in formulation.table.trained]
    if found.choice is None or not weights:
        return found
    choice, around = np.array(found.choice), _Around.of(formulation.problem)
    for op in weights:
        _shrink(formulation, around, choice, op, ROUNDING * abs(found.cost))
    if np.array_equal(choice, found.choice):
        return found
    cost = evaluate(formulation.problem, choice)
    return replace(found, choice=choice) if cost <= found.cost * (1 + ROUNDING) and program.fits(choice) else found


@dataclass(frozen=True, eq=False)
class _Around:
    """The edges at every node, and what its states put on rows."""

    problem: Problem
    edges: tuple[list[Edge], ...]
    items: dict[tuple[int, int], list[int]] = field(default_factory=dict)

    @staticmethod
    def of(problem: Problem) -> _Around:
        edges: tuple[list[Edge], ...] = tuple([] for _ in range(problem.n))
        for edge in problem.edges:
            edges[edge.u].append(edge)
            edges[edge.v].append(edge)
        around = _Around(problem, edges)
        for i, key in enumerate(zip(problem.items.node.tolist(), problem.items.strategy.tolist(), strict=True)):
            around.items.setdefault(key, []).append(i)
        return around

    def cost(self, nodes: Sequence[int], choice: np.ndarray) -> float:
        """Of the nodes and of all edges at them."""
        touched = {id(e): e for n in nodes for e in self.edges[n]}
        return float(sum(self.problem.node_costs[n][choice[n]] for n in nodes)
                     + sum(e.table[e.rows[choice[e.u]], e.cols[choice[e.v]]] for e in touched.values()))

    def loads(self, nodes: Sequence[int], choice: np.ndarray) -> np.ndarray:
        """What the nodes put on the rows."""
        out = np.zeros(len(self.problem.row_limit))
        for n in nodes:
            for i in self.items.get((n, int(choice[n])), ()):
                out[self.problem.items.row[i]] += self.problem.items.amount[i]
        return out


def _shrink(formulation: Formulation, around: _Around, choice: np.ndarray, op: Op, slack: float) -> None:
    """Set the weight's node, and what follows it, to the state of fewest bytes that costs no more. Writes into `choice`."""
    home = formulation.units.index(op.name)
    specs = formulation.units.outputs(Ref(op.name))
    stored = np.array([local_bytes(formulation.table, Ref(op.name), s) for s in specs.specs])[specs.index]
    if len(formulation.units.units[home].members) > 1 or stored.min() == stored[choice[home]]:
        return
    views = _views(formulation, op)
    copies = _copies(formulation, {op.name, *(m for v in views for m in formulation.units.units[v].members)})
    nodes = (home, *views, *copies)
    now, loads = around.cost(nodes, choice), around.loads(nodes, choice)
    for moved in _ways(around, choice, home, views, copies, stored):
        if around.cost(nodes, moved) <= now + slack and np.all(around.loads(nodes, moved) <= loads * (1 + ROUNDING)):
            choice[list(nodes)] = moved[list(nodes)]
            return


def _views(formulation: Formulation, op: Op) -> list[int]:
    """Nodes of views alone that read the weight and nothing else."""
    graph, found = formulation.table.graph, []
    for name, _ in graph.users.get(Ref(op.name), ()):
        node = formulation.units.index(name)
        members = formulation.units.units[node].members
        if all(registry.is_view(graph.op(m)) and {r.op for r in graph.op(m).refs} <= {op.name, *members} for m in members) and node not in found:
            found.append(node)
    return found


def _copies(formulation: Formulation, makers: set[str]) -> list[int]:
    offset = len(formulation.units.units)
    return [offset + i for i, copy in enumerate(formulation.copies) if copy.value.op in makers]


def _ways(around: _Around, choice: np.ndarray, home: int, views: Sequence[int], copies: Sequence[int], stored: np.ndarray) -> Iterator[np.ndarray]:
    """Choices that store less, fewest bytes first, each with its cheapest copies."""
    costs = around.problem.node_costs
    smaller = [s for s in np.argsort(stored, kind="stable").tolist() if stored[s] < stored[choice[home]]]
    if len(smaller) * int(np.prod([len(costs[v]) for v in views])) > MOST:
        return
    for state, *others in product(smaller, *(range(len(costs[v])) for v in views)):
        moved = np.array(choice)
        moved[[home, *views]] = [state, *others]
        for copy in copies:
            moved[copy] = _cheapest(around, moved, copy)
        yield moved


def _cheapest(around: _Around, choice: np.ndarray, node: int) -> int:
    best, at = np.inf, int(choice[node])
    for state in range(len(around.problem.node_costs[node])):
        choice[node] = state
        if (cost := around.cost((node,), choice)) < best:
            best, at = cost, state
    return at
