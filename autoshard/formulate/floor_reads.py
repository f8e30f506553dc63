"""Of floor rows (`floor_rows.py`): what their op reads and makes, and what it needs to make it.

An op reads slices of values as views of them, so that the values lie there. What brings a value from how it was made to how the op reads it runs
right before the op, if no other op reads the value before: then what that needs counts where it is more than what the op does.
"""
from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from autoshard.base.graph import Op, Ref
from autoshard.base.plan import OpPlan
from autoshard.base.spec import NOWHERE, Spec, local_tensor_shape
from autoshard.formulate.floor_values import FloorValues
from autoshard.formulate.floor_weights import exact_near
from autoshard.formulate.memory_rows import Amounts
from autoshard.formulate.values import storage_root
from autoshard.lower.schedule import Held, Instruction
from autoshard.play.footprint import Footprint
from autoshard.program.flow import gradient_bound, param_derived
from autoshard.recompute.rewrite import is_source

More = tuple[tuple[int, int], np.ndarray]
"""Two nodes, and bytes per pair of their strategies."""


@dataclass(eq=False)
class FloorReads(FloorValues):
    """What of floor rows is a matter of the op itself."""

    def _own(self, op: Op, plan: np.ndarray, alone: bool) -> Iterator[Amounts]:
        """What the op needs, and beyond that, exact near `plan`, what else lies there where it reads slices, or what a move before it needs. `alone`:
        as in `Floors.amounts`."""
        node, pieces = self.formulation.units.index(op.name), self._pieces(op)
        asked = [int(plan[node])] if alone else range(len(self.formulation.units.units[node]))
        most, there = self._once(("own", op.name, *asked), lambda: self._most(op, pieces, asked))
        yield node, most
        slices = [more for i, ref in enumerate(op.refs) if pieces.count(ref) == 1 and (more := self._sliced(op, i, there.get(ref))) is not None]
        moves = [more for i in range(len(op.refs)) if (more := self._moved(op, i, most, plan if alone else None)) is not None]
        first = max(moves, key=lambda more: _in_plan(more, plan), default=None)
        if first is not None and _in_plan(first, plan) > sum(_in_plan(more, plan) for more in slices):
            slices = [first]
        for nodes, more in slices:
            if nodes[0] == nodes[1]:
                yield nodes[0], more.diagonal()
            else:
                yield from exact_near(plan, nodes, more)

    def _sliced(self, op: Op, i: int, there: np.ndarray | None) -> More | None:
        """What a value is more than the slice of it that the op reads, while that is `there`, per strategy of its unit and of the op's. Slices with
        gaps do not count, for some ops copy them."""
        ref, units = op.refs[i], self.formulation.units
        if there is None or storage_root(self.graph, ref) != ref:
            return None
        made, held = units.outputs(ref), units.inputs(op.name, i)

        def beyond() -> np.ndarray:
            more = [[self._local(ref, a) - self._local(ref, b) if self._is_prefix(ref, a, b) else 0.0 for b in held.specs] for a in made.specs]
            return np.where(self._view_of(ref, held), np.array(more)[made.index], 0.0)

        more = self._once(("more", op.name, i), beyond)
        return ((units.index(ref.op), units.index(op.name)), more[:, held.index] * there) if more.any() else None

    def _is_prefix(self, ref: Ref, own: Spec, held: Spec) -> bool:
        """Whether a slice lies in the value without gaps."""
        if NOWHERE in own or NOWHERE in held:
            return False
        whole, part = (local_tensor_shape(self.graph.meta(ref), s, self.formulation.table.mesh) for s in (own, held))
        cut = [d for d, (n, m) in enumerate(zip(whole, part, strict=True)) if n != m]
        return all(n == 1 for n in part[:max(cut, default=0)])

    def _moved(self, op: Op, i: int, most: np.ndarray, plan: np.ndarray | None) -> More | None:
        """What the move of a value to where the op reads it needs more than the op, if it surely comes right before the op: the value is made in the
        window, no other op reads it before, and the op reads no parameters, for which there may be others. With a `plan`, of that one only."""
        ref, units, window = op.refs[i], self.formulation.units, self.graph.window_of(op.name)
        maker, now = self.graph.op(ref.op), self.graph.order[op.name]
        if maker.kind != "call" or is_source(maker) or self.graph.window_of(ref.op) != window or self._hideable.intersection(op.refs):
            return None
        if any(self.graph.order[name] < now and self.graph.window_of(name) == window or (name, k) != (op.name, i) and name == op.name
               for name, k in self.graph.users[ref]):
            return None
        made, held = units.outputs(ref), units.inputs(op.name, i)
        nodes = units.index(ref.op), units.index(op.name)
        if plan is None:
            needs = self._once(("moves", ref, op.name, i), lambda: np.array([[self._moving(ref, a, b) for b in held.specs] for a in made.specs]))
            more = np.maximum(needs[np.ix_(made.index, held.index)] - most, 0.0)
        else:
            one, other = plan[nodes[0]], plan[nodes[1]]
            more = np.zeros((len(made.index), len(held.index)))
            more[one, other] = max(0.0, self._moving(ref, made.specs[made.index[one]], held.specs[held.index[other]]) - most[other])
        return (nodes, more) if more.any() else None

    def _moving(self, ref: Ref, own: Spec, held: Spec) -> float:
        """The most bytes of a value and what brings it to another spec; 0 where nothing does."""
        meta, move = self.graph.meta(ref), self.formulation.table.redistribution
        if own == held or NOWHERE in own or NOWHERE in held or not np.isfinite(move.seconds(meta.logical_shape, meta.dtype, own, held)):
            return 0.0
        steps = tuple(move.steps(meta.logical_shape, meta.dtype, own, held))
        instruction = Instruction("redistribute", (Held(ref, own),), (Held(ref, held),), steps=(steps,))
        strides = _dense(local_tensor_shape(meta, own, self.formulation.table.mesh))
        return _peak(self.footprints.of_move([meta], instruction, [strides]), [self._local(ref, own)], [0])[0]

    @cached_property
    def _hideable(self) -> frozenset[Ref]:
        """Values whose moves may overlap compute."""
        return frozenset(param_derived(self.graph)) | frozenset(gradient_bound(self.graph))

    def _most(self, op: Op, pieces: Sequence[Ref], asked: Sequence[int]) -> tuple[np.ndarray, dict[Ref, np.ndarray]]:
        """(per strategy of the op's unit the most bytes that it needs at once; per piece of what it reads, whether that is there then), of the
        strategies that are `asked` for."""
        units, found = self.formulation.units, {}
        for i, (ref, piece) in enumerate(zip(op.refs, pieces, strict=True)):
            root = storage_root(self.graph, ref)
            if self.graph.op(root.op).kind == "call":
                amounts = self._bytes(ref, units.inputs(op.name, i))
                if self.graph.meta(ref).numel > self.graph.meta(root).numel:  # expanded
                    amounts = np.minimum(amounts, self._least(root))
                found[piece] = np.maximum(found[piece], amounts) if piece in found else amounts
        place = [list(found).index(p) if p in found else None for p in pieces]
        count = len(units.units[units.index(op.name)])
        most, there = np.zeros(count), {p: np.zeros(count, bool) for p in found}
        for s in asked:
            most[s], then = self._work(op, s, [found[p][s] for p in found], place)
            for k, p in enumerate(found):
                there[p][s] = k in then
        return most, there

    def _pieces(self, op: Op) -> list[Ref]:
        """Per tensor that the op reads, what it is a view of: the value, or where all that the op reads of the value are parts into which it was
        split, the part. Parts lie in the value's buffer, or each in one of its own."""
        roots, parts = [storage_root(self.graph, ref) for ref in op.refs], [self._part(ref) for ref in op.refs]
        split = {root: {part.op for r, part in zip(roots, parts, strict=True) if r == root} for root in roots}
        return [part if len(split[root]) == 1 else root for root, part in zip(roots, parts, strict=True)]

    def _part(self, ref: Ref) -> Ref:
        """The part of a value that was split into several, of which the tensor is a view; the value itself where it was not."""
        root = storage_root(self.graph, ref)
        while ref != root and len(self.graph.op(ref.op).outputs) == 1:
            ref = self.graph.op(ref.op).refs[0]
        return ref

    def _work(self, op: Op, strategy: int, inputs: Sequence[float], place: Sequence[int | None]) -> tuple[float, frozenset[int]]:
        """(the most bytes that the op needs at once: what it reads, as long as it does, and what it makes; which of `inputs` are there then).
        `place`: per tensor that it reads, which of `inputs` that is."""
        table, call = self.formulation.table, self.graph.calls[op.name]
        chosen = OpPlan(*table.strategies[op.name].strategy(int(self.formulation.units.picked(op.name)[strategy])))
        strides = [_dense(local_tensor_shape(m, s, table.mesh)) for m, s in zip(call.inputs, chosen.inputs, strict=True)]
        footprint = self.footprints.of_op(op, call, chosen, strides)
        return _peak(footprint, inputs, place)

    def _least(self, ref: Ref) -> float:
        amounts = self._bytes(ref, self.formulation.units.outputs(ref))
        return float(amounts[amounts > 0].min(initial=np.inf)) if (amounts > 0).any() else 0.0


