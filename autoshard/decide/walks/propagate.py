"""Propagates seeds over the program and takes the cheapest completion: no MIP, no memory rows, seconds at most.

Seeds are never overridden: their ops have no other strategies. Splits that follow from them spread (narrowing). Everything
else is minimised together, exactly where elimination solves it (`search/routes/min_sum.py`): first communication, then
compute (`orders.py`). If a step then takes over 10 % longer than with the seeds alone fixed, the sum of both is minimised, and in
the last order narrowing is dropped. The result never costs more than the walk that it starts from, in which two steps alternate:

* **Narrowing.** A value that is sure to be split by a mesh axis in one way asks its readers, and its maker, for the same. Who
  can follow drops its other strategies on that axis; who cannot keeps them all. Repeated to a fixpoint, as Shardy does.
* **Deciding**, as MindSpore does. Breadth first from the seeds, forward and backward, the next unit looks at its edges to
  what is decided: strategies with which nothing is redistributed come first, of these the one with the least compute; where
  there is none, the one with the least communication, and the edge is warned about.

What nobody has said anything about (inputs and buffers that every rank holds whole) may be sliced freely. Sources: Shardy's propagation guide, https://openxla.org/shardy/propagation;
MindSpore's sharding propagation, https://www.mindspore.cn (sharding propagation tutorial).
"""
from __future__ import annotations

import re
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from heapq import heappop, heappush

import numpy as np

from autoshard.base.graph import Ref
from autoshard.base.spec import ShardingSpec, Spec
from autoshard.decide.walks.greedy import complete
from autoshard.decide.walks.orders import communication_first, everything_hides, narrowed, nothing_hides
from autoshard.decide.walks.reads import Read, Wiring
from autoshard.decide.walks.walk import Placed, Score, Steps, walk
from autoshard.errors import UsageError
from autoshard.formulate.problem_of import Formulation
from autoshard.formulate.values import equality
from autoshard.program import flow
from autoshard.search.problem import Solution, Status, evaluate
from autoshard.search.routes.min_sum import minimise
from autoshard.seeds.seeds import Seeds
from autoshard.space.strategies import SpecIndex

NO_SEEDS = ("search='propagate' spreads seeds, and there are none; give some, for example seeds={'input:0': 'dp,...'} or "
            "--seed 'layers.*.wq.weight=tp,-', or use another search")
NO_GAIN = 1e-9  # part of a step that is none: rounding of sums
FOLLOW = 0.10  # part of a step that it may take longer that what is surely split stays split
FIRST = "what is surely split stays split, then least communication, then least compute"
FOLLOWED = "what is surely split stays split, then least communication + compute"
OPEN = f"least communication + compute (that what is surely split stays split would take over {100 * FOLLOW:.0f} % more)"
LOOKED_AHEAD = "every unit as is least for it, breadth first (nothing less was found)"


@dataclass(frozen=True, eq=False)
class Propagated:
    """`choice` for every node of the formulation, of `seconds` a step (inf: it does not fit in memory); no plan under these seeds takes
    less than `bound` seconds (0: nothing is known). `how`: what was minimised. `decided` of `units` had more than one strategy;
    `warnings` name edges that communicate."""

    choice: np.ndarray
    decided: int
    units: int
    warnings: tuple[str, ...]
    seconds: float
    bound: float
    how: str

    @property
    def gain(self) -> float:
        """The most that a search under the same seeds could gain, as part of the step."""
        return max(0.0, self.seconds - self.bound) / self.seconds if np.isfinite(self.seconds) and self.seconds else 0.0

    @property
    def status(self) -> str:
        """What was minimised, and what the search would gain."""
        what = f"propagated from the seeds: {self.how}"
        if not self.bound or not np.isfinite(self.seconds):
            return f"{what}; what the search would gain is not known"
        return f"{what}; the search would gain {'nothing' if self.gain < NO_GAIN else f'at most {100 * self.gain:.2g} %'}"


