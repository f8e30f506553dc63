"""What one op, or one redistribution, allocates and frees on a rank: found by lowering it alone.

Nothing is estimated. The op is written by the same emitter that writes the real program, on fake tensors, and storages are
followed through views. Equal ops on tensors of equal strides are written once, so a model of equal layers costs
little more than one layer. Only of a submodule that runs whole (program/opaque/opaque.py), of attention whose queries are split, and
of experts' matmuls (experts/ops.py) the inside is an estimate.
"""
from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from autoshard import _torch
from autoshard.base.graph import Call, Op, TensorMeta
from autoshard.base.mesh import Mesh
from autoshard.base.plan import OpPlan
from autoshard.base.spec import local_tensor_shape, shard_counts
from autoshard.collectives import KIND_OF
from autoshard.cost.cluster import Cluster
from autoshard.experts import ops as experts
from autoshard.lower.emit import Emitter, Part
from autoshard.lower.lifetimes import Lifetimes, storages, tensors
from autoshard.lower.lower import emit_op
from autoshard.lower.overwrite_table import others, swaps, takers
from autoshard.lower.schedule import Instruction
from autoshard.program.opaque.opaque import opaque_of
from autoshard.rules.ops import causal_rows, embedding_bag, rms_norm

Strides = tuple[int, ...]


@dataclass(frozen=True)
class Piece:
    """One call of the local program: bytes of each new buffer, then what is dropped after it. Buffers count from
    0 in the order they are made; ~i stands for the footprint's input i. `over`: buffers that die here, one of which the
    first new one may be instead where nobody else reads it, best first. `arriving`: the last new one is there only then."""

    makes: tuple[int, ...]
    drops: tuple[int, ...]
    over: tuple[int, ...] = ()
    arriving: bool = False


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
    """The footprints of one mesh on a cluster, made on first use."""

    mesh: Mesh
    cluster: Cluster
    _known: dict[Any, Footprint] = field(default_factory=dict)

    @cached_property
    def apart(self) -> frozenset[str]:
        """Mesh axes whose ranks are on several machines, taken to be what the innermost link joins: between them CPUs send messages."""
        return frozenset(name for name, link in zip(self.mesh.names, self.cluster.links_for(self.mesh), strict=True)
                         if any(level is not self.cluster.links[0] for level, _ in link.levels))

    def of_op(self, op: Op, call: Call, chosen: OpPlan, strides: Sequence[Strides]) -> Footprint:
        """Raises what lowering the op raises."""
        key = (call, chosen, tuple(strides))
        if key not in self._known:
            self._known[key] = self._op(op, call, chosen, strides)
        return self._known[key]

    def of_move(self, metas: Sequence[TensorMeta], instruction: Instruction, strides: Sequence[Strides]) -> Footprint:
        """Of a `redistribute` instruction."""
        key = tuple((m, own.spec, new.spec, st) for m, own, new, st in zip(metas, instruction.reads, instruction.writes, strides, strict=True))
        if key not in self._known:
            self._known[key] = self._move(metas, instruction, strides)
        return self._known[key]

    def _op(self, op: Op, call: Call, chosen: OpPlan, strides: Sequence[Strides]) -> Footprint:
        emit = Emitter(self.mesh)
        inputs = [emit.placeholder("x", local_tensor_shape(m, s, self.mesh), m.dtype, st)
                  for m, s, st in zip(call.inputs, chosen.inputs, strides, strict=True)]
        with emit.part(Part("compute", op.name, op.phase)):
            results = emit_op(emit, op, call, chosen, inputs)[1]
        kept = [None if meta is None else r for meta, r in zip(call.outputs, results, strict=True)]
        return _read(emit, inputs, kept, None, self.apart)

    def _move(self, metas: Sequence[TensorMeta], instruction: Instruction, strides: Sequence[Strides]) -> Footprint:
        emit = Emitter(self.mesh)
        given, prepared = [], []
        with emit.part(Part("redistribute", "", "forward")):
            for meta, own, steps, st in zip(metas, instruction.reads, instruction.steps, strides, strict=True):
                given.append(emit.placeholder("x", local_tensor_shape(meta, own.spec, self.mesh), meta.dtype, st))
                prepared.append(emit.prepare(given[-1], meta, shard_counts(meta.ndim, own.spec, self.mesh.sizes), steps))
            pending = emit.issue(prepared)
            issued = set(emit.graph.nodes)
            results = [emit.complete(pending, i) for i in range(len(prepared))]
        return _read(emit, given, results, issued, self.apart)