def _in_plan(more: More, plan: np.ndarray) -> float:
    nodes, amounts = more
    return float(amounts[plan[nodes[0]], plan[nodes[1]]])


def _peak(footprint: Footprint, inputs: Sequence[float], place: Sequence[int | None]) -> tuple[float, frozenset[int]]:
    """(the most bytes that are there at once, with the `inputs`, as long as they are read; which of these are there then). `place`: per input of the
    footprint, which of `inputs` it is."""
    readers, made = Counter(place), []
    alive = most = sum(inputs)
    there = frozenset(range(len(inputs)))
    for piece in footprint.pieces:
        makes = (0, *piece.makes[1:]) if piece.over else (*piece.makes[:-1], 0) if piece.arriving else piece.makes
        made += makes
        alive += sum(makes)
        if alive > most:
            most, there = alive, frozenset(k for k in range(len(inputs)) if readers[k])
        for b in piece.drops:
            if b >= 0:
                alive -= made[b]
            elif place[~b] is not None:
                readers[place[~b]] -= 1
                alive -= 0.0 if readers[place[~b]] else inputs[place[~b]]
    return most, there


def _dense(shape: Sequence[int]) -> tuple[int, ...]:
    strides, step = [], 1
    for n in reversed(shape):
        strides.append(step)
        step *= max(n, 1)
    return tuple(reversed(strides))
