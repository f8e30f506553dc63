"""Prices of a traced model's blocks on any submesh and for any micro-batch, by the ordinary search: what the search over shapes works on.

A block, and two that stand together, are cut out of the programs of two sizes of the batch once; other sizes are made from these
(`resize.py`). Blocks with equal labels cost the same, so each kind is planned once per submesh and micro-batch.
"""
from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property

import numpy as np

from autoshard import collectives
from autoshard.base.graph import BACKWARD, FORWARD, Graph, Op, Ref
from autoshard.base.mesh import Mesh
from autoshard.base.plan import Plan
from autoshard.base.windows import ONCE, is_accumulator
from autoshard.cost.budget import Budget
from autoshard.cost.cluster import AxisLink, Cluster
from autoshard.cost.compute import started_seconds
from autoshard.cost.fusion import NOTHING, untouched
from autoshard.decide.least_seconds import Held, Prices
from autoshard.decide.pipeline_options import Pipeline
from autoshard.pipeline.cutting.blocks import Blocks
from autoshard.pipeline.cutting.cut import Hop, Stage
from autoshard.pipeline.cutting.cut_points import block_seconds, op_seconds
from autoshard.pipeline.cutting.repeated import repeated_ops
from autoshard.pipeline.cutting.split import split_stage
from autoshard.pipeline.cutting.stretches import Stretches
from autoshard.pipeline.microbatches.batch import Batch
from autoshard.pipeline.microbatches.resize import Between, Unlike
from autoshard.pipeline.schedules import SCHEDULES
from autoshard.pipeline.shapes.decide import OWN, Tried
from autoshard.pipeline.shapes.floors import Floor, Priced
from autoshard.pipeline.shapes.meshes import Slot
from autoshard.pipeline.shapes.needs import Needs, needs_of
from autoshard.pipeline.shapes.price import SUMS, StagePrice, mixed
from autoshard.pipeline.shapes.stage_prices import price_of
from autoshard.program.flow import param_derived

RATES = (0.0, 0.3, 1.0, 3.0)
"""What a byte costs: at 1, all that a rank keeps of the blocks that take most of a step costs as many seconds as making it again."""
DEAREST = 1.2
"""The highest price of a byte in bounds, as a part of what making values again costs for each: beyond it little is gained, and searches begin at half
of it."""
LOW = 0.15
"""A price of a byte, likewise. Where the bound at this price is no higher than in ample memory it is hardly higher at another one."""
PARTS = 4
"""Lean levels from one rate to the next: between them some blocks of a rank are as at the one, and the others as at the other."""


@dataclass(frozen=True, eq=False)
class Searches:
    """The ordinary search, as the pricer asks it. `plan`: (graph of a stage, its mesh, the wire, micro-batches in flight, seconds of
    a byte) -> plan; `run`: (graph, mesh, ops that other parts may pay for) -> seconds of one run at least, and of the update; `step`: (graph, mesh,
    prices or None, those ops, what of memory counts) -> seconds of a step at least, and at which prices; `stored`: bytes of a parameter, and of what
    the optimizer has of it on a device."""

    plan: Callable[[Graph, Mesh, AxisLink, int, float], Plan]
    run: Callable[[Graph, Mesh, frozenset[str]], tuple[float, float]]
    step: Callable[[Graph, Mesh, Prices | None, frozenset[str], Held | None], tuple[float, Prices]]
    stored: Callable[[Op], float]


