"""The cheapest shape and cuts of a pipeline.

    1  block prices: a chain per slot (submesh and rows), from a few short stages
    2  per shape, a bound; shapes whose bound is 5 % above the best price are not searched; else the partition search, priced by the player
    3  the best few once more, with the exact price of every distinct stage for what it holds; the player decides

The bound of the result is the least bound of all shapes: it holds for the block prices of step 1.
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
from autoshard.pipeline.shapes.price import StagePrice, chain_from, chain_of_stages
from autoshard.search.partition import Chain, Course, partition, rank_bytes
from autoshard.search.partition.chain import whole

FINALISTS = 20
MARGIN = 1.05
"""Shapes whose block prices are within this factor of the best stay candidates: exact prices may change their order."""
PARTITIONS = 200
"""About how many partitions of a shape are priced at most."""


class Pricer(Protocol):
    """Prices stages of one model. `lean` is 0 for the fastest way to run a stage and grows with the bytes that are saved."""

    labels: Sequence[Hashable]
    """Of each block; those with equal labels cost the same."""
    leanest: int

    def ideal(self, slot: Slot) -> float:
        """Seconds of a micro-batch of the whole model, at least, on one stage's devices; 0 if that is not known."""

    def price(self, first: int, end: int, slot: Slot, lean: int) -> StagePrice:
        """The stage of blocks first..end-1, whatever it holds."""

    def exact(self, first: int, end: int, slot: Slot, in_flight: float, limit: float) -> StagePrice | None:
        """The same within `limit` bytes with so many micro-batches between forward and backward; None where it does not fit."""


@dataclass(frozen=True)
class Tried:
    """A shape with its price, or, where it was not searched or nothing fits, its bound."""

    shape: Shape
    bound: float
    seconds: float | None = None
    cuts: tuple[int, ...] = ()
    lean: int = 0


@dataclass(frozen=True)
class Decision:
    """`seconds` by the player on exact stage prices. `bound`: no shape and cut is below it at the block prices. `tried`: every shape."""

    shape: Shape
    cuts: tuple[int, ...]
    stages: tuple[StagePrice, ...]
    seconds: float
    bound: float
    tried: tuple[Tried, ...]

    @property
    def gap(self) -> float:
        return max(0.0, 1.0 - self.bound / self.seconds) if self.seconds else 0.0


def decide_pipeline(pricer: Pricer, shapes: Sequence[Shape], memory_limit: float = np.inf, finalists: int = FINALISTS) -> Decision:
    """Raises InfeasibleError where no shape has stages that fit."""
    tried = _try_shapes(pricer, shapes, memory_limit)
    ranked = sorted((t for t in tried if t.seconds is not None), key=lambda t: t.seconds or 0.0)
    best: Decision | None = None
    for candidate in ranked[:finalists]:
        made = _exactly(pricer, candidate, memory_limit)
        if made is not None and (best is None or made.seconds < best.seconds):
            best = made
    if best is None:
        raise InfeasibleError(_nothing_fits(tried, memory_limit, len(ranked)), proven=all(t.bound == np.inf for t in tried))
    bound = min(best.seconds, min(t.bound for t in tried))
    return Decision(best.shape, best.cuts, best.stages, best.seconds, bound, tuple(tried))


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


class _Search:
    """What is known while shapes are tried: chains per slot and lean level, runs per schedule, the best price so far."""

    def __init__(self, pricer: Pricer, limit: float) -> None:
        self.limit, self.best = limit, np.inf
        self.levels = range(1 + pricer.leanest if np.isfinite(limit) else 1)
        self.chain = cache(lambda slot, lean: chain_from(pricer.labels, lambda first, end: pricer.price(first, end, slot, lean)))
        self.ideal = cache(pricer.ideal)
        self._run = cache(make_run)

    @property
    def cutoff(self) -> float:
        return MARGIN * self.best

    def run(self, shape: Shape) -> Run:
        return self._run(replace(shape, slot=Slot(1, 1, 1)))

    def least(self, shape: Shape) -> float:
        """Seconds that the shape takes at least, before any stage is priced."""
        return shape.microbatches * self.ideal(shape.slot) / shape.pp

    def promise(self, shape: Shape) -> float:
        """Seconds if all stages were equal and perfect: what is tried first."""
        return self.least(shape) * (1 + (shape.pp - 1) / (shape.chunks * shape.microbatches))


