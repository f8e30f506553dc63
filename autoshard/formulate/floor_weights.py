"""Of floor rows (`floor_rows.py`): bytes of stored tensors, of gradients of parameters, and of parameters that an op gathers."""
from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from autoshard.base.graph import Graph, Op, Ref
from autoshard.base.roles import Role
from autoshard.base.spec import NOWHERE, Spec
from autoshard.cost.memory import stored_parts
from autoshard.cost.redistribute import SLICE
from autoshard.formulate.copies import CopyNode
from autoshard.formulate.memory_rows import Amounts
from autoshard.formulate.problem_of import Formulation
from autoshard.formulate.values import local_bytes, storage_root
from autoshard.play.footprint import Footprints
from autoshard.program.flow import passed_on
from autoshard.space.strategies import SpecIndex


def exact_near(plan: np.ndarray, nodes: tuple[int, int], amounts: np.ndarray) -> Iterator[Amounts]:
    """Amounts of single nodes whose sum is never more than what two nodes load together, `amounts[i, j]`, and as much where the first does what it
    does in `plan`. `amounts` is inf where the two exclude each other. Single amounts may be negative."""
    here = amounts[plan[nodes[0]]]
    beyond = np.subtract(here, here.min(), out=np.zeros(len(here)), where=np.isfinite(here))
    yield nodes[1], beyond
    yield nodes[0], _finite((amounts - beyond).min(axis=1))


def _finite(amounts: np.ndarray) -> np.ndarray:
    return np.where(np.isfinite(amounts), amounts, 0.0)


