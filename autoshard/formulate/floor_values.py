"""Of floor rows (`floor_rows.py`): values that lie there because an op behind the row's will read them.

A value that some op behind surely reads is counted in the least bytes that it may have on its way there, given what that op reads. A value that is
kept so that a recompute source reads it behind the row's op is counted while all that hold which say so in the plan that was too full: it is kept,
the source runs and keeps nothing, and nobody needs the source's value before.
"""
from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from autoshard.base.graph import Op, Ref
from autoshard.base.roles import Role
from autoshard.base.spec import NOWHERE, Spec
from autoshard.cost.redistribute import SLICE
from autoshard.formulate.floor_gathers import Condition, FloorGathers, holds_in, while_all_hold
from autoshard.formulate.floor_weights import exact_near
from autoshard.formulate.values import storage_root
from autoshard.program.flow import gradient_bound, is_passing
from autoshard.recompute.rewrite import is_source
from autoshard.recompute.undecided import source_state
from autoshard.rules import registry
from autoshard.space.strategies import SpecIndex

Counted = tuple[int, np.ndarray, float]
"""A node, bytes per strategy of it, and what a kept copy of the same value leaves out, for it may be what these bytes are."""


@dataclass(frozen=True)
class Reader:
    """An op that reads a value, or a view of it. `path`: the tensors from the value to what the op reads, each as the output of an op
    (index -1) or as its input of that index."""

    op: str
    order: int
    sure: bool
    path: tuple[tuple[Ref, str, int], ...]


