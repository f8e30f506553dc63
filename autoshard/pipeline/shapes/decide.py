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
from autoshard.pipeline.shapes.least_play import least_played
from autoshard.pipeline.shapes.meshes import Shape, Slot
from autoshard.pipeline.shapes.partitions import course_of, price_on
from autoshard.pipeline.shapes.price import StagePrice, chain_from, with_ends
from autoshard.search.partition import Chain, Course, chain_of_blocks, partition, rank_bytes
from autoshard.search.partition.feasible import Stages

MARGIN = 1.05
"""A partition search ends where it finds nothing within this factor of the best price."""
TOLERANCE = 0.02
"""A shape is not searched if its bound is at most this part below the best price, where nothing else is said."""
FAR = 1.1
"""Where the tolerance is larger than that, a shape is not searched either whose bound, times what its schedule waits, is this factor above the best
price: bounds have a part of the waiting in them."""
FAR_OFF = "it is not near the best"
LOOKS, OWN = 7, 6
"""Bounds of a shape that are looked at before it is searched, besides that of all its ops, each dearer than the one before; and the first of them for
which its schedule is played."""
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
    @property
    def main(self) -> Hashable:
        """The label of the blocks that take most of a step."""

    def ideal(self, slot: Slot) -> float:
        """Seconds of a micro-batch of the whole model, at least, on one stage's devices; 0 if that is not known."""

    def floor(self, slot: Slot, look: int) -> Floor:
        """The same by blocks; `look`: from 1 to `LOOKS`, the last is as high as can be shown."""

    def corners(self) -> Sequence[int]:
        """Lean levels whose prices take searches; those between them are means. The first is 0, the last the leanest."""

    def rate(self, tried: Tried) -> float:
        """Seconds of a byte at the lean level of a shape."""

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

    @cached_property
    def computed(self) -> Network:
        """Without what is done once a step."""
        return network_of(self.table)

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
    search = _Search(pricer, limit, plan_whole, tolerance, fine)
    looked = [_Looked(search, shape) for shape in shapes]
    waiting = [(_turn(shape), looked[at].promise, at) for at, shape in enumerate(shapes)]
    heapify(waiting)
    done: dict[int, Tried] = {}
    anchored = plan_whole is None
    while waiting:
        turn, promise, at = heappop(waiting)
        here = looked[at]
        if anchored and turn == FIRST:
            heappush(waiting, (LATER, promise, at))
        elif here.bound >= search.enough(here.shape):
            done[at] = Tried(here.shape, here.bound, why="not searched: its bound says enough")
        elif here.looks >= LOOKS and tolerance > TOLERANCE and promise > FAR * search.best:
            done[at] = Tried(here.shape, here.bound, why="not searched: with the time that its ranks wait it is not near the best")
        elif found := here.closer():
            anchored = anchored or turn == FIRST
            done[at] = found
            tell(f"{found.shape}: {_said(found)}")
        else:
            heappush(waiting, (turn, here.promise, at))
    return tuple(done[at] for at in sorted(done, key=lambda at: done[at].bound))


def _turn(shape: Shape) -> int:
    return LAST if shape.slot.mp > 1 else LATER if shape.pp > 1 else FIRST


def chain_of(pricer: Pricer, slot: Slot, lean: int, split: bool) -> Chain:
    """Every stage that can be on a slot; `split`: for schedules with backward in two parts. Raises InfeasibleError."""
    made = chain_from(pricer.labels, with_ends(pricer.labels, lambda first, end: pricer.price(first, end, slot, lean, split), pricer.weights))
    return made if split else made.undivided()


def outline_of(pricer: Pricer, floor: Floor, slot: Slot, lean: int, split: bool) -> Chain:
    """About what stages take at least: blocks of the main kind at the price of one by itself, the others at their floors and without bytes. Raises
    InfeasibleError."""
    at, here = pricer.labels.index(pricer.main), np.array([label == pricer.main for label in pricer.labels])
    own, rest, ends = pricer.price(at, at + 1, slot, lean, split), floor.whole - floor.forward, len(here) - 1
    made = chain_of_blocks(
        np.where(here, own.forward, floor.forward), np.where(here, own.input, 0.0), weight=np.where(here, own.weight, rest),
        once=np.where(here, own.once + own.update, floor.once), stored=own.stored * here, peak=own.peak * here, saved=own.saved * here,
        between=own.between * here, hop_forward=np.full(ends, own.wire_out), hop_backward=np.full(ends, own.wire_in))
    return made if split else made.undivided()