@dataclass(eq=False)
class FloorWeights:
    """What of floor rows is a matter of stored tensors and inputs. `whole`: whether ranks are given whole inputs, else each its part."""

    formulation: Formulation
    footprints: Footprints
    whole: bool = False
    memo: dict = field(default_factory=dict)

    @property
    def graph(self) -> Graph:
        return self.formulation.table.graph

    @cached_property
    def copies_of(self) -> Mapping[Ref, list[CopyNode]]:
        out: dict[Ref, list[CopyNode]] = defaultdict(list)
        for copy in self.formulation.copies:
            out[copy.value].append(copy)
        return out

    def _gathered(self, op: Op) -> dict[str, tuple[float, np.ndarray]]:
        """Per parameter that the op may gather: the least bytes that it may be stored in, and per strategy of the op the bytes that it reads, where
        these are more. Such a reading is a copy, or the parameter is stored so. Both are counted once if what is stored in more than the least bytes
        is not (`_stored`). A copy for this op alone has a node that counts it."""
        units, found = self.formulation.units, {}
        for i, ref in enumerate(op.refs):
            root = storage_root(self.graph, ref)
            if self.graph.op(root.op).kind != "param" or root.op in found or self.graph.meta(ref).numel != self.graph.meta(root).numel:
                continue
            specs, least = units.inputs(op.name, i), min(self._local(root, s) for s in units.outputs(root).specs)
            alone = {c.spec for c in self.copies_of.get(ref, ()) if self._reads_alone(c, op)}
            read = np.array([0.0 if s in alone else self._local(ref, s) for s in specs.specs])[specs.index]
            if (read > least).any():
                found[root.op] = least, np.where(read > least, read, 0.0)
        return found

    def _reads_alone(self, copy: CopyNode, op: Op) -> bool:
        """Whether no other op of its window reads the copy."""
        return [name for name, _ in copy.readers if self.graph.op(name).phase == op.phase] == [op.name]

    def _stored(self, now: int, gathered: Mapping[str, tuple[float, np.ndarray]], plan: np.ndarray) -> Iterator[Amounts]:
        table, units = self.formulation.table, self.formulation.units
        made_before = {name: ref for name, ref in self.gradients.items() if self.graph.order[ref.op] < now}
        last = max(made_before.values(), key=lambda ref: self.graph.order[ref.op], default=None)
        flying = [ref for ref in made_before.values() if self._all_wait or ref.op == last.op]
        for op in self.graph.of_kind("param", "buffer"):
            specs = units.outputs(Ref(op.name))
            parts = self._once(("stored", op.name), lambda op=op, specs=specs: self._parts(op, specs))
            always, state, least = parts
            if op.name in gathered:
                own = self._bytes(Ref(op.name), specs)
                always = always - np.where(own > gathered[op.name][0], np.minimum(own, always), 0.0)
            amounts = always + state * table.strategies[op.name].on_device[units.picked(op.name)]
            arrived = op.name in made_before and made_before[op.name] not in flying
            yield units.index(op.name), amounts + least if arrived else amounts
        for op in self.graph.of_kind("input"):
            specs = units.outputs(Ref(op.name))
            yield units.index(op.name), np.full(len(specs.index), float(op.outputs[0].nbytes)) if self.whole else self._bytes(Ref(op.name), specs)
        for ref in flying:
            yield from self._flying(ref, plan)

    def _parts(self, op: Op, specs: SpecIndex) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        table = self.formulation.table
        optimizer = table.training.optimizer if op.name in table.trained else None
        parts = [stored_parts(op.outputs[0], s, table.mesh, optimizer) for s in specs.specs]
        least = self._least_gradient(op, specs)
        always, state = (np.array([p[c] for p in parts], dtype=float) for c in ("parameters", "optimizer"))
        return always[specs.index], state[specs.index], least[specs.index]

    @cached_property
    def _all_wait(self) -> bool:
        """Whether all gradients of parameters may be on their way at once: then none is waited for before backward ends."""
        most = [max(self._local(ref, s) for s in self.formulation.units.outputs(ref).specs) for ref in self.gradients.values()]
        return sum(most) <= self.formulation.table.training.on_their_way

    def _flying(self, ref: Ref, plan: np.ndarray) -> Iterator[Amounts]:
        """Of a gradient that is on its way: a collective that reduces it keeps what it sends until it is waited for. The last gradient made is not
        waited for before the next one is made."""
        units = self.formulation.units
        node, own, (first, *others) = units.index(ref.op), units.outputs(ref), self.graph.users[ref]
        sent = self._once(("sent", ref), lambda: self._sent(ref))
        reader = units.index(first[0])
        if others or reader == node:
            yield node, _finite(sent.min(axis=1))[own.index]
        else:
            yield from exact_near(plan, (node, reader), sent[np.ix_(own.index, units.inputs(*first).index)])

    def _sent(self, ref: Ref) -> np.ndarray:
        """Per spec that a gradient is made in and spec that a reader wants, the bytes that its last collective sends, or all of it where there is
        none; inf where it cannot be brought there."""
        units, meta, move = self.formulation.units, self.graph.meta(ref), self.formulation.table.redistribution
        wanted = tuple(dict.fromkeys(s for name, i in self.graph.users[ref] for s in units.inputs(name, i).specs))

        def sent(own: Spec, held: Spec) -> float:
            if NOWHERE in held or not np.isfinite(move.seconds(meta.logical_shape, meta.dtype, own, held)):
                return np.inf
            steps = move.steps(meta.logical_shape, meta.dtype, own, held)
            last = max((i for i, step in enumerate(steps) if step.kind != SLICE), default=0)
            return min(self._local(ref, own), self._local(ref, steps[last - 1].spec)) if last else self._local(ref, own)

        return np.array([[0.0 if NOWHERE in own else sent(own, held) for held in wanted] for own in units.outputs(ref).specs])

    @cached_property
    def gradients(self) -> dict[str, Ref]:
        """Per parameter op, the value that becomes its gradient, if no other gradient is made of it."""
        out, seen = {}, set()
        by_target = {op.target: op.name for op in self.graph.of_kind("param")}
        for name, op in self.graph.outputs(Role.GRADIENT).items():
            if name in by_target and op.refs:
                root = passed_on(self.graph, op.refs[0])[-1]
                if self.graph.op(root.op).kind == "call" and root not in seen:
                    out[by_target[name]] = root
                seen.add(root)
        return out

    @cached_property
    def _first_gradients(self) -> frozenset[Ref]:
        return frozenset(passed_on(self.graph, op.refs[0])[-1] for op in self.graph.outputs(Role.GRADIENT).values() if op.refs)

    def _least_gradient(self, op: Op, specs: SpecIndex) -> np.ndarray:
        """Per stored spec, the least bytes of the gradient from its first form to the stored one."""
        output = self.graph.outputs(Role.GRADIENT).get(op.target)
        if output is None or not output.refs:
            return np.zeros(len(specs.specs))
        chain, units = passed_on(self.graph, output.refs[0]), self.formulation.units
        if len({self.graph.meta(ref).numel for ref in chain}) > 1:
            return np.zeros(len(specs.specs))
        on_the_way = [local_bytes(self.formulation.table, ref, s) for ref in chain for s in units.outputs(ref).specs]
        on_the_way += [local_bytes(self.formulation.table, below, s) for ref, below in zip(chain, chain[1:], strict=False)
                       for s in units.inputs(ref.op, self.graph.op(ref.op).refs.index(below)).specs]
        least = min(on_the_way, default=0.0)
        return np.array([min(least, local_bytes(self.formulation.table, Ref(op.name), s)) for s in specs.specs])

    # --- bytes ---

    def _bytes(self, ref: Ref, specs: SpecIndex) -> np.ndarray:
        return np.array([self._local(ref, s) for s in specs.specs])[specs.index]

    def _local(self, ref: Ref, spec: Spec) -> float:
        if NOWHERE in spec:
            return 0.0
        meta = self.graph.meta(ref)
        return self._once(("bytes", meta.logical_shape, meta.dtype, spec), lambda: local_bytes(self.formulation.table, ref, spec))

    def _once(self, key: object, make):
        if key not in self.memo:
            self.memo[key] = make()
        return self.memo[key]
