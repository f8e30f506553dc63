"""A bound of all plans, from a problem that is far smaller than theirs: without copy nodes, and without limits of memory.

A value that several units read in one layout is redistributed once. Here each of them pays a share of that, and shares add up to one, so no choice
costs more than as a plan. What may hide behind compute is charged as rows of the problem say, at prices that hold for all plans. Units alone are
nodes: llama 8B on four axes has 2,659 of them, and 215,000 with the copies.

Shares begin equal. A relaxed optimum in which some readers of a value use a layout and others do not has paid too little; shares move to those that
do, which raises the bound (a subgradient step on the prices of sharing)."""
from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from autoshard.base.graph import Ref
from autoshard.base.plan import OpPlan
from autoshard.base.spec import Spec
from autoshard.formulate.builder import Builder
from autoshard.formulate.problem_of import default_units, readers_of, tie_gradients
from autoshard.recompute.rewrite import is_source
from autoshard.rules import registry
from autoshard.search.dual.factored import Sweeps, with_partners
from autoshard.search.problem import Edge, Problem
from autoshard.space.cost_table import CostTable

SWEEPS, FIRST, ROUNDS = 8, 6, 12
"""Sweeps at a time, how many times as many at most before shares move, and how often they move at most."""
CLOSE = 0.02
"""Of the bound, within which a choice costs as much as what is proven: then it says what rows carry and where shares belong."""
GAIN, IDLE = 5e-4, 3
"""Of the bound, which sweeps and moved shares must gain, and how many moves in a row may not."""
STEP, SLOWER = 0.5, 0.3
"""How far shares move in the first round, and how much less in later ones."""
ROUNDING = 1e-9

Shares = list[list[np.ndarray]]
"""By value and by who reads it: per spec that it may be read in, the share of a redistribution."""


@dataclass(frozen=True)
class _Read:
    """Who reads a value. `seconds`: [kinds of the producer, specs] of redistributing it once."""

    edge: Edge
    specs: tuple[Spec, ...]
    priced: bool
    window: int
    runs: int

    @property
    def seconds(self) -> np.ndarray:
        return self.edge.table

    def moved(self, choice: np.ndarray) -> tuple[int, float]:
        """Which of `specs` a choice reads, and the seconds of redistributions to it in a step."""
        at = int(self.edge.cols[choice[self.edge.v]])
        return at, self.runs * float(self.seconds[self.edge.rows[choice[self.edge.u]], at])


@dataclass(frozen=True)
class Floor:
    """`seconds` of a step that no plan over decision units is below, whatever memory there is. `choice`: of the relaxed problem, close to it."""

    seconds: float
    choice: np.ndarray


def floor_of(relaxed: Relaxed, over: Callable[[], bool] = lambda: False) -> Floor:
    """What messages prove. `over`: whether to end soon, with what is proven."""
    shares, begun = relaxed.equal_shares(), []
    for price in {relaxed.most: None, 0.0: None}:  # rows that are full, and rows that never are
        sweeps = Sweeps(relaxed.problem([price] * relaxed.windows, shares))
        sweeps.run(SWEEPS)
        begun.append((sweeps.bound, [price] * relaxed.windows, sweeps))
    _, prices, sweeps = max(begun, key=lambda found: found[0])
    _settle(sweeps, over)
    if _is_close(sweeps) and (loose := relaxed.not_full(prices, shares, sweeps.choice())):
        fewer = [0.0 if w in loose else price for w, price in enumerate(prices)]
        other = Sweeps(relaxed.problem(fewer, shares))
        _settle(other, over)
        prices, sweeps = (fewer, other) if other.bound > sweeps.bound else (prices, sweeps)
    now, idle = sweeps.choice(), 0
    best = Floor(sweeps.bound, now)
    for turn in range(ROUNDS if _is_close(sweeps) else 0):
        if over() or idle == IDLE:
            break
        shares = relaxed.moved(shares, now, STEP / (1.0 + SLOWER * turn))
        sweeps = Sweeps(relaxed.problem(prices, shares), sweeps)
        sweeps.run(SWEEPS)
        now = sweeps.choice()
        idle = 0 if sweeps.bound > best.seconds + GAIN * abs(best.seconds) else idle + 1
        if sweeps.bound > best.seconds:
            best = Floor(sweeps.bound, now)
    return replace(best, seconds=best.seconds - ROUNDING * abs(best.seconds))


