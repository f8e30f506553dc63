"""The cheapest shape and cuts of a pipeline, at prices of blocks.

    1  block prices: a chain per slot (submesh and rows), from a few short stages
    2  per shape, a bound first: of the work alone, then of blocks at their floors. A shape whose bound is not below the best price is not
       searched; else the partition search, priced by the player

A bound holds for every plan of a shape, a price for plans that are made of the blocks' own. What is found is then planned as it is, by whoever asked.
"""
from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from heapq import heapify, heappop, heappush
from typing import Protocol

import numpy as np

from autoshard.base.plan import NOT_FOUND
from autoshard.errors import InfeasibleError
from autoshard.pipeline.action_lists.actions import ActionTable
from autoshard.pipeline.action_lists.network import Network, network_of
from autoshard.pipeline.action_lists.step_end import with_step_end
from autoshard.pipeline.schedules import SCHEDULES
from autoshard.pipeline.shapes.floors import Floor
from autoshard.pipeline.shapes.meshes import Shape, Slot
from autoshard.pipeline.shapes.partitions import course_of, price_on
from autoshard.pipeline.shapes.price import StagePrice, chain_from, with_ends
from autoshard.search.partition import Chain, Course, partition, rank_bytes
from autoshard.search.partition.feasible import Stages

MARGIN = 1.05
"""A partition search ends where it finds nothing within this factor of the best price."""
TOLERANCE = 0.02
"""A shape is not searched if its bound is at most this part below the best price, where nothing else is said."""
FAR = 1.1
"""Where the tolerance is larger than that, a shape is not searched either whose bound, times what its schedule waits, is this factor above the best
price: bounds have a part of the waiting in them."""
LOOKS = 4
"""Bounds of a shape that are looked at before it is searched, besides that of all its ops, each dearer than the one before."""
FIRST, LATER, LAST = range(3)
"""When a shape is looked at: one of the first is searched before all others."""
PARTITIONS = 200
"""About how many partitions of a shape are priced at most."""


class Pricer(Protocol):
    """Prices stages of one model. `lean` is 0 for the fastest way to run a stage and grows with the bytes that are saved."""

    labels: Sequence[Hashable]
    """Of each block; those with equal labels cost the same."""
    weights: Sequence[float]
    """Of each block, about as its seconds."""
    leanest: int

    def ideal(self, slot: Slot) -> float:
        """Seconds of a micro-batch of the whole model, at least, on one stage's devices; 0 if that is not known."""

    def floor(self, slot: Slot, look: int) -> Floor:
        """The same by blocks; `look`: from 1 to `LOOKS`, the last is as high as can be shown."""

    def price(self, first: int, end: int, slot: Slot, lean: int, split: bool) -> StagePrice:
        """The stage of blocks first..end-1, whatever it holds; `split`: with backward in two windows. Raises InfeasibleError where it
        cannot be that lean."""


@dataclass(frozen=True)
class Tried:
    """A shape with its bound. Where it was searched, `seconds` is its price at block prices: that of `cuts`, or, without them, what all
    cuts are above; where it was `planned`, that of its plan. `memory`: bytes of the fullest rank. `why`: it was not searched, or has no cuts."""

    shape: Shape
    bound: float
    seconds: float | None = None
    cuts: tuple[int, ...] = ()
    lean: int = 0
    memory: float | None = None
    why: str = ""
    planned: bool = False


@dataclass(frozen=True, eq=False)
class Run:
    """What all shapes with the same schedule share, whatever runs in it."""

    table: ActionTable
    course: Course

    @cached_property
    def network(self) -> Network:
        return network_of(with_step_end(self.table))

    def price(self, chain: Chain) -> Callable[[np.ndarray], np.ndarray]:
        return lambda cuts: price_on(chain, self.network)(cuts)  # most shapes are never played


def make_run(shape: Shape) -> Run:
    table = shape.table()
    return Run(table, course_of(table))


PlanWhole = Callable[[Shape], Tried]
"""Plans a shape without stages: its step, and a bound for all of its plans. Raises InfeasibleError."""


def try_shapes(pricer: Pricer, shapes: Sequence[Shape], limit: float = np.inf, tell: Callable[[str], None] = lambda text: None,
               plan_whole: PlanWhole | None = None, tolerance: float = TOLERANCE, fine: float = 0.0) -> tuple[Tried, ...]:
    """With `plan_whole`, the one without stages that promises most is first: it has a plan, and what comes after is held against it. Then, or else
    from the start, the one is next whose bound with the time that its ranks wait for each other is the least; it is looked at more closely before
    it is searched. Those of three axes are last: they take longest, and start from plans of two. `limit`: bytes of a rank.
    `tell` hears of every shape that is searched. With `plan_whole`, shapes without stages are planned as they are instead: one search, where prices
    of blocks are four and say less. `tolerance`: a shape whose bound is at most this part below the best price is not searched; `fine`: the same of
    shapes of three axes, where that is more."""
    search = _Search(pricer, limit, tell, plan_whole, tolerance, fine)
    bounds, waits = [search.least(shape) for shape in shapes], [search.waits(shape) for shape in shapes]
    waiting = [(_turn(shape), bounds[at] * waits[at], at, 0) for at, shape in enumerate(shapes)]
    heapify(waiting)
    done: dict[int, Tried] = {}
    anchored = plan_whole is None
    while waiting:
        turn, promise, at, looked = heappop(waiting)
        bound = bounds[at]
        if anchored and turn == FIRST:
            heappush(waiting, (LATER, promise, at, looked))
        elif bound >= search.enough(shapes[at]):
            done[at] = Tried(shapes[at], bound, why="not searched: its bound says enough")
        elif looked == LOOKS and tolerance > TOLERANCE and promise > FAR * search.best:
            done[at] = Tried(shapes[at], bound, why="not searched: with the time that its ranks wait it is not near the best")
        elif looked < LOOKS:
            bounds[at] = max(bound, search.bound(shapes[at], looked + 1))
            heappush(waiting, (turn, bounds[at] * waits[at], at, looked + 1))
        else:
            anchored = anchored or turn == FIRST
            done[at] = search.searched(Tried(shapes[at], bound))
    return tuple(done[at] for at in sorted(done, key=lambda at: done[at].bound))