def propagate(formulation: Formulation, seeds: Seeds) -> Propagated:
    """Spread the seeds, which the formulation's strategies obey already. Raises UsageError where there are none."""
    if not seeds:
        raise UsageError(NO_SEEDS)
    wiring = Wiring(formulation)
    sure, start = look_ahead(wiring, seeds.held)
    lowest = minimise(everything_hides(formulation), [start])
    bound = max(0.0, lowest.bound)
    picked = _taken_of(formulation, sure, start, lowest)
    units = formulation.units.units
    return Propagated(picked.choice, sum(len(u) > 1 for u in units), len(units),
                      tuple(_warnings(wiring, picked.choice[:len(units)])), picked.seconds, bound, picked.how)


def look_ahead(wiring: Wiring, held: frozenset[str]) -> tuple[list[np.ndarray], np.ndarray]:
    """The strategies that narrowing from `held` leaves every unit, and the choice where every unit in turn takes what is least for
    it."""
    spread = _Spread(wiring, held)
    sure = spread.narrowed()
    return sure, complete(wiring, walk(wiring, spread.steps))


def _taken_of(formulation: Formulation, sure: list[np.ndarray], start: np.ndarray, lowest: Solution) -> _Found:
    """Of what the orders give the first that is at most FOLLOW dearer than the least, and no dearer than the walk."""
    walked = _found(formulation, start, LOOKED_AHEAD)
    followed = []
    for what, problem in ((FIRST, communication_first), (FOLLOWED, nothing_hides)):
        answer = minimise(narrowed(problem(formulation), sure), [start])
        if answer.choice is None:  # nothing follows the seeds so, or nothing was found in time
            continue
        followed.append(_found(formulation, answer.choice, _said(what, answer)))
        if followed[-1].seconds <= min(walked.seconds, lowest.bound * (1 + FOLLOW)) * (1 + NO_GAIN):
            return followed[-1]
    free = [_found(formulation, lowest.choice, _said(OPEN, lowest))] if lowest.choice is not None else []
    if not free or free[0].seconds > lowest.bound * (1 + NO_GAIN):
        added = minimise(nothing_hides(formulation), [start, *(f.choice for f in free)])
        free += [_found(formulation, added.choice, _said(OPEN, added))] if added.choice is not None else []
    least = min((walked, *free), key=lambda f: f.seconds)
    close = (f for f in followed if f.seconds <= min(walked.seconds, least.seconds * (1 + FOLLOW)) * (1 + NO_GAIN))
    return next(close, least)


@dataclass(frozen=True, eq=False)
class _Found:
    choice: np.ndarray
    seconds: float
    how: str


def _found(formulation: Formulation, choice: np.ndarray, how: str) -> _Found:
    return _Found(choice, evaluate(formulation.problem, choice), how)


def _said(what: str, answer: Solution) -> str:
    return what if answer.status is Status.OPTIMAL else f"{what}, not proven to be the least"


def as_solution(spread: Propagated) -> Solution:
    """The propagated choice as a search's answer; without a choice where it does not fit."""
    choice = spread.choice if np.isfinite(spread.seconds) else None
    done = choice is not None and spread.gain < NO_GAIN
    status = Status.OPTIMAL if done else Status.GAP if choice is not None else Status.UNKNOWN
    return Solution(choice, spread.seconds, min(spread.bound, spread.seconds), status, 0.0)


@dataclass(frozen=True, eq=False)
class _Link:
    """One side of a connection as its unit sees it: `mine` and `other` index this unit's and the other's specs of one value;
    `seconds` [mine, other]; `tied` ones must agree; `loose`: the value is whole everywhere unless someone slices it."""

    other: int
    mine: SpecIndex
    theirs: SpecIndex
    seconds: np.ndarray
    tied: bool = False
    loose: bool = False
    reads: bool = False