class _Search:
    """What is known while shapes are tried: chains per slot and lean level, runs per schedule, the best price so far."""

    def __init__(self, pricer: Pricer, limit: float, plan_whole: PlanWhole | None, tolerance: float, fine: float) -> None:
        self.pricer, self.limit, self.best, self.plan_whole = pricer, limit, np.inf, plan_whole
        self.tolerance = {FIRST: tolerance, LATER: tolerance, LAST: max(tolerance, fine)}
        self.chain = cache(lambda slot, lean, split: chain_of(pricer, slot, lean, split))
        self.floor = cache(pricer.floor)
        self.outline = cache(lambda slot, lean, split: outline_of(pricer, self.floor(slot, LOOKS), slot, lean, split))
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

    def played(self, shape: Shape, look: int) -> float:
        """At the floors of blocks, the least way through the schedule, where this look may say more than the one before."""
        run, floor = self.run(shape), self.floor(shape.slot, look)
        return least_played(run.computed, run.course, floor) if look == OWN or floor.priced is not None else 0.0

    @cached_property
    def corners(self) -> Sequence[int]:
        return self.pricer.corners() if np.isfinite(self.limit) else (0,)

    def is_planned(self, shape: Shape) -> bool:
        """Whether the shape is planned as it is, instead of priced by blocks."""
        return self.plan_whole is not None and shape.pp == 1

    def searched(self, tried: Tried) -> Tried:
        """The plan of the shape, or the best partition at the first lean level from `tried.lean` on where one fits."""
        return self._planned(tried, self.plan_whole) if self.plan_whole and tried.shape.pp == 1 else self._searched(tried)

    def outlined(self, tried: Tried) -> Tried:
        """The best partition at a lean level, by the main blocks alone."""
        try:
            return self._at(tried, self.outline(tried.shape.slot, tried.lean, self.run(tried.shape).table.split_backward))
        except InfeasibleError as e:
            return replace(tried, why=f"{NOT_FOUND}: {e}")

    def _planned(self, tried: Tried, plan: PlanWhole) -> Tried:
        try:
            found = plan(tried.shape)
        except InfeasibleError as e:
            return replace(tried, bound=np.inf if e.proven else tried.bound, why=f"does not fit: {e}" if e.proven else f"{NOT_FOUND}: {e}")
        self.best = min(self.best, found.seconds or np.inf)
        return replace(found, bound=max(tried.bound, found.bound))

    def _searched(self, tried: Tried) -> Tried:
        for lean in range(tried.lean, 1 + self.corners[-1]):
            try:
                chain = self.chain(tried.shape.slot, lean, self.run(tried.shape).table.split_backward)
            except InfeasibleError as e:
                return replace(tried, why=f"{NOT_FOUND}: {e}")
            found = self._at(replace(tried, lean=lean), chain)
            if found.cuts:
                self.best = min(self.best, found.seconds or np.inf)
            if found.why != NOT_FOUND:
                return found
        return replace(tried, why=NOT_FOUND)

    def _at(self, tried: Tried, chain: Chain) -> Tried:
        """The best partition at these prices. Where none fits, about what the shape takes at least in its memory: blocks at a rate per byte are the
        best at that rate, so that with fewer bytes they take the rate for each of them more."""
        run, enough = self.run(tried.shape), MARGIN * self.best
        found = partition(chain, run.course, run.price(chain), self.limit, PARTITIONS, enough)
        if found.cuts:
            memory = float(rank_bytes(chain, run.course, np.array([found.cuts])).max())
            return replace(tried, seconds=found.seconds, cuts=found.cuts, memory=memory)
        if np.isfinite(self.limit) and not partition(chain, run.course, run.price(chain), np.inf, PARTITIONS, enough).cuts:
            return replace(tried, seconds=enough, why=FAR_OFF)  # leaner it would be dearer
        stages = Stages(chain, run.course)  # whatever the memory
        least = stages.bound(enough) + self.pricer.rate(tried) * max(0.0, stages.least_bytes - self.limit)
        return replace(tried, seconds=min(least, enough), why=FAR_OFF if least >= enough else NOT_FOUND)


class _Looked:
    """A shape, and what is known of it so far: `bound`; `works`, one that leaves out most of what ranks wait; `promise`, about the least that it may
    take, by which shapes are in order; the first lean level at which a partition may fit, and whether some level was found where it does by the
    main blocks alone."""

    def __init__(self, search: _Search, shape: Shape) -> None:
        self.search, self.shape, self.bound = search, shape, search.least(shape)
        self.works = self.bound
        self.looks, self.about, self.first, self.fits = 0, 0.0, 0, False

    @property
    def promise(self) -> float:
        return max(self.about, self.bound, self.works * self.search.waits(self.shape))

    def closer(self) -> Tried | None:
        """Looks once more, the cheapest look first: bounds, then prices of the main blocks alone, in ample memory, and leaner as long as no
        partition fits; what was found, where that was the last look."""
        search, looks, tried = self.search, self.looks, Tried(self.shape, self.bound, lean=self.first)
        self.looks += 1
        if looks < LOOKS:
            self.works = max(self.works, search.bound(self.shape, looks + 1))
            self.bound = max(self.bound, self.works)
            if looks + 1 >= OWN and self.shape.pp > 1 and self.bound < search.enough(self.shape):
                self.bound = max(self.bound, search.played(self.shape, looks + 1))
        elif self.about >= MARGIN * search.best:
            return replace(tried, seconds=MARGIN * search.best, why=FAR_OFF)
        elif self.fits or search.is_planned(self.shape):
            return search.searched(tried)
        elif looks - LOOKS == len(search.corners):
            return replace(tried, why=NOT_FOUND)
        else:
            return self._outlined(search.corners[looks - LOOKS])
        return None

    def _outlined(self, lean: int) -> Tried | None:
        found = self.search.outlined(Tried(self.shape, self.bound, lean=lean))
        if found.why not in ("", NOT_FOUND):
            return found
        self.about, self.fits = found.seconds or 0.0, bool(found.cuts)
        self.first = self.first if self.fits else lean + 1
        return None


def _said(tried: Tried) -> str:
    known = f", at least {tried.bound:.4g} s"
    found = f"{tried.seconds:.4g} s" if tried.planned else f"about {tried.seconds:.4g} s" if tried.cuts else tried.why
    return found + known


def ranked(tried: Sequence[Tried]) -> list[Tried]:
    """Those with a plan or cuts, the cheapest first."""
    return sorted((t for t in tried if t.cuts or t.planned), key=lambda t: t.seconds or 0.0)