def _turn(shape: Shape) -> int:
    return LAST if shape.slot.mp > 1 else LATER if shape.pp > 1 else FIRST


def chain_of(pricer: Pricer, slot: Slot, lean: int, split: bool) -> Chain:
    """Every stage that can be on a slot; `split`: for schedules with backward in two parts. Raises InfeasibleError."""
    made = chain_from(pricer.labels, with_ends(pricer.labels, lambda first, end: pricer.price(first, end, slot, lean, split), pricer.weights))
    return made if split else made.undivided()


class _Search:
    """What is known while shapes are tried: chains per slot and lean level, runs per schedule, the best price so far."""

    def __init__(self, pricer: Pricer, limit: float, tell: Callable[[str], None], plan_whole: PlanWhole | None,
                 tolerance: float, fine: float) -> None:
        self.pricer, self.limit, self.best, self.plan_whole = pricer, limit, np.inf, plan_whole
        self.tolerance = {FIRST: tolerance, LATER: tolerance, LAST: max(tolerance, fine)}
        self.levels = range(1 + pricer.leanest if np.isfinite(limit) else 1)
        self.chain = cache(lambda slot, lean, split: chain_of(pricer, slot, lean, split))
        self.floor = cache(pricer.floor)
        self.tell = tell
        self._run = cache(make_run)

    def run(self, shape: Shape) -> Run:
        return self._run(replace(shape, slot=Slot(1, 1, 1)))

    def least(self, shape: Shape) -> float:
        """Seconds that the shape takes at least, before any stage is priced."""
        return shape.microbatches * self.pricer.ideal(shape.slot) / shape.pp

    def waits(self, shape: Shape) -> float:
        """About how much longer a step is than its work, if all stages are equal. Weight parts fill most of the time that ranks would wait."""
        parts = 3 if SCHEDULES[shape.schedule].split_backward else 1
        return 1 + (shape.pp - 1) / (parts * shape.chunks * shape.microbatches)

    def enough(self, shape: Shape) -> float:
        """A bound above which a shape is not searched."""
        return (1 - self.tolerance[_turn(shape)]) * self.best

    def bound(self, shape: Shape, look: int) -> float:
        """At the floors of blocks; the best price where it is no less."""
        floor, run = self.floor(shape.slot, look), self.run(shape)
        chain, course = floor.chain(run.table.split_backward), run.course
        return max(floor.whole_blocks(course), Stages(chain, course, work=floor.work(course), together=floor.together(course)).bound(self.best))

    def searched(self, tried: Tried) -> Tried:
        """The best partition at the first lean level where one fits."""
        found = self._planned(tried, self.plan_whole) if self.plan_whole and tried.shape.pp == 1 else self._searched(tried)
        self.tell(f"{tried.shape}: {_said(found)}")
        return found

    def _planned(self, tried: Tried, plan: PlanWhole) -> Tried:
        try:
            found = plan(tried.shape)
        except InfeasibleError as e:
            return replace(tried, bound=np.inf if e.proven else tried.bound, why=f"does not fit: {e}" if e.proven else f"{NOT_FOUND}: {e}")
        self.best = min(self.best, found.seconds or np.inf)
        return replace(found, bound=max(tried.bound, found.bound))

    def _searched(self, tried: Tried) -> Tried:
        run, enough, why = self.run(tried.shape), MARGIN * self.best, ""
        for lean in self.levels:
            try:
                chain = self.chain(tried.shape.slot, lean, run.table.split_backward)
            except InfeasibleError as e:
                return replace(tried, why=f"{NOT_FOUND}: {e}")
            found = partition(chain, run.course, run.price(chain), self.limit, PARTITIONS, enough)
            if found.cuts:
                self.best = min(self.best, found.seconds)
                memory = float(rank_bytes(chain, run.course, np.array([found.cuts])).max())
                return replace(tried, seconds=found.seconds, cuts=found.cuts, lean=lean, memory=memory)
            if Stages(chain, run.course).bound(enough) >= enough:  # whatever the memory
                return replace(tried, seconds=enough, lean=lean, why="it is not near the best")
            why = NOT_FOUND
        return replace(tried, why=why)


def _said(tried: Tried) -> str:
    known = f", at least {tried.bound:.4g} s"
    found = f"{tried.seconds:.4g} s" if tried.planned else f"about {tried.seconds:.4g} s" if tried.cuts else tried.why
    return found + known


def ranked(tried: Sequence[Tried]) -> list[Tried]:
    """Those with a plan or cuts, the cheapest first."""
    return sorted((t for t in tried if t.cuts or t.planned), key=lambda t: t.seconds or 0.0)
