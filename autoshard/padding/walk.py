"""Rewrites a graph op by op, so that chosen dims of parameters are padded in it, and stay so as far as ops are known to allow it.

An op that is not known (travel/) reads true values: what it reads is cut before it. So the result is right whatever the table lacks.
Dims that are cut on the way are `spilled`: whoever chose them may choose fewer (padded.py)."""
from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from autoshard.base.graph import Graph, Op, Ref, TensorMeta
from autoshard.base.roles import AS_STORED, Role
from autoshard.base.windows import hold_op
from autoshard.padding.site import FillWhereMade, Outcome, Site
from autoshard.padding.values import ANY, FINITE, LOWEST, Fill, Pad, Source, Value
from autoshard.rules import registry

aten = torch.ops.aten
Travel = Callable[[Site], Outcome | None]
"""How pads pass an op; None: it has to read true values."""
PADDED = "_padded"
"""How the names of ops end that pad what is read."""


@dataclass(eq=False)
class Walk:
    """`sources`: the length that dims of parameters are padded to; `travel_of`: how pads pass an op, by target; `read`: the length that dims of
    parameters and inputs (by the names of their ops) have where they are read, by an op that pads them; `fills`: by name, what products fill
    their last dim with.

    After `run`: `constants` of the new graph, and `spilled`, sources whose pads were cut before an op read them."""

    graph: Graph
    sources: Mapping[Source, int]
    travel_of: Callable[[Any], Travel | None]
    read: Mapping[Source, int] = field(default_factory=dict)
    fills: dict[str, Fill] = field(default_factory=dict)

    def run(self) -> Graph:
        while True:
            try:
                return self._once()
            except FillWhereMade:
                continue

    def _once(self) -> Graph:
        self.ops: list[Op] = []
        self.values: dict[Ref, Value] = {}
        self.written: dict[Any, Value] = {}
        self.makers: dict[Ref, Op] = {}
        self.came: dict[Ref, tuple[Value, Mapping[int, int]]] = {}
        self.constants: dict[str, torch.Tensor] = {}
        self.rows: dict[tuple[int, int, torch.dtype], str] = {}
        self.spilled: set[Source] = set()
        self.stored: dict[str, Mapping[int, Pad]] = {}
        self.waiting: dict[Ref, tuple[str, Mapping[int, int]]] = {}
        for op in self.graph.ops:
            {"param": self._param, "output": self._output, "call": self._call}.get(op.kind, self._keep)(op)
        rows = [self.makers[Ref(f"buffer:{name}")] for name in self.constants]
        return replace(self.graph, ops=alive((*rows, *self.ops), {op.name for op in rows}))

    def _keep(self, op: Op) -> None:
        self.put(op, [{} for _ in op.outputs])
        self._wait(op, op.name, {d: n for (name, d), n in self.read.items() if name == op.name})

    def _wait(self, op: Op, origin: str, lengths: Mapping[int, int]) -> None:
        if lengths:
            self.waiting[Ref(op.name)] = origin, lengths

    def _pad_where_read(self, op: Op) -> None:
        """What `op` reads of values that wait for it, padded by an op of its own: once, and for all who read them later."""
        for ref in dict.fromkeys(r for r in op.refs if r in self.waiting):
            (origin, lengths), value = self.waiting.pop(ref), self.values[ref]
            pads = {d: Pad(value.shape[d], n, 0.0, frozenset({(origin, d)})) for d, n in lengths.items()}
            behind = tuple(x for d in reversed(range(len(value.shape))) for x in (0, lengths.get(d, value.shape[d]) - value.shape[d]))
            meta = TensorMeta(longer(value.shape, pads), value.dtype)
            name = f"{ref.op.replace(':', '_')}{PADDED}"
            self.put(replace(op, name=name, target=aten.constant_pad_nd.default, args=(ref, behind, 0), kwargs=(), outputs=(meta,)), [pads])
            self.values[ref] = self.values[Ref(name)]

    def _repeat_for_pads(self, site: Site, value: Value) -> None:
        """What is repeated for every row of the inputs (types of tokens, a first token) is for those of the pad, too."""
        rows = next((Pad(op.outputs[0].shape[0], n, FINITE, frozenset({(name, 0)})) for (name, d), n in self.read.items()
                     if (op := self.graph.op(name)).kind == "input" and op.outputs[0] is not None), None)
        if rows is not None and value.shape and value.shape[0] == rows.true and 0 not in value.pads and site.is_new(site.op, 0):
            self.values[value.ref] = site.lengthened(value, 0, rows)

    def _param(self, op: Op) -> None:
        (meta,) = op.outputs
        assert meta is not None, f"{op.name} has no tensor"
        pads = {d: Pad(n, self.sources[op.target, d], 0.0, frozenset({(op.target, d)}))
                for d, n in enumerate(meta.shape) if (op.target, d) in self.sources}
        self.stored[op.target] = pads
        padded = TensorMeta(longer(meta.shape, pads), meta.dtype, unpadded=meta.shape if pads else ())
        self.put(replace(op, outputs=(padded,)), [pads])
        self._wait(op, op.name, {d: n for (name, d), n in self.read.items() if name == op.name})

    def _call(self, op: Op) -> None:
        if op.target is hold_op() or registry.is_cast(op):  # narrower, and still what the ranks store
            self._wait(op, *self.waiting.get(op.refs[0], ("", {})))
        else:
            self._pad_where_read(op)
        values = [self.values[ref] for ref in op.refs]
        site = Site(self, op, values)
        travel = self.travel_of(op.target) if op.name in self.fills or any(v.pads for v in values) else None
        outcome = travel(site) if travel is not None else None
        if outcome is None or not site.write(outcome):
            done = site.write(Outcome([site.cut(v) for v in values], [{} for _ in op.outputs]))
            assert done, f"{op.where} does not have the shapes that were traced"
        self._settle(site)

    def _settle(self, site: Site) -> None:
        """A number per row that may be none in the pad (the scale of a norm) gets one: what is made of it has numbers again, for little."""
        ref = Ref(site.op.name)
        value = self.values.get(ref)
        if value is None:
            return
        if site.op.target is aten.expand.default and site.op.phase == "forward":
            self._repeat_for_pads(site, value)
        elif value.shape and value.shape[-1] == 1:
            for dim in [d for d, p in value.pads.items() if p.fill == ANY]:
                self.values[ref] = site.filled(self.values[ref], dim, 0.0)

    def _output(self, op: Op) -> None:
        if not op.refs:
            self.ops.append(op)
            return
        site, value = Site(self, op, []), self.values[op.refs[0]]
        pads = self.stored.get(op.target.name, {}) if op.target.role in AS_STORED else {}
        for dim, pad in pads.items():
            value = site.filled(site.lengthened(value, dim, pad), dim, 0.0)
        for dim in [d for d in value.pads if d not in pads]:
            where_read = {name for name, _ in value.pads[dim].sources} <= {name for name, _ in self.read}
            value = site.cut(value, [dim], spills=op.target.role is not Role.USER and not where_read)
        self.ops.append(op.reading(lambda _: value.ref))

    def put(self, op: Op, pads: Sequence[Mapping[int, Pad]]) -> None:
        """Add an op whose outputs have these pads."""
        self.ops.append(op)
        for i, (meta, its) in enumerate(zip(op.outputs, pads, strict=True)):
            if meta is not None:
                ref = Ref(op.name, i)
                self.values[ref] = Value(ref, meta.shape, meta.dtype, its)
                self.makers[ref] = op

    def constant(self, n: int, length: int, dtype: torch.dtype) -> Value:
        """A row of `length`: of bools, whether a position is behind the first `n`; of numbers, 0 before and -inf behind."""
        name = self.rows.setdefault((n, length, dtype), self._row_name(n, length, dtype))
        ref = Ref(f"buffer:{name}")
        if name not in self.constants:
            behind = torch.arange(length) >= n
            self.constants[name] = behind if dtype is torch.bool else torch.zeros(length, dtype=dtype).masked_fill(behind, LOWEST)
            self.makers[ref] = Op(ref.op, "buffer", name, outputs=(TensorMeta((length,), dtype),), phase=self.graph.ops[0].phase)
            self.values[ref] = Value(ref, (length,), dtype)
        return self.values[ref]

    def _row_name(self, n: int, length: int, dtype: torch.dtype) -> str:
        """The same for a program and its twin in float64."""
        if dtype is torch.bool:
            return f"_pad_{n}_{length}"
        before = sum(row[:2] == (n, length) and row[2] is not torch.bool for row in self.rows)
        return f"_lowest_{n}_{length}" + (f"_{before}" if before else "")


def longer(shape: Sequence[int], pads: Mapping[int, Pad]) -> tuple[int, ...]:
    """A true shape with the padded lengths."""
    return tuple(pads[d].length if d in pads else n for d, n in enumerate(shape))


def alive(ops: Sequence[Op], rows: Collection[str] = ()) -> tuple[Op, ...]:
    """Without calls, and `rows`, that nothing reads."""
    read: set[str] = set()
    kept = []
    for op in reversed(ops):
        if op.name in read or op.kind != "call" and op.name not in rows:
            kept.append(op)
            read |= {ref.op for ref in op.refs}
    return tuple(reversed(kept))