def make_run(shape: Shape) -> Run:
    table = shape.table()
    return Run(table, course_of(table))


def _try_shapes(pricer: Pricer, shapes: Sequence[Shape], limit: float) -> list[Tried]:
    """In the order of what they can be at best, so that most of those behind the best need not be searched."""
    search = _Search(pricer, limit)
    return [_try_shape(shape, search) for shape in sorted(shapes, key=search.promise)]


def _try_shape(shape: Shape, search: _Search) -> Tried:
    """The best partition over the lean levels, of those that may be cheaper than the best so far."""
    result = Tried(shape, search.least(shape))
    if result.bound >= search.cutoff:
        return result
    run, result = search.run(shape), Tried(shape, np.inf)
    for lean in search.levels:
        chain = _as_scheduled(search.chain(shape.slot, lean), run.table)
        cutoff = search.cutoff if result.seconds is None else result.seconds
        found = partition(chain, run.course, run.price(chain), search.limit, PARTITIONS, cutoff)
        result = replace(result, bound=min(result.bound, found.bound))
        if found.cuts:
            result = replace(result, seconds=found.seconds, cuts=found.cuts, lean=lean)
            search.best = min(search.best, found.seconds)
    return result


def _as_scheduled(chain: Chain, table: ActionTable) -> Chain:
    return chain if table.split_backward else chain.undivided()


def _exactly(pricer: Pricer, tried: Tried, limit: float) -> Decision | None:
    """The candidate with exact stages; None where they do not fit. Stages that share a rank first share the bytes that its block prices leave;
    if they then are too many at once, each has what its block prices need."""
    run, row = make_run(tried.shape), np.arange(len(tried.cuts))[None]
    own, spare = _own_bytes(pricer, tried, run, limit)
    for shares in ([own + spare, own] if len(tried.cuts) > len(run.course.of_rank) + 1 else [np.full(len(own), limit)]):
        stages = _exact_stages(pricer, tried, run, shares)
        chain = _as_scheduled(chain_of_stages(stages), run.table) if stages else None
        if chain is not None and (rank_bytes(chain, run.course, row) <= limit).all():
            return Decision(tried.shape, tried.cuts, stages, float(run.price(chain)(row)[0]), tried.bound, ())
    return None


def _own_bytes(pricer: Pricer, tried: Tried, run: Run, limit: float) -> tuple[np.ndarray, np.ndarray]:
    """Per stage, the bytes that it needs alone at block prices, and its part of what is left of its rank's."""
    chain = chain_from(pricer.labels, lambda first, end: pricer.price(first, end, tried.shape.slot, tried.lean))
    row = np.array([tried.cuts])
    stored, peak, saved, between = (whole(t, row)[0] for t in (chain.stored, chain.peak, chain.saved, chain.between))
    left = limit - rank_bytes(chain, run.course, row)[0]
    own, spare = stored + peak, np.zeros(len(stored))
    for stages, loads, rest in zip(run.course.of_rank, run.course.loads, left):
        own[stages] += (loads[:, 0] * saved[stages] + loads[:, 1] * between[stages]).max(0)
        spare[stages] = rest / len(stages)
    return own, spare


def _exact_stages(pricer: Pricer, tried: Tried, run: Run, shares: np.ndarray) -> tuple[StagePrice, ...]:
    """Each distinct stage priced once; nothing where one does not fit."""
    known: dict[Hashable, StagePrice | None] = {}
    stages = []
    for s, (first, end) in enumerate(zip(tried.cuts, tried.cuts[1:])):
        in_flight = float(run.course.in_flight[s])
        key = (tuple(pricer.labels[first:end]), in_flight, float(shares[s]))
        if key not in known:
            known[key] = pricer.exact(first, end, tried.shape.slot, in_flight, float(shares[s]))
        if (made := known[key]) is None:
            return ()
        stages.append(made)
    return tuple(stages)


def _nothing_fits(tried: Sequence[Tried], limit: float, priced: int) -> str:
    what = f"none of {len(tried)} pipelines fits in {limit / 2**30:.4g} GiB on a device"
    if priced:
        return f"{what}: the prices of blocks let {priced} fit, and their exact stages do not; give more memory, or more devices"
    return f"{what}, even with the least that is saved for backward; give more devices, a smaller batch, or state on the host"
