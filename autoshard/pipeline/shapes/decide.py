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
from typing import Protocol

import numpy as np

from autoshard.errors import InfeasibleError
from autoshard.pipeline.action_lists.actions import ActionTable
from autoshard.pipeline.action_lists.network import Network, network_of
from autoshard.pipeline.action_lists.step_end import with_step_end
from autoshard.pipeline.shapes.meshes import Shape, Slot
from autoshard.pipeline.shapes.partitions import course_of, price_on
from autoshard.pipeline.shapes.price import StagePrice, chain_from, with_ends
from autoshard.search.partition import Chain, Course, chain_of_blocks, partition, rank_bytes
from autoshard.search.partition.feasible import Stages

MARGIN = 1.05
"""A partition search ends where it finds nothing within this factor of the best price."""
TOLERANCE = 0.02
"""A shape is not searched if its bound is at most this part below the best price."""
PARTITIONS = 200
"""About how many partitions of a shape are priced at most."""


@dataclass(frozen=True, eq=False)
class Floor:
    """Of every block, what no plan is below: seconds of a micro-batch for forward, for all of it, and seconds of a step besides."""

    forward: np.ndarray
    whole: np.ndarray
    once: np.ndarray


class Pricer(Protocol):
    """Prices stages of one model. `lean` is 0 for the fastest way to run a stage and grows with the bytes that are saved."""

    labels: Sequence[Hashable]
    """Of each block; those with equal labels cost the same."""
    weights: Sequence[float]
    """Of each block, about as its seconds."""
    leanest: int

    def ideal(self, slot: Slot) -> float:
        """Seconds of a micro-batch of the whole model, at least, on one stage's devices; 0 if that is not known."""

    def floor(self, slot: Slot) -> Floor:
        """The same by blocks, and closer."""

    def price(self, first: int, end: int, slot: Slot, lean: int) -> StagePrice:
        """The stage of blocks first..end-1, whatever it holds. Raises InfeasibleError where it cannot be that lean."""


@dataclass(frozen=True)
class Tried:
    """A shape with its bound. Where it was searched, `seconds` is its price at block prices: that of `cuts`, or, without them, what all
    cuts are above. `memory`: bytes of the fullest rank. `why`: it was not searched, or has no cuts."""

    shape: Shape
    bound: float
    seconds: float | None = None
    cuts: tuple[int, ...] = ()
    lean: int = 0
    memory: float | None = None
    why: str = ""


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


def try_shapes(pricer: Pricer, shapes: Sequence[Shape], limit: float = np.inf) -> tuple[Tried, ...]:
    """In the order of what they can be at best, so that most of those behind the best need not be searched. `limit`: bytes of a rank."""
    search = _Search(pricer, limit)
    return tuple(search.tried(shape) for shape in sorted(shapes, key=search.promise))


def chain_of(pricer: Pricer, slot: Slot, lean: int) -> Chain:
    """Every stage that can be on a slot. Raises InfeasibleError."""
    return chain_from(pricer.labels, with_ends(pricer.labels, lambda first, end: pricer.price(first, end, slot, lean), pricer.weights))


class _Search:
    """What is known while shapes are tried: chains per slot and lean level, runs per schedule, the best price so far."""

    def __init__(self, pricer: Pricer, limit: float) -> None:
        self.pricer, self.limit, self.best = pricer, limit, np.inf
        self.levels = range(1 + pricer.leanest if np.isfinite(limit) else 1)
        self.chain = cache(lambda slot, lean: chain_of(pricer, slot, lean))
        self.floor = cache(pricer.floor)
        self._run = cache(make_run)

    def run(self, shape: Shape) -> Run:
        return self._run(replace(shape, slot=Slot(1, 1, 1)))

    def least(self, shape: Shape) -> float:
        """Seconds that the shape takes at least, before any stage is priced."""
        return shape.microbatches * self.pricer.ideal(shape.slot) / shape.pp

    def promise(self, shape: Shape) -> float:
        """Seconds if all stages were equal and perfect: what is tried first."""
        return self.least(shape) * (1 + (shape.pp - 1) / (shape.chunks * shape.microbatches))

    def tried(self, shape: Shape) -> Tried:
        enough = (1 - TOLERANCE) * self.best
        bound = self.least(shape)
        if bound < enough:
            bound = max(bound, self._bound(shape, enough))
        if bound >= enough:
            return Tried(shape, bound, why="not searched: its bound says enough")
        return self._searched(Tried(shape, bound))

    def _bound(self, shape: Shape, enough: float) -> float:
        """At the floors of blocks. The terms `turns` of the bound would need floors of every window; the others know sums alone."""
        floor, run = self.floor(shape.slot), self.run(shape)
        rest = floor.whole - floor.forward
        parts = {"backward": np.zeros_like(rest), "weight": rest} if run.table.split_backward else {"backward": rest}
        chain = chain_of_blocks(floor.forward, parts.pop("backward"), once=floor.once, **parts)
        return Stages(chain, replace(run.course, turns=np.zeros_like(run.course.turns))).bound(enough)

    def _searched(self, tried: Tried) -> Tried:
        """The best partition at the first lean level where one fits."""
        run, enough, why = self.run(tried.shape), MARGIN * self.best, ""
        for lean in self.levels:
            try:
                chain = self.chain(tried.shape.slot, lean)
            except InfeasibleError as e:
                return replace(tried, why=f"does not fit: {e}")
            chain = chain if run.table.split_backward else chain.undivided()
            found = partition(chain, run.course, run.price(chain), self.limit, PARTITIONS, enough)
            if found.cuts:
                self.best = min(self.best, found.seconds)
                memory = float(rank_bytes(chain, run.course, np.array([found.cuts])).max())
                return replace(tried, seconds=found.seconds, cuts=found.cuts, lean=lean, memory=memory)
            if Stages(chain, run.course).bound(enough) >= enough:  # whatever the memory
                return replace(tried, seconds=enough, lean=lean, why="it is not near the best")
            why = "does not fit"
        return replace(tried, why=why)


def ranked(tried: Sequence[Tried]) -> list[Tried]:
    """Those with cuts, the cheapest first."""
    return sorted((t for t in tried if t.cuts), key=lambda t: t.seconds or 0.0)