class Sizes:
    """Stretches of the model for micro-batches of any number of rows. `count`: a number of micro-batches that is traced; from that program
    and the one of the batch others are made where they can be, else traced too. Raises UsageError for a model that is not exact."""

    def __init__(self, batch: Batch, options: Pipeline, rows: int, count: int) -> None:
        self.batch, self.options, self.rows, self.count = batch, options, rows, count
        self.of = cache(self._of)
        self.stage = cache(self._stage)
        self._whole = cache(lambda first, end, count: self.of(count).stage(first, end))
        self._cut = cache(self._cut_out)

    def _of(self, count: int) -> Stretches:
        options = replace(self.options, microbatches=max(count, self.count))
        graph = self.batch.as_one(options) if count < self.count else self.batch.about(options).graph
        return Stretches(graph, Blocks.of(graph), split=False)

    @property
    def first(self) -> Stretches:
        return self.of(self.count)

    def _cut_out(self, first: int, end: int, count: int, split: bool) -> Stage:
        made = self._whole(first, end, count)
        return split_stage(made) if split else made

    def _stage(self, first: int, end: int, count: int, split: bool) -> Stage:
        """Blocks first..end-1, of which a step runs `count` micro-batches; `split`: with backward in two windows."""
        if count in (1, self.count):
            return self._cut(first, end, count, split)
        a, b = (self._cut(first, end, n, split) for n in (self.count, 1))
        try:
            between = Between.of(self.rows // count, self.rows // self.count, self.rows)
            return _resized(a, between.graph(a.graph, b.graph, count))
        except Unlike:
            return self._cut(first, end, count, split)


def traced_count(rows: int) -> int:
    """The smallest number of micro-batches, if possible with two rows or more: a dim of 1 may be traced in another way."""
    divisors = [n for n in range(2, rows + 1) if rows % n == 0]
    return next((n for n in divisors if rows // n > 1), min(divisors, default=1))


def _resized(stage: Stage, graph: Graph) -> Stage:
    def received(hop: Hop) -> Hop:
        return replace(hop, meta=graph.meta(Ref(hop.recv)))

    def sent(hop: Hop) -> Hop:
        return replace(hop, meta=graph.meta(graph.op(hop.send).refs[0]))

    return replace(stage, graph=graph, receives=tuple(map(received, stage.receives)), sends=tuple(map(sent, stage.sends)))


class MeshPricer:
    """A `decide.Pricer`. `mesh_of`: the submesh of a slot; `devices`: of the whole mesh; `limit`: bytes a rank may use."""

    def __init__(self, sizes: Sizes, devices: int, mesh_of: Callable[[Slot], Mesh], cluster: Cluster, limit: float, searches: Searches) -> None:
        self.sizes, self.devices, self.mesh_of, self.cluster, self.limit, self.searches = sizes, devices, mesh_of, cluster, limit, searches
        known: dict[Hashable, int] = {}
        self.labels: tuple[Hashable, ...] = tuple(label and known.setdefault(label, len(known)) for label in sizes.first.labels)
        self._first_of: dict[tuple[Hashable, ...], int] = {}
        self._ample, self._at_rate = cache(self._price), cache(self._price_at_rate)
        self._run, self._step, self._least_step = cache(self._run_of), cache(self._step_of), cache(self._least_step_of)
        self._started = cache(self._started_in)

    @cached_property
    def kinds(self) -> dict[Hashable, int]:
        """The first block of every kind."""
        return {label: self.labels.index(label) for label in dict.fromkeys(self.labels)}

    @property
    def weights(self) -> list[float]:
        return self._seconds[0]

    def ideal(self, slot: Slot) -> float:
        return float(sum(self._seconds[0])) * slot.rows / self.sizes.rows / slot.ranks

    @cached_property
    def _seconds(self) -> tuple[list[float], list[float]]:
        """Of blocks, on one device, for the whole batch: all of it, and forward alone."""
        blocks = Blocks.of(self.sizes.batch.whole.graph)
        return block_seconds(blocks, self.cluster), block_seconds(blocks, self.cluster, FORWARD)

    def floor(self, slot: Slot, look: int) -> Floor:
        """Every block is by itself, with free transfers at its ends. What a micro-batch takes is that of the batch as one, scaled to the slot's rows:
        many small ones are never faster than a large one; and no less than its kernels take to start. Looks: 1 ops divided by the ranks; 2
        micro-batches of the main kind; 3 its step with the batch as one; 4 both of all kinds; 5 steps of this slot; 6 its own micro-batches, what
        makes gradients of theirs, and what travels; 7 its memory. The first takes no search; slots with equal submeshes share those up to the
        fourth."""
        share, all_rows = slot.rows / self.sizes.rows, replace(slot, rows=self.sizes.rows)
        forward, whole = np.array(self._seconds)[::-1] / slot.ranks
        once = np.zeros_like(whole)
        steps = {at: np.zeros_like(whole) for at in ((), (), (all_rows,), (all_rows,), *3 * [(all_rows, slot)])[look - 1]}
        for label in self.kinds if look > 3 else (self.main,) if look > 1 else ():
            here = [k for k, other in enumerate(self.labels) if other == label]
            whole[here], once[here] = self._run(all_rows, label)
            for at, step in steps.items():
                step[here] = self._step(at, label)[0]
        hides = [1.0 - self.cluster.overlap.eta * self._step(at, self.main)[1][1] if at else 0.0 for at in steps]
        started = np.array([self._started(slot.rows, label) for label in self.labels]).T
        forward, whole = np.maximum(np.stack([np.minimum(forward, whole), whole]) * share, started)
        made = Floor(forward, whole, once, tuple(steps.values()), tuple(hides), self._needs(slot))
        if look < OWN:
            return made
        own = np.array([self._run(slot, label)[0] for label in self.labels])
        made = replace(made, whole=np.maximum(made.whole, own), back=self._back * slot.rows / self.sizes.rows / slot.ranks, hops=self._hops(slot))
        return made if look == OWN else replace(made, priced=self._priced(slot))

    def _started_in(self, rows: int, label: Hashable) -> tuple[float, float]:
        """Seconds of forward, and of a micro-batch of so many rows, however small the pieces of it are: of starting the kernels of a block that are
        its own. No plan has fewer."""
        graph = self._stage(self.kinds[label], self.kinds[label] + 1, Slot(self.devices, 1, rows)).graph
        kept, shared, device = untouched(graph, self.cluster.device, open_ends=True), self._shared(graph), self.cluster.device
        own = [op for op in graph.of_kind("call") if op.phase not in ONCE and op.name not in shared]
        seconds = {op.name: started_seconds(graph.calls[op.name], device, kept.get(op.name, NOTHING)) for op in own}
        return sum(seconds[op.name] for op in own if op.phase == FORWARD), sum(seconds.values())

    @cached_property
    def _inner(self) -> dict[Hashable, int]:
        """The first block of every kind that is not the first of the model, where there is one."""
        return {label: next((at for at, other in enumerate(self.labels) if at and other == label), first) for label, first in self.kinds.items()}

    @cached_property
    def _single(self) -> bool:
        """Whether each block reads one value of those before it, and sends one gradient back."""
        slot = Slot(self.devices, 1, self.sizes.rows // self.sizes.count)
        ends = [[h.window for h in hops] for at in self._inner.values() if at for s in (self._stage(at, at + 1, slot),)
                for hops in (s.receives, s.sends)]
        return all(reads.count(FORWARD) == sends.count(BACKWARD) == 1 for reads, sends in zip(ends[::2], ends[1::2], strict=True))

    @cached_property
    def _back(self) -> np.ndarray:
        """Seconds per block on one device, for the whole batch, of ops that make gradients which earlier blocks wait for."""
        found = {label: self._back_of(at) for label, at in self._inner.items() if at} if self._single else {}
        return np.array([found.get(label, 0.0) for label in self.labels])

    def _back_of(self, at: int) -> float:
        graph = self._stage(at, at + 1, Slot(self.devices, 1, self.sizes.rows), split=True).graph
        kept, shared = untouched(graph, self.cluster.device, open_ends=True), self._shared(graph)
        return sum(op_seconds(graph, op.name, self.cluster, kept.get(op.name, NOTHING)) for op in graph.of_kind("call")
                   if op.phase == BACKWARD and op.name not in shared)

    def _hops(self, slot: Slot) -> tuple[float, float]:
        """Of the smallest value that a block reads, split over all devices of a stage, and of its gradient."""
        if not self._single or self._pp(slot) == 1:
            return 0.0, 0.0
        stages, wire = [self._stage(at, at + 1, slot) for at in self._inner.values() if at], self._wire(slot)
        least = [min(sum(h.meta.nbytes for h in hops if h.window == window) for hops in ends)
                 for window, ends in ((FORWARD, [s.receives for s in stages]), (BACKWARD, [s.sends for s in stages]))]
        forward, backward = (float(collectives.seconds("send_recv", nbytes // slot.ranks, wire)) for nbytes in least)
        return forward, backward

    def _priced(self, slot: Slot) -> Priced | None:
        """At the price of a byte that makes the bound of the main blocks about largest, with as many micro-batches in flight as the pipeline has
        ranks, and with none. None where a low price says no more than ample memory. Prices of three axes are those of two, as in `_step_of`."""
        needs, pp, two = self._needs(slot), self._pp(slot), replace(slot, dp=slot.dp * slot.mp, mp=1)
        if needs is None or not (unit := needs.again(self.kinds[self.main], self.sizes.rows // slot.rows, pp)):
            return None
        held = Held(pp, needs.limit * pp / len(self.labels), DEAREST * unit)
        ample, (forward, backward, _) = self._step(two, self.main)
        if self._least_step(two, self.main, (forward, backward, LOW * unit), held)[0] - LOW * unit * held.share <= ample:
            return None
        least, prices = self._least_step(two, self.main, None, held)
        seconds = np.array([self._least_step(slot, label, prices, None)[0] for label in self.labels])
        empty = seconds + prices[2] * needs.always(self.sizes.rows // slot.rows)
        main = np.array([label == self.main for label in self.labels])  # what the others keep is little, and as long to search
        least = least if slot == two else self._least_step(slot, self.main, prices, held)[0]
        full = np.where(main, np.maximum(empty, least), empty)
        return Priced(prices[2], float(pp), empty, full, needs.limit)

    def _needs(self, slot: Slot) -> Needs | None:
        return self._needed.on(slot.ranks) if self._needed else None

    @cached_property
    def _needed(self) -> Needs | None:
        """On one device."""
        graph = self.sizes.batch.whole.graph
        if not np.isfinite(self.limit) or not graph.training:
            return None
        limit = Budget.of(self.cluster.device, self.limit).peak
        return needs_of(Blocks.of(graph), self.sizes.first.graph, self.searches.stored, self.cluster, limit)

    @cached_property
    def main(self) -> Hashable:
        """The label of the blocks that take most of a step."""
        of = list(zip(self.labels, self.weights, strict=True))
        return max(self.kinds, key=lambda label: sum(seconds for other, seconds in of if other == label))

    def _run_of(self, slot: Slot, label: Hashable) -> tuple[float, float]:
        graph = self._stage(self.kinds[label], self.kinds[label] + 1, slot).graph
        return self.searches.run(graph, self.mesh_of(slot), self._shared(graph)) if graph.of_kind("call") else (0.0, 0.0)

    def _step_of(self, slot: Slot, label: Hashable) -> tuple[float, Prices]:
        """At the prices of the main kind, so that kinds add up. On three axes it has those of two: to look for prices takes as long as several
        bounds, and any prices give one."""
        prices = None if label == self.main else self._step(slot, self.main)[1]
        if slot.mp > 1 and prices is None:
            prices = self._step(replace(slot, dp=slot.dp * slot.mp, mp=1), self.main)[1]
        return self._least_step(slot, label, prices, None)

    def _least_step_of(self, slot: Slot, label: Hashable, prices: Prices | None, held: Held | None) -> tuple[float, Prices]:
        graph = self._stage(self.kinds[label], self.kinds[label] + 1, slot).graph
        found = self.searches.step(graph, self.mesh_of(slot), prices, self._shared(graph), held) if graph.of_kind("call") else None
        return found or (0.0, (0.0, 0.0, 0.0))

    def _shared(self, graph: Graph) -> frozenset[str]:
        """What a block's program reads and computes that another block may have too; of one micro-batch also ops that add up gradients, which it does
        not."""
        alone = graph.microbatches == 1
        return frozenset(op.name for op in graph.ops if op.name.split("@")[0] in self._several or op.kind in ("buffer", "input")
                         or alone and is_accumulator(op))

    @cached_property
    def _several(self) -> frozenset[str]:
        """Ops that every stage repeats, and parameters that several blocks read, with what is made of them alone and what adds up their gradients.
        What is made of a parameter that one block alone reads is that block's."""
        graph, of_op = self.sizes.first.graph, self.sizes.first.blocks.of_op
        repeated, derived = repeated_ops(graph), param_derived(graph)
        blocks: dict[str, set[int]] = {}
        for op in reversed([op for op in graph.of_kind("call") if op.name in repeated or op.name in of_op]):
            own = blocks.get(op.name, set()) if op.name in repeated else {of_op[op.name]}
            for ref in op.refs:
                blocks.setdefault(ref.op, set()).update(own)
        params = [op for op in graph.of_kind("param") if len(blocks.get(op.name, ())) > 1]
        alone = {op.name for op in graph.of_kind("param")} - {op.name for op in params}
        for op in graph.ops:
            if Ref(op.name) in derived and op.refs and op.refs[0].op in alone:
                alone.add(op.name)
        return frozenset(repeated - alone) | {name for op in params for name in (op.name, f"sum:{op.target}")}

    def _stage(self, first: int, end: int, slot: Slot, split: bool = False) -> Stage:
        return self.sizes.stage(first, end, self.sizes.rows // slot.rows, split and self.sizes.first.graph.training)

    def price(self, first: int, end: int, slot: Slot, lean: int, split: bool) -> StagePrice:
        """That of the first blocks of the same kinds, in ample memory. Further up blocks change as they do by themselves. Raises InfeasibleError."""
        at = self._first_of.setdefault(self.labels[first:end], first)
        price = self._ample(at, at + end - first, slot, split)
        for label in self.labels[first:end] if lean else ():
            price = _changed(price, self._alone(label, slot, 0, split), self._alone(label, slot, lean, split))
        return price

    @cached_property
    def _repeating(self) -> frozenset[Hashable]:
        """Kinds of which there are several blocks; all, where there are none."""
        return frozenset(label for label in self.kinds if self.labels.count(label) > 1) or frozenset(self.kinds)

    def _alone(self, label: Hashable, slot: Slot, lean: int, split: bool) -> StagePrice:
        """A block by itself. Between two rates a rank has some blocks at each: the price is the mean. What does not repeat stays at the first rate:
        it is few bytes, and takes as long to search."""
        low, part = divmod(lean if label in self._repeating else min(lean, PARTS), PARTS)
        price = self._at_rate(label, slot, low, split)
        return price if not part else mixed(price, self._at_rate(label, slot, low + 1, split), part / PARTS)

    def _price_at_rate(self, label: Hashable, slot: Slot, level: int, split: bool) -> StagePrice:
        at, flying = self.kinds[label], self._pp(slot)
        ample = self._ample(at, at + 1, slot, split)
        if not (level and ample.forward and self._unit(slot, split)):
            return ample
        rate = RATES[level] * self._unit(slot, split)
        stage, wire = self._stage(at, at + 1, slot, split), self._wire(slot)
        return price_of(stage, self.searches.plan(stage.graph, self.mesh_of(slot), wire, flying, rate), wire)

    def _unit(self, slot: Slot, split: bool) -> float:
        """The rate 1, in seconds of a step for a byte; 0 where nothing is kept."""
        at = self.kinds[self.main]
        main = self._ample(at, at + 1, slot, split)
        return self.sizes.rows / slot.rows * main.forward / (self._pp(slot) * main.saved) if main.saved else 0.0

    def corners(self) -> Sequence[int]:
        return range(0, PARTS * len(RATES), PARTS)

    def rate(self, tried: Tried) -> float:
        """At which stages of a shape were priced that was searched: seconds for a byte, the higher one between two; 0 in ample memory."""
        split = SCHEDULES[tried.shape.schedule].split_backward
        return RATES[-(-tried.lean // PARTS)] * self._unit(tried.shape.slot, split) if tried.lean else 0.0

    def rates(self, tried: Tried) -> tuple[float, ...]:
        """Those at which to plan its stages: the one at which they were priced, and the next one, where they take more than was thought."""
        unit, level = self._unit(tried.shape.slot, SCHEDULES[tried.shape.schedule].split_backward), -(-tried.lean // PARTS)
        return tuple(rate * unit for rate in RATES[level:level + 2]) if level else ()

    def _price(self, first: int, end: int, slot: Slot, split: bool) -> StagePrice:
        """In ample memory."""
        stage, wire = self._stage(first, end, slot, split), self._wire(slot)
        if not stage.graph.of_kind("call"):  # all its ops run in blocks that read them
            return StagePrice(0.0, 0.0)
        return price_of(stage, self.searches.plan(stage.graph, self.mesh_of(slot), wire, 1, 0.0), wire)

    def _pp(self, slot: Slot) -> int:
        return self.devices // slot.ranks

    def _wire(self, slot: Slot) -> AxisLink:
        """Between stages; where there is one stage, that of neighbours: prices of blocks have ends, and their sums do not."""
        pp, sizes = self._pp(slot), self.mesh_of(slot).sizes
        if pp == 1:
            return AxisLink(((self.cluster.links[0], 2),))
        return self.cluster.links_for(Mesh(tuple(f"d{i}" for i in range(len(sizes) + 1)), (pp, *sizes)))[0]


def _changed(price: StagePrice, before: StagePrice, after: StagePrice) -> StagePrice:
    """`price` of blocks of which one changes."""
    sums = {name: max(0.0, getattr(price, name) + getattr(after, name) - getattr(before, name)) for name in SUMS}
    return replace(price, **sums, peak=max(price.peak, after.peak))