def _settle(sweeps: Sweeps, over: Callable[[], bool]) -> None:
    """Sweep until a choice is close to what is proven, or little more is proven than before."""
    for _ in range(FIRST):
        before = sweeps.bound
        if over() or before > -np.inf and _is_close(sweeps):
            return
        sweeps.run(SWEEPS)
        if sweeps.bound < before + GAIN * abs(before):
            return


def _is_close(sweeps: Sweeps) -> bool:
    return sweeps.cost(sweeps.choice()) <= sweeps.bound + CLOSE * abs(sweeps.bound)


class Relaxed:
    """What the units of a program cost, and who reads what they make, for all prices of rows and all shares. Raises Infeasible where no strategies
    go together."""

    def __init__(self, table: CostTable) -> None:
        overlap = table.cluster.overlap
        b = self._builder = Builder(table, default_units(table), overlap.eta, overlap.interference)
        self.most = 1.0 - b.kappa if b.overlaps else 0.0
        self.windows = len(table.graph.windows)
        tie_gradients(b)
        ties, b.edges = b.edges, []
        self._costs = [self._cost(i) for i in range(len(b.units.units))]
        values = [Ref(op.name, index) for op in table.graph.ops if not is_source(op) for index in range(len(op.outputs))]
        reads = [found for ref in values if (found := self._reads(ref))]
        edges = [*(read.edge for found in reads for read in found), *ties]
        same: dict[tuple[int, bytes], np.ndarray] = {}
        self.kept = [same.setdefault((len(cost), kept.tobytes()), kept)  # equal ones are the same object
                     for (cost, _), kept in zip(self._costs, with_partners([c for c, _ in self._costs], edges), strict=True)]
        self._memo: dict[tuple, tuple] = {}
        self.values = [[self._without_others(read) for read in found] for found in reads]
        self.ties = [self._kept_edge(e)[0] for e in ties]

    def _cost(self, node: int) -> tuple[np.ndarray, np.ndarray]:
        """Per strategy of a unit its seconds, and per window those of heavy ops, behind which communication hides."""
        b, unit = self._builder, self._builder.units.units[node]
        costs = [b.table.ops[m] for m in unit.members]
        windows = tuple(b.table.graph.window_of(m) if b.overlaps and registry.is_heavy(b.table.graph.op(m)) else -1 for m in unit.members)

        def make() -> tuple[np.ndarray, np.ndarray]:
            heavy = np.zeros((self.windows, len(unit)))
            for cost, picked, window in zip(costs, unit.picked, windows, strict=True):
                if window >= 0:
                    heavy[window] += b.eta * cost.compute[picked]
            return np.sum([c.total[p] for c, p in zip(costs, unit.picked, strict=True)], axis=0), heavy

        return b.shared(("relaxed cost", *map(id, costs), *map(id, unit.picked), windows), make)

    def _reads(self, ref: Ref) -> list[_Read]:
        b, graph = self._builder, self._builder.table.graph
        readers = readers_of(b, ref) if ref in graph.users else []
        if not readers:
            return []
        src, priced = b.units.outputs(ref), b.overlaps and b.table.hideable(ref)
        least = min(graph.runs[r.window] for r in readers)
        return [_Read(Edge(b.units.index(ref.op), r.node, b.table.table(ref, src, r.specs), src.index, r.specs.index), r.specs.specs, priced,
                      r.window, least) for r in readers]

    def _without_others(self, read: _Read) -> _Read:
        edge, columns = self._kept_edge(read.edge)
        return _Read(edge, tuple(read.specs[c] for c in columns), read.priced, read.window, read.runs)

    def _kept_edge(self, e: Edge) -> tuple[Edge, np.ndarray]:
        """The edge between strategies that have partners, and the columns of its table that are left."""
        mine, theirs = self.kept[e.u], self.kept[e.v]
        key = id(e.table), id(e.rows), id(e.cols), id(mine), id(theirs)
        if key not in self._memo:
            rows, row = np.unique(e.rows[mine], return_inverse=True)
            cols, col = np.unique(e.cols[theirs], return_inverse=True)
            self._memo[key] = np.ascontiguousarray(e.table[np.ix_(rows, cols)]), row, col, cols, e
        table, row, col, cols, _ = self._memo[key]
        return Edge(e.u, e.v, table, row, col), cols

    def equal_shares(self) -> Shares:
        out: Shares = []
        for reads in self.values:
            counts: dict[Spec, int] = {}
            for read in reads:
                for spec in read.specs:
                    counts[spec] = counts.get(spec, 0) + 1
            out.append([np.array([1.0 / counts[spec] for spec in read.specs]) for read in reads])
        return out

    def problem(self, prices: Sequence[float], shares: Shares) -> Problem:
        """No choice costs more there than in the problem of all plans. `prices`: of what hides, per window, from 0 to `most`."""
        b, memo = self._builder, {}

        def once(key: tuple, make: Callable[[], np.ndarray]) -> np.ndarray:
            if key not in memo:
                memo[key] = make()
            return memo[key]

        costs = tuple(once(("cost", id(cost), id(heavy), id(kept)), lambda cost=cost, heavy=heavy, kept=kept: (cost - np.dot(prices, heavy))[kept])
                      for (cost, heavy), kept in zip(self._costs, self.kept, strict=True))
        edges = []
        for reads, parts in zip(self.values, shares, strict=True):
            lowest = min(prices[read.window] for read in reads)
            for read, share in zip(reads, parts, strict=True):
                each = read.runs * (b.kappa + lowest if read.priced else 1.0)
                table = once((id(read.seconds), each, share.tobytes()), lambda read=read, by=each * share: np.where(
                    np.isfinite(read.seconds), read.seconds * by, np.inf))
                edges.append(Edge(read.edge.u, read.edge.v, table, read.edge.rows, read.edge.cols))
        return Problem(costs, (*edges, *self.ties))

    def not_full(self, prices: Sequence[float], shares: Shares, choice: np.ndarray) -> set[int]:
        """The windows in which a choice hides less than compute could."""
        load = -self._heavy(choice)
        for reads, parts in zip(self.values, shares, strict=True):
            for read, share in zip(reads, parts, strict=True):
                if read.priced:
                    at, seconds = read.moved(choice)
                    load[read.window] += share[at] * seconds
        return {w for w in range(self.windows) if prices[w] > 0.0 and load[w] < 0.0}

    def _heavy(self, choice: np.ndarray) -> np.ndarray:
        """Seconds of heavy ops, per window."""
        found = np.zeros(self.windows)
        for (_, heavy), kept, s in zip(self._costs, self.kept, choice.tolist(), strict=True):
            found += heavy[:, kept[s]]
        return found

    def layouts(self, choice: np.ndarray) -> dict[str, OpPlan]:
        """How every op is laid out in a choice."""
        found, known, table = {}, {}, self._builder.table
        for unit, kept, s in zip(self._builder.units.units, self.kept, choice.tolist(), strict=True):
            for member, picked in zip(unit.members, unit.picked, strict=True):
                strategies, which = table.strategies[member], int(picked[kept[s]])
                key = id(strategies), which
                if key not in known:
                    known[key] = OpPlan(*strategies.strategy(which))
                found[member] = known[key]
        return found

    def moved(self, shares: Shares, choice: np.ndarray, step: float) -> Shares:
        """Shares that moved by `step` towards those readers that pay for a redistribution in this choice."""
        return [self._moved(reads, parts, choice, step) for reads, parts in zip(self.values, shares, strict=True)]

    @staticmethod
    def _moved(reads: Sequence[_Read], parts: list[np.ndarray], choice: np.ndarray, step: float) -> list[np.ndarray]:
        paid: dict[Spec, list[int]] = {}
        for j, read in enumerate(reads):
            at, seconds = read.moved(choice)
            if seconds > 0.0:
                paid.setdefault(read.specs[at], []).append(j)
        out = parts
        for spec, who in paid.items():
            able = [(j, read.specs.index(spec)) for j, read in enumerate(reads) if spec in read.specs]
            if len(who) < len(able):
                out = [part.copy() for part in out] if out is parts else out
                for j, at in able:
                    out[j][at] += step * ((1.0 / len(who) if j in who else 0.0) - out[j][at])
        return out