@dataclass(eq=False)
class _Spread:
    """`domain[n]`: the strategies unit n still has."""

    wiring: Wiring
    held: frozenset[str]
    domain: list[np.ndarray] = field(default_factory=list)
    queue: list[tuple] = field(default_factory=list)
    offered: int = 0

    def narrowed(self) -> list[np.ndarray]:
        """Let the seeds narrow what is around them; the strategies that every unit has left."""
        units = self.wiring.formulation.units.units
        self.domain = [np.arange(len(u)) for u in units]
        self.links = [list(self._links(n)) for n in range(len(units))]
        first = [n for n, u in enumerate(units) if any(m in self.held for m in u.members)]
        for n in (*first, *self._narrow(first)):
            self._offer(n)
        return list(self.domain)

    def steps(self, placed: Placed) -> Steps:
        """Every unit, after `narrowed`. What is decided narrows what is around it."""
        for n in range(len(self.domain)):
            self._offer(n, unasked=True)
        seen: set[int] = set()
        while self.queue:
            n = heappop(self.queue)[-1]
            if n in seen:
                continue
            seen.add(n)
            yield n, self._score
            touched = []
            if len(self.domain[n]) > 1:
                self.domain[n] = np.array([placed.strategy[n]])
                touched = self._narrow([n])
            for other in (*touched, *(link.other for link in self.links[n])):
                if other not in seen:
                    self._offer(other)

    def _offer(self, n: int, unasked: bool = False) -> None:
        """Breadth first, but compute before what serves it: views of parameters (the last first), parameters, and at
        the end gradients, which take their parameter's layout. Units that no one reached come after those reached."""
        op = self.wiring.op(n)
        if op.kind == "output" and n in self.wiring.ties:
            turn = 3
        elif Ref(op.name) in self.wiring.param_derived:
            turn = 2 if op.kind == "param" else 1
        else:
            turn = 0
        self.offered += 1
        heappush(self.queue, (turn, unasked and turn != 1, -n if turn == 1 else self.offered, n))

    # -- links --------------------------------------------------------------------------------------

    def _links(self, n: int) -> Iterator[_Link]:
        w = self.wiring
        for read in w.reads[n]:
            yield _Link(read.maker, w.targets(read), w.sources(read), w.seconds(read).T, loose=self._loose(read), reads=True)
        for read in w.readers[n]:
            yield _Link(read.reader, w.sources(read), w.targets(read), w.seconds(read), loose=self._loose(read))
        for a, b in self._ties.get(n, ()):
            yield _Link(b, *self._tie(a, b), tied=True)

    def _loose(self, read: Read) -> bool:
        maker = self.wiring.op(read.maker)
        return maker.kind in ("input", "buffer") and maker.name not in self.held

    @cached_property
    def _ties(self) -> dict[int, list[tuple[int, int]]]:
        out: dict[int, list[tuple[int, int]]] = {}
        for a, b in self.wiring.ties.items():
            out.setdefault(a, []).append((a, b))
            out.setdefault(b, []).append((b, a))
        return out

    def _tie(self, a: int, b: int) -> tuple[SpecIndex, SpecIndex, np.ndarray]:
        mine, theirs = self.wiring.held(a), self.wiring.held(b)
        return mine, theirs, equality(self.wiring.held_meta(a), self.wiring.held_meta(b), mine.specs, theirs.specs)

    # -- narrowing ----------------------------------------------------------------------------------

    def _narrow(self, start: Iterable[int]) -> list[int]:
        """Let what has one placement left spread from `start`; returns the units that lost strategies."""
        queue, touched = deque(start), {}
        while queue:
            n = queue.popleft()
            for link in self.links[n]:
                if self._follow(n, link):
                    touched[link.other] = True
                    queue.append(link.other)
        return list(touched)

    def _follow(self, n: int, link: _Link) -> bool:
        """Drop strategies of the other side that disagree with what is certain here; whether any went."""
        domain, before = self.domain[link.other], len(self.domain[link.other])
        follower = link.other in self.wiring.ties and not link.tied  # a gradient is as its parameter, whatever its maker is sure of
        if before == 1 or follower or (link.loose and not link.reads):
            return False
        mine = np.unique(link.mine.index[self.domain[n]])
        keep = np.isfinite(link.seconds[mine]).any(axis=0)[link.theirs.index[domain]]
        if keep.any() and not keep.all():
            domain = domain[keep]
        if not link.tied:
            placed = np.array([link.mine.specs[i] for i in mine])
            theirs = np.array(link.theirs.specs)[link.theirs.index[domain]]
            for axis in np.flatnonzero((placed == placed[0]).all(axis=0) & (placed[0] >= 0)):
                keep = theirs[:, axis] == placed[0, axis]
                if keep.any() and not keep.all():
                    domain, theirs = domain[keep], theirs[keep]
        self.domain[link.other] = domain
        return len(domain) < before

    # -- deciding -----------------------------------------------------------------------------------

    def _score(self, n: int) -> Score:
        """Strategies with which nothing moves come first, of these the one of least compute; else the one of least communication."""
        domain, outside = self.domain[n], np.full(len(self.wiring.unit(n)), 2.0)
        if len(domain) == 1:
            outside[domain] = 0.0
            return (outside,)
        moved, seconds = np.zeros(len(domain), int), np.zeros(len(domain))
        for link in self.links[n]:
            theirs = self.domain[link.other]
            mine = link.mine.index[domain]
            if len(theirs) > 1:  # undecided: it only must be able to follow
                at = np.unique(link.theirs.index[theirs])
                seconds = seconds + np.where(np.isfinite(link.seconds[:, at]).any(axis=1), 0.0, np.inf)[mine]
                continue
            spec = link.theirs.specs[link.theirs.index[theirs[0]]]
            seconds = seconds + link.seconds[:, link.theirs.index[theirs[0]]][mine]
            moved += np.array([not (s == spec or (link.loose and link.reads)) for s in link.mine.specs])[mine]
        compute = self.wiring.compute(n)[domain]
        still = moved == 0
        first, second = np.where(still, compute, seconds), np.where(still, seconds, compute)
        outside[domain] = ~np.isfinite(seconds)
        return (outside, *(_at(domain, key, len(outside)) for key in (~still, first, second)))


