"""What one op, or one redistribution, allocates and frees on a rank: found by lowering it alone.

Nothing is estimated. The op is written by the same emitter that writes the real program, on fake tensors, and storages are
followed through views. Equal ops on tensors of equal strides are written once, so a model of equal layers costs
little more than one layer. Only of a submodule that runs whole (whole.py) the inside is an estimate.
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from autoshard import _torch
from autoshard.emit import Emitter, Part
from autoshard.graph import Call, Op, TensorMeta
from autoshard.lower import emit_op, local_tensor_shape
from autoshard.mesh import Mesh
from autoshard.plan import OpPlan
from autoshard.schedule import Instruction
from autoshard.spec import shard_counts
from autoshard.whole import whole_of

Strides = tuple[int, ...]
HOLDS_INPUT = tuple(target for kind, target in _torch.COLLECTIVES.items() if kind != "all_reduce")
"""Collectives in flight keep the tensor they send alive; all_reduce works on a copy of its own."""


@dataclass(frozen=True)
class Piece:
    """One call of the local program: bytes of each new buffer, then what is dropped after it. Buffers count from
    0 in the order they are made; ~i stands for the footprint's input i."""

    makes: tuple[int, ...]
    drops: tuple[int, ...]


@dataclass(frozen=True)
class Output:
    """A result: the buffer it lies in (~i: that of input i) and its strides."""

    buffer: int
    strides: Strides


@dataclass(frozen=True)
class Footprint:
    """`pieces[:started]` run when a redistribution is issued, the rest when it is waited for. Inputs that no piece
    drops are not touched; an absent output is None."""

    pieces: tuple[Piece, ...]
    outputs: tuple[Output | None, ...]
    started: int


@dataclass(eq=False)
class Footprints:
    """The footprints of one mesh, made on first use."""

    mesh: Mesh
    _known: dict[Any, Footprint] = field(default_factory=dict)

    def of_op(self, op: Op, call: Call, chosen: OpPlan, strides: Sequence[Strides]) -> Footprint:
        """Raises what lowering the op raises."""
        key = (call, chosen, tuple(strides))
        if key not in self._known:
            self._known[key] = self._op(op, call, chosen, strides)
        return self._known[key]

    def of_move(self, meta: TensorMeta, instruction: Instruction, strides: Strides) -> Footprint:
        """Of a `redistribute` instruction."""
        own = instruction.reads[0].spec
        key = (meta, own, instruction.writes[0].spec, strides)
        if key not in self._known:
            self._known[key] = self._move(meta, own, instruction.steps, strides)
        return self._known[key]

    def _op(self, op: Op, call: Call, chosen: OpPlan, strides: Sequence[Strides]) -> Footprint:
        emit = Emitter(self.mesh)
        inputs = [emit.placeholder("x", local_tensor_shape(m, s, self.mesh), m.dtype, st)
                  for m, s, st in zip(call.inputs, chosen.inputs, strides, strict=True)]
        with emit.part(Part("compute", op.name, op.phase)):
            results = emit_op(emit, op, call, chosen, inputs)[1]
        kept = [None if meta is None else r for meta, r in zip(call.outputs, results, strict=True)]
        return _read(emit, inputs, kept, None)

    def _move(self, meta: TensorMeta, own: Any, steps: Sequence[Any], strides: Strides) -> Footprint:
        emit = Emitter(self.mesh)
        x = emit.placeholder("x", local_tensor_shape(meta, own, self.mesh), meta.dtype, strides)
        with emit.part(Part("redistribute", "", "forward")):
            pending = emit.redistribute(x, meta, shard_counts(meta.ndim, own, self.mesh.sizes), steps)
            started = pending.started.node
            result = emit.complete(pending)
        return _read(emit, [x], [result], started)


def _read(emit: Emitter, inputs: Sequence[Any], results: Sequence[Any], started: torch.fx.Node | None) -> Footprint:
    """The footprint of a finished local graph. A variable lives until the last call that reads it, a buffer as long as
    some variable looks at it: that is how the generated code runs."""
    graph = emit.finish([r for r in results if r is not None])
    nodes = [n for n in graph.nodes if n.op == "call_function"]
    at = {n: i for i, n in enumerate(nodes)}
    storages: dict[int, int] = {}
    for i, x in enumerate(inputs):
        storages[_storage(emit.value(x))] = ~i
    makes: list[tuple[int, ...]] = []
    for node in nodes:
        made = []
        for tensor in _tensors(node.meta["val"]):
            if _storage(tensor) not in storages:
                storages[_storage(tensor)] = sum(map(len, makes)) + len(made)
                made.append(tensor.untyped_storage().nbytes())
        if (whole := whole_of(node)) is not None:
            storages[-id(node)] = sum(map(len, makes)) + len(made)
            made.append(whole.workspace)
        makes.append(tuple(made))
    last: dict[int, int] = {}
    for node in (n for n in graph.nodes if n.op in ("placeholder", "call_function")):
        end = max((len(nodes) if u.op == "output" else _until(u, at) for u in node.users), default=at.get(node, -1))
        for tensor in _tensors(node.meta["val"]):
            buffer = storages[_storage(tensor)]
            last[buffer] = max(last.get(buffer, -1), end)
    last.update({storages[-id(n)]: i for i, n in enumerate(nodes) if -id(n) in storages})
    drops = [tuple(b for b, end in last.items() if end == i) for i in range(len(nodes))]
    outputs = tuple(None if r is None else Output(storages[_storage(emit.value(r))], emit.value(r).stride()) for r in results)
    return Footprint(tuple(map(Piece, makes, drops)), outputs, len(nodes) if started is None else at.get(started, -1) + 1)


def _until(user: torch.fx.Node, at: dict[torch.fx.Node, int]) -> int:
    """Where a reader lets go of what it reads: a collective in flight only when it is waited for."""
    if user.target in HOLDS_INPUT:
        return max([at[user], *(at[u] for u in user.users if u in at)])
    return at[user]


def _tensors(value: Any) -> list[torch.Tensor]:
    return [t for t in (value if isinstance(value, (tuple, list)) else (value,)) if isinstance(t, torch.Tensor)]


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata
