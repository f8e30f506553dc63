"""Makes a known choice cheaper: of the nodes around one, the rest as it is, the best choice is found; then around the next one.

It ends where no neighbourhood has a cheaper choice. That proves nothing about the whole, so there is no bound; but it needs none, and
where the bound of a problem is too loose to close its gap, this is how a good choice gets better. Of repeated layers that the choice
treats alike, one is looked at for all (`tie.py`). A neighbourhood without rows that can bind is solved by elimination and messages
(`min_sum.py`), another one as any problem is."""
from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from autoshard.search.board import MARGIN, Board
from autoshard.search.problem import Edge, Items, Problem, Solution, evaluate, row_loads
from autoshard.search.reductions.core import Core, build
from autoshard.search.routes.auto import search_reduced
from autoshard.search.routes.min_sum import PAIRS, minimise
from autoshard.search.routes.mixture import mix_layers
from autoshard.search.tie import Tied, tie

NODES = 80  # of a neighbourhood: with 40 bert gains 2.45 % instead of 2.49, with 160 no more; a node costs the same in all
WIDE = 320  # of a wide one, with the widest pairs at once: a sweep of resnet takes 11 CPU s, with all widths 15 for 0.2 % more
INNER = 1  # the part of them next to the centre, one of so many, need not be a centre themselves: 2 takes 1.7 times as long for little
SECONDS = 5.0  # for one of them: a net


class Neighbourhoods:
    """Those of one problem: what is computed while one choice is made cheaper the next ones share."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem

    @cached_property
    def alike(self) -> _Layers:
        """For choices that treat repeated layers alike."""
        return _Layers(tie(self.problem))

    @cached_property
    def each(self) -> _Layers:
        """For all choices."""
        return _Layers(Tied(self.problem, 1, np.arange(self.problem.n)))

    def of(self, choice: np.ndarray, cost: float) -> _Layers:
        """Those for a choice of that cost."""
        tied = self.alike.tied
        return self.alike if evaluate(self.problem, tied.lift(choice[tied.first])) <= cost + MARGIN * abs(cost) else self.each


@dataclass(eq=False)
class _Layers:
    """A problem without its repeated layers, and a core of it that lends its memo."""

    tied: Tied

    @cached_property
    def core(self) -> Core:
        return build(self.tied.problem)[0]


def improve(board: Board, nodes: int = NODES, known: Neighbourhoods | None = None) -> None:
    """Make the choice of `board` cheaper until no neighbourhood of `nodes` nodes can, nor any mixture of its layers, or the clock is over.
    Without a choice nothing is done. Layers are mixed after one gain, since what was gained in one of them others may gain too, and where that is
    of no use after twice as many. `known`: of the same problem."""
    known = known or Neighbourhoods(board.problem)
    mix_layers(board, known.alike.tied)
    due, gains = np.ones(board.problem.n, bool), 1
    while board.choice is not None and due.any() and not board.clock.expired():
        first = board.choice
        due = _settle(board, first, nodes, known.of(first, board.cost), due, gains)
        settled = board.choice
        mix_layers(board, known.alike.tied)
        if board.choice is first:  # also where a gain was only one before rounding, and would be found again
            return
        gains = 2 * gains if board.choice is settled else 1
        due |= board.choice != settled


def _settle(board: Board, choice: np.ndarray, nodes: int, layers: _Layers, due: np.ndarray, gains: int) -> np.ndarray:
    """Offer what the neighbourhoods of the nodes that are `due`, and of those that change meanwhile, make of `choice`, the best one of `board`,
    until so many of them made it cheaper. Returns which nodes are still due."""
    tied = layers.tied
    search = _Search(tied.problem, layers.core, choice[tied.first], nodes)
    due = np.bincount(tied.place, due, tied.problem.n) > 0
    waiting = deque(np.flatnonzero(due).tolist())
    while waiting and gains and not board.clock.expired():
        centre = waiting.popleft()
        if not due[centre]:
            continue
        around = search.around(centre)
        due[around[:max(1, len(around) // INNER)]] = False
        changed = search.settle(around, board)
        for v in changed:
            if not due[v]:
                due[v] = True
                waiting.append(v)
        if changed:
            gains -= 1
            board.offer(tied.lift(search.choice), "neighbourhoods")
    return due[tied.place]


class _Search:
    """A problem, the best choice of it so far, and its edges by node. What one neighbourhood computes the others like it share."""

    def __init__(self, problem: Problem, core: Core, choice: np.ndarray, nodes: int) -> None:
        self.problem, self.core, self.choice, self.nodes = problem, core, np.array(choice, dtype=np.int64), nodes
        self.load = row_loads(problem, self.choice)
        self.edges: list[list[Edge]] = [[] for _ in range(problem.n)]
        for edge in problem.edges:
            self.edges[edge.u].append(edge)
            self.edges[edge.v].append(edge)

    def beside(self, v: int) -> list[int]:
        """The neighbours of a node."""
        return [e.v if e.u == v else e.u for e in self.edges[v]]

    def around(self, centre: int) -> list[int]:
        """The nodes nearest to one, itself first."""
        found, waiting = {centre: None}, deque([centre])
        while waiting:
            for v in self.beside(waiting.popleft()):
                if v not in found:
                    found[v] = None
                    waiting.append(v)
                    if len(found) == self.nodes:
                        return list(found)
        return list(found)

    def settle(self, around: list[int], board: Board) -> list[int]:
        """Take the best choice for these nodes if it is cheaper. Returns the nodes that changed and those beside them."""
        before = self.choice[around]
        part = self._part(around)
        found = self._solved(part, before, board)
        if found.choice is None or found.cost >= evaluate(part, before) - MARGIN * abs(board.cost):
            return []
        self.choice[around] = found.choice
        self.load = row_loads(self.problem, self.choice)
        changed = [v for v, now, old in zip(around, found.choice, before, strict=True) if now != old]
        return list(dict.fromkeys(w for v in changed for w in (v, *self.beside(v))))

    def _solved(self, part: Problem, known: np.ndarray, board: Board) -> Solution:
        clock = board.clock.part()
        clock.time_limit = min(SECONDS, clock.time_limit)
        if not len(part.items.node):
            return minimise(part, [known], clock, self.core, PAIRS if self.nodes <= NODES else PAIRS[-1:])
        own = Board(part, clock)
        own.stats["improved"] = True  # else the search would look in neighbourhoods of this one, which is as large as they are, without end
        own.offer(known)
        search_reduced(own, 0, 1)
        return own.solution()

    def _part(self, around: Sequence[int]) -> Problem:
        """The problem of some nodes, where the others stay as they are."""
        place = {v: i for i, v in enumerate(around)}
        costs = [np.asarray(self.problem.node_costs[v], dtype=np.float64) for v in around]
        edges: list[Edge] = []
        for v in around:
            for e in self.edges[v]:
                if e.u in place and e.v in place:
                    if e.u == v:
                        edges.append(Edge(place[e.u], place[e.v], e.table, e.rows, e.cols))
                elif e.u == v:
                    costs[place[v]] = costs[place[v]] + e.table[e.rows, e.cols[self.choice[e.v]]]
                else:
                    costs[place[v]] = costs[place[v]] + e.table[e.rows[self.choice[e.u]], e.cols]
        return Problem(tuple(costs), tuple(edges), *self._rows(np.array(around)))

    def _rows(self, around: np.ndarray) -> tuple[np.ndarray, np.ndarray, Items]:
        """(limits, prices, items) of the rows: what the others load is taken off the limits; items on rows that cannot exceed theirs are
        left out."""
        items = self.problem.items
        place = np.full(self.problem.n, -1)
        place[around] = np.arange(len(around))
        here = np.flatnonzero(place[items.node] >= 0)
        node, strategy, row, amount = place[items.node[here]], items.strategy[here], items.row[here], items.amount[here]
        own = np.zeros(len(self.load))
        taken = self.choice[around][node] == strategy
        np.add.at(own, row[taken], amount[taken])
        limit = self.problem.row_limit - (self.load - own)
        binds = (_most(node, strategy, row, amount, len(limit)) > limit)[row]
        return limit, self.problem.row_price, Items(node[binds], strategy[binds], row[binds], amount[binds])


def _most(node: np.ndarray, strategy: np.ndarray, row: np.ndarray, amount: np.ndarray, rows: int) -> np.ndarray:
    """Per row, no less than what any choice loads it with."""
    (nodes, _, on), place = np.unique(np.stack([node, strategy, row]), axis=1, return_inverse=True)
    most = np.zeros((int(nodes.max(initial=-1)) + 1, rows))
    np.maximum.at(most, (nodes, on), np.bincount(place.ravel(), amount, len(nodes)))
    return most.sum(axis=0)