def _at(domain: np.ndarray, key: np.ndarray, n: int) -> np.ndarray:
    """`key` of the strategies of `domain`, among n strategies."""
    out = np.zeros(n)
    out[domain] = key
    return out


# -- warnings ---------------------------------------------------------------------------------------

def _warnings(wiring: Wiring, picked: np.ndarray) -> Iterator[str]:
    """One line per edge that communicates, equal ones of repeated layers together. A gradient's own reduction is none."""
    table = wiring.formulation.table
    bound, lines = flow.gradient_bound(table.graph), Counter()
    seen: set[tuple[Ref, str, Spec]] = set()
    for reads in wiring.reads:
        for read in reads:
            source = wiring.made(read.value, picked)
            targets = wiring.targets(read)
            target = targets.specs[targets.index[picked[read.reader]]]
            key = (read.value, table.graph.op(read.op).phase, target)
            known = source == target or read.value in bound or key in seen or not wiring.possible(read, source, target)
            steps = () if known else table.steps(table.graph.meta(read.value), source, target)
            seen.add(key)
            if any(s.seconds > 0 for s in steps):
                lines[_warning(wiring, read, source, target, steps)] += 1
    for line, count in lines.items():
        yield line + (f" ({count} times)" if count > 1 else "")


def _warning(wiring: Wiring, read: Read, source: Spec, target: Spec, steps: tuple) -> str:
    table = wiring.formulation.table
    graph, meta, mesh = table.graph, table.graph.meta(read.value), table.mesh
    maker, reader = graph.op(read.value.op), graph.op(read.op)
    a, b = (str(ShardingSpec.from_spec(s, meta.ndim, mesh)) for s in (source, target))
    what = ", ".join(f"{s.kind} over {mesh.label(s.axes)}" for s in steps)
    names = [re.sub(r"\b\d+\b", "*", op.module or str(op.target if op.kind != "call" else op.name)) for op in (maker, reader)]
    kinds = [re.sub(r"_\d+", "", op.name) if op.kind == "call" else op.kind for op in (maker, reader)]
    place = reader.source or maker.source
    return (f"{names[0]} ({kinds[0]}) -> {names[1]} ({kinds[1]}){f' at {place}' if place else ''}: no layout without communication; "
            f"{a} becomes {b} by {what}")