@dataclass(eq=False)
class FloorValues(FloorGathers):
    """What of floor rows is a matter of values that backward reads."""

    @cached_property
    def outputs(self) -> Mapping[Ref, Op]:
        """Per value of forward that the user gets, the output that it is, or that a view of it is."""
        found = {storage_root(self.graph, op.refs[0]): op for op in self.graph.outputs(Role.USER).values() if op.refs and op.phase == "forward"}
        return {root: op for root, op in found.items() if self.graph.op(root.op).kind == "call"}

    @cached_property
    def roots(self) -> tuple[Ref, ...]:
        """Values with a buffer of their own that backward reads, or may read to recompute others."""
        others = [root for root, readers in self._all_readers.items() if root not in self.readers and any(map(self._decides, readers))]
        return (*self.readers, *others)

    @cached_property
    def readers(self) -> dict[Ref, tuple[Reader, ...]]:
        """`_all_readers` of values that some op surely reads."""
        return {root: readers for root, readers in self._all_readers.items() if any(r.sure for r in readers)}

    @cached_property
    def _all_readers(self) -> dict[Ref, tuple[Reader, ...]]:
        """Per value with a buffer of its own that backward may read: who reads it or a view of it there. That a source may keep it is no reading."""
        graph, out, late = self.graph, defaultdict(list), gradient_bound(self.graph)
        paths: dict[Ref, tuple[tuple[Ref, str, int], ...]] = {}
        for op in graph.ops:
            if op.phase == "forward" or op.kind not in ("call", "output"):
                continue
            for i, ref in enumerate(op.refs):
                root = storage_root(graph, ref)
                if ref in op.kept or graph.op(root.op).kind != "call" or graph.op(root.op).phase == "forward":
                    continue
                path = (*paths.get(ref, ((ref, ref.op, -1),)), (ref, op.name, i))
                if registry.is_view(op) and len(op.refs) == 1:
                    paths.update((view, (*path, (view, op.name, -1))) for view in (Ref(op.name, k) for k in range(len(op.outputs))))
                sure = op.kind == "call" and not is_source(op) and not registry.is_view(op) and not (is_passing(op) and Ref(op.name) in late)
                out[root].append(Reader(op.name, graph.order[op.name], sure, path))
        return {root: tuple(readers) for root, readers in out.items() if root not in self._first_gradients}

    def _decides(self, reader: Reader) -> bool:
        """Whether the reader is a source whose own value is surely read, so that it reads and runs unless it keeps that one."""
        op = self.graph.op(reader.op)
        return is_source(op) and not registry.is_view(op) and any(Ref(op.name, k) in self.readers for k in range(len(op.outputs)))

    def _value(self, root: Ref, now: int, plan: np.ndarray | None) -> Iterator[Counted]:
        """A value on its way to its last reader. Where there is a `plan`, what is a matter of two nodes and more is exact for choices near it."""
        graph, units = self.graph, self.formulation.units
        op, first, there = graph.op(root.op), self._all_readers[root][0].order, np.ones(1, bool)
        last = self._last(root, now)
        if last is None:
            if is_source(op) and plan is not None:
                yield from self._kept_to_recompute(op, root, now, plan)
            return
        if is_source(op):
            kept = self._kept(op, root)
            if now < first:
                if kept is not None and kept.any():
                    yield units.index(root.op), self._kept_or_copied(root, last, kept), _least_of(kept)
                return
            if now < self._needed(root.op):
                there = kept > 0 if kept is not None else np.zeros(1, bool)
                if plan is not None:
                    yield from self._made_for_others(op, root, last, now, plan)
        elif graph.order[root.op] >= now:
            return
        if plan is None or units.index(last.op) == units.index(root.op):
            amounts = self._least_on(root, last) * there
            if amounts.any():
                yield units.index(root.op), amounts, _least_of(amounts)
        else:
            yield from self._read_as(root, last, there, plan)

    def _kept_or_copied(self, root: Ref, last: Reader, kept: np.ndarray) -> np.ndarray:
        """What a source keeps. Where it is off, `last` reads a copy that forward has made and keeps: the least bytes of one, which kept copies leave
        out."""
        if self._sources_at[self._homes[root]] > 1:
            return kept
        own, reads = self._once(("least", root, last.op), lambda: self._on_path(root, last.path))
        off = self._once(("off", root), lambda: source_state(self.formulation.units, root) == 0)
        return np.where(off, min(_least_of(kept), _least_of(own), reads.min()), kept)

    @cached_property
    def _sources_at(self) -> Counter[Ref]:
        """Per value of forward, how many values of sources stand for it."""
        return Counter(self._homes.values())

    def _read_as(self, root: Ref, last: Reader, there: np.ndarray, plan: np.ndarray) -> Iterator[Counted]:
        """The least of what the value is and of what its last reader, of another unit, reads: it lies there in the one or the other."""
        nodes = self.formulation.units.index(root.op), self.formulation.units.index(last.op)
        lies, which = self._once(("read as", root, last.op), lambda: self._lies_as(root, last, nodes[1]))
        lies = lies * there[:, None]
        if lies.any():
            most = float(lies.max())
            for node, amounts in exact_near(plan, nodes, lies):
                yield node, amounts[which] if node == nodes[1] else amounts, most

    def _lies_as(self, root: Ref, last: Reader, node: int) -> tuple[np.ndarray, np.ndarray]:
        """(per strategy of the value's unit and kind of reading, the least bytes that lie there; per strategy of the reader's unit, its kind)."""
        own, reads = self._on_path(root, last.path, node)
        if not _is_direct(root, last.path):
            different, which = np.unique(reads, return_inverse=True)
            return np.minimum(own[:, None], different), which
        held = self.formulation.units.inputs(last.op, last.path[-1][2])
        first = np.array([int(np.argmax(held.index == k)) for k in range(len(held.specs))])
        return np.where(self._view_of(root, held), own[:, None], np.minimum(own[:, None], reads[first])), held.index

    def _kept_to_recompute(self, op: Op, root: Ref, now: int, plan: np.ndarray) -> Iterator[Counted]:
        """What a source keeps so that another one reads it behind `now`, while all that hold which say so in `plan`."""
        kept, unit = self._kept(op, root), self.formulation.units.index(root.op)
        nbytes = 0.0 if kept is None else float(kept[plan[unit]])
        if nbytes <= 0:
            return
        for reader in filter(self._decides, self._all_readers[root]):
            waits = self._runs_behind(reader, now)
            conditions = None if waits is None else [(unit, kept >= nbytes), *waits]
            if conditions is not None and all(holds_in(c, plan) for c in conditions):
                yield from ((node, amounts, nbytes) for node, amounts in while_all_hold(conditions, nbytes))
                return

    def _made_for_others(self, op: Op, root: Ref, last: Reader, now: int, plan: np.ndarray) -> Iterator[Counted]:
        """What a source has made again before `now` for a source of another unit that has surely run by then, if that one runs in `plan`. It lies
        there until its last reader."""
        unit, kept = self.formulation.units.index(op.name), self._kept(op, root)
        amounts = self._least_on(root, last) * (kept == 0 if kept is not None else np.ones(1, bool))
        nbytes = float(amounts[plan[unit]])
        for reader in self._all_readers[root] if nbytes > 0 else ():
            other = self.formulation.units.index(reader.op)
            runs = (other, self._reads(reader) > 0)
            if other != unit and reader.order < now and self._decides(reader) and self._needed(reader.op) <= now and holds_in(runs, plan):
                yield from ((node, each, nbytes) for node, each in while_all_hold([(unit, amounts >= nbytes), runs], nbytes))
                return

    def _runs_behind(self, reader: Reader, now: int) -> list[Condition] | None:
        """When a source whose value is surely read runs behind `now`: it runs, and nobody reads the value before. None where somebody surely does."""
        units, of = self.formulation.units, [Ref(reader.op, k) for k in range(len(self.graph.op(reader.op).outputs))]
        if self._first_sure(reader.op) <= now:
            return None
        before = [r for root in of for r in self._all_readers.get(root, ()) if r.order <= now]
        on = [(reader, True), *((r, False) for r in before)]
        return [(units.index(r.op), (self._reads(r) > 0) == runs) for r, runs in on]

    def _early(self, root: Ref, now: int, read: set[Ref]) -> Iterator[Counted]:
        """What forward has made before `now` for backward. What the op reads itself is counted there."""
        op = self.graph.op(root.op)
        kept = self._kept(op, root) if is_source(op) else None
        if kept is not None and kept.any():
            home = self._homes[root]
            if self.graph.order[home.op] < now and home not in read:
                yield self.formulation.units.index(root.op), kept, _least_of(kept)

    def _last(self, root: Ref, now: int) -> Reader | None:
        """The last op that surely reads the value, if that is behind `now`."""
        last = next((r for r in reversed(self._all_readers[root]) if r.sure), None)
        return last if last is not None and last.order > now else None

    def _reads(self, reader: Reader) -> np.ndarray:
        """Per strategy of the reader's unit, the bytes that it reads; 0 where it is off."""
        ref, name, i = reader.path[-1]
        return self._bytes(ref, self.formulation.units.inputs(name, i))

    def _kept(self, op: Op, root: Ref) -> np.ndarray | None:
        """Per strategy, the bytes of a source's value where it keeps it; not of one that the user holds anyway."""
        value = Ref(op.kept[0].op, root.index) if op.kept else None
        if value is None or value not in op.kept or self._homes[root] in self.outputs:
            return None
        return self._once(("kept", root), lambda: self._bytes(value, self.formulation.units.inputs(op.name, op.refs.index(value))))

    def _needed(self, source: str) -> int:
        """The order of the first op by which the source has surely run, if it does and all of its unit do."""
        return self._once(("needed", source), lambda: min(
            [self._first_sure(source), *(self._needed(w) for w in self._dependent(source))]))

    def _first_sure(self, source: str) -> int:
        orders = [r.order for k in range(len(self.graph.op(source).outputs)) for r in self.readers.get(Ref(source, k), ()) if r.sure]
        return min(orders, default=len(self.graph.ops))

    def _dependent(self, source: str) -> list[str]:
        """Sources of the same unit that read its values to run."""
        units = self.formulation.units
        return [name for k in range(len(self.graph.op(source).outputs)) for name, i in self.graph.users.get(Ref(source, k), ())
                if is_source(self.graph.op(name)) and units.index(name) == units.index(source) and Ref(source, k) not in self.graph.op(name).kept]

    def _least_on(self, root: Ref, last: Reader) -> np.ndarray:
        """Per strategy of the value's unit, the least bytes that it has on the way to its last reader; 0 where it is nowhere."""
        own, reads = self._once(("least", root, last.op), lambda: self._on_path(root, last.path))
        return np.minimum(own, reads.min())

    def _on_path(self, root: Ref, path: Iterable[tuple[Ref, str, int]], reader: int = -1) -> tuple[np.ndarray, np.ndarray]:
        """(per strategy of the value's unit the least bytes in which it knows it to be on the path, 0 where it is nowhere; likewise for the unit
        `reader`, inf where that says nothing). What other units know is in both the least of all their strategies."""
        units, home = self.formulation.units, self.formulation.units.index(root.op)
        own = self._bytes(root, units.outputs(root))
        out, reads = own.copy(), np.full(len(units.units[reader]) if reader >= 0 else 1, np.inf)
        for ref, name, i in path:
            specs = units.outputs(ref) if i < 0 else units.inputs(name, i)
            amounts, unit = self._bytes(ref, specs), units.index(name)
            amounts = np.where(amounts > 0, amounts, np.inf)
            if i >= 0 and unit == home and _is_direct(root, path):
                amounts = np.where(self._view_of(root, specs)[np.arange(len(own)), specs.index], own, amounts)
            if self.graph.meta(ref).numel > self.graph.meta(root).numel or unit not in (home, reader):
                out = np.minimum(out, amounts.min(initial=np.inf))
            elif unit == home:
                out = np.minimum(out, amounts)
            else:
                reads = np.minimum(reads, amounts)
        return np.where(own > 0, out, 0.0), reads

    def _view_of(self, ref: Ref, held: SpecIndex) -> np.ndarray:
        """Per strategy of the value's unit and spec in which it is held, whether that is the buffer that was made: as it is, or a slice of it."""
        made, move, meta = self.formulation.units.outputs(ref), self.formulation.table.redistribution, self.graph.meta(ref)

        def is_view(own: Spec, spec: Spec) -> bool:
            if own == spec or NOWHERE in own or NOWHERE in spec or not np.isfinite(move.seconds(meta.logical_shape, meta.dtype, own, spec)):
                return own == spec
            return all(step.kind == SLICE for step in move.steps(meta.logical_shape, meta.dtype, own, spec))

        views = np.array([[is_view(own, spec) for spec in held.specs] for own in made.specs])[made.index]
        op = self.graph.op(ref.op)
        kept = [self._bytes(value, self.formulation.units.inputs(op.name, op.refs.index(value))) for value in op.kept]
        return views & (sum(kept) == 0)[:, None] if kept else views  # who reads what a source keeps reads it as forward left it

    @cached_property
    def _homes(self) -> Mapping[Ref, Ref]:
        return {root: self._home(root) for root in self._all_readers}

    def _home(self, root: Ref) -> Ref:
        """The value of forward that a recompute source stands for, where it may keep it; else the value itself."""
        op = self.graph.op(root.op)
        value = Ref(op.kept[0].op, root.index) if is_source(op) and op.kept else root
        return storage_root(self.graph, value) if value in op.kept else root


def _is_direct(root: Ref, path: Iterable[tuple[Ref, str, int]]) -> bool:
    """Whether the reader reads the value itself, and no view of it that an op makes."""
    return all(ref == root for ref, _, _ in path)


def _least_of(amounts: np.ndarray) -> float:
    return float(amounts[amounts > 0].min(initial=np.inf))