def _read(emit: Emitter, inputs: Sequence[Any], results: Sequence[Any], issued: Container[torch.fx.Node] | None,
          apart: frozenset[str]) -> Footprint:
    """The footprint of a finished local graph. A variable lives until the last call that reads it, a buffer as long as
    some variable looks at it: that is how the generated code runs. `issued`: nodes that run before what is waited for, None for all; of a
    tensor of size 0, of which nothing is sent, the last of them may be gone."""
    lives = Lifetimes.of(emit.finish([r for r in results if r is not None]))
    nodes = [n for n in lives.graph.nodes if n.op == "call_function"]
    buffers = {key: ~i for i, x in enumerate(inputs) for key in storages(x.node)}
    makes: list[tuple[int, ...]] = []
    last: dict[int, int] = {}
    for node in nodes:
        first, made = sum(map(len, makes)), []
        for tensor in tensors(node):
            if _torch.storage_key(tensor) not in buffers:
                buffers[_torch.storage_key(tensor)] = first + len(made)
                made.append(tensor.untyped_storage().nbytes())
        if _is_swap(node, emit.mesh, apart):
            last[first + 1] = lives.position[next(iter(node.users))]
            made.append(made[0])
        if inside := _inside(node):
            last[first + len(made)] = lives.position[node]
            made.append(inside)
        makes.append(tuple(made))
    last |= {buffers[key]: end for key, end in lives.last_read.items()}
    pieces = []
    for i, node in enumerate(nodes):
        drops = tuple(b for b, end in last.items() if end == i)
        over = tuple(b for b in _over(node, buffers) if b in drops) if makes[i] else ()
        pieces.append(Piece(makes[i], drops, over, _is_swap(node, emit.mesh, apart)))
    outputs = tuple(None if r is None else Output(buffers[next(storages(r.node))], emit.value(r).stride()) for r in results)
    return Footprint(tuple(pieces), outputs, len(nodes) if issued is None else sum(node in issued for node in nodes))


def _inside(node: torch.fx.Node) -> int:
    """Bytes that a node takes while it runs and that no other node sees."""
    if (whole := opaque_of(node)) is not None:
        return whole.workspace
    args = torch.fx.node.map_arg(node.args, lambda n: n.meta["val"])
    return sum(ops.workspace(node.target, args) for ops in (causal_rows, embedding_bag, experts, rms_norm))


def _over(node: torch.fx.Node, buffers: Mapping[int, int]) -> Iterator[int]:
    """Buffers that the eager backend may write the node's result to, as far as can be seen here."""
    for k in takers(node):
        mine = buffers[next(storages(node.args[k]))]
        if mine not in (buffers[key] for other in others(node, k) for key in storages(other)):
            yield mine


def _is_swap(node: torch.fx.Node, mesh: Mesh, apart: frozenset[str]) -> bool:
    """Whether an all-reduce, made in place, takes a second buffer until it is waited for."""
    if node.target not in KIND_OF or KIND_OF[node.target].holds_input:
        return False
    axes = mesh.axes(str(node.args[-1]).removeprefix("axis:"))
    return not apart.isdisjoint(mesh.names[a] for a in axes) and swaps(mesh.ranks(axes), node.meta["val"].untyped_storage().nbytes())

