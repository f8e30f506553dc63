"""The program as frozen data: ops in execution order, values referred to by (op name, output index).

Everything the planner needs of a model is here; nothing refers to FX nodes, so graphs hash, compare
and travel. `call_of` gives rules a name-free view of one op, so equal ops share all later work.
"""
from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod
from typing import Any, Literal

import torch

from autoshard.base.checked import CHECKED
from autoshard.base.roles import Role
from autoshard.base.windows import ONCE, START

Phase = str
"""Name of the window that an op runs in."""
FORWARD, BACKWARD = "forward", "backward"
"""The windows of a training step; inference has the first."""
EARLY = (START, FORWARD)
"""Windows before the loss."""
Kind = Literal["param", "buffer", "input", "tangent", "call", "output"]

KEPT = "kept"
"""Keyword of a source."""
PORT = "port"
"""Keyword of an input, tangent or output where a stage of a pipeline receives or sends a value."""
WEIGHT = "weight"
"""The window of a split backward that makes the gradients of parameters; what sends gradients to other stages stays in `BACKWARD`."""
LATE = (BACKWARD, WEIGHT)
"""The windows of backward."""


@dataclass(frozen=True)
class TensorMeta:
    """Shape and dtype of a value. `factors[d]` are the logical dims that tensor dim d is made of,
    major first; `(n,)` for an ordinary dim. Specs refer to logical dims, numbered across dims. `part_dims`: logical dims that
    count the parts of a dim (q|k|v); they are never split, so a shard of such a dim takes its share of every part. `unpadded`: the
    shape that users see of a parameter, and of its gradient, where dims are longer in the graph so that they split evenly; what is
    beyond it is zero. () where nothing is padded."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    factors: tuple[tuple[int, ...], ...] = ()
    part_dims: tuple[int, ...] = field(default=(), repr=False)
    unpadded: tuple[int, ...] = field(default=(), repr=False)

    def __post_init__(self) -> None:
        if not self.factors and self.shape:
            object.__setattr__(self, "factors", tuple((n,) for n in self.shape))
        if tuple(prod(f) for f in self.factors) != self.shape:
            raise ValueError(f"factors {self.factors} do not multiply to the shape {self.shape}")

    @property
    def true_shape(self) -> tuple[int, ...]:
        """The shape without what it is padded by."""
        return self.unpadded or self.shape

    @cached_property
    def logical_shape(self) -> tuple[int, ...]:
        return tuple(n for f in self.factors for n in f)

    @property
    def ndim(self) -> int:
        """Number of logical dims."""
        return len(self.logical_shape)

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize

    @property
    def is_flat(self) -> bool:
        """Whether some tensor dim has several factors."""
        return any(len(f) > 1 for f in self.factors)

    def logical_dims(self, dim: int) -> range:
        """Logical dims of tensor dim `dim` (negative counts from the end); none of a 0-dim tensor, of which torch
        accepts dim 0 and -1."""
        if not self.factors:
            return range(0)
        dim %= len(self.factors)
        start = sum(len(f) for f in self.factors[:dim])
        return range(start, start + len(self.factors[dim]))

    def tensor_dim(self, logical: int) -> int:
        """The tensor dim that a logical dim belongs to."""
        return next(d for d in range(len(self.factors)) if logical in self.logical_dims(d))

    def parts_of(self, dim: int) -> int:
        """How many parts tensor dim `dim` consists of; 1 for one that is no row of parts."""
        return next((self.logical_shape[i] for i in self.logical_dims(dim) if i in self.part_dims), 1)

    def split_dim(self, dim: int) -> int:
        """The logical dim that a shard of tensor dim `dim` splits: its major one, behind the number of its parts."""
        return next(i for i in self.logical_dims(dim) if i not in self.part_dims)

    def on_tensor_dims(self, spec: tuple[int, ...]) -> tuple[int, ...] | None:
        """`spec` with tensor dims in place of logical ones; None where a rank's piece is no block of its tensor dim, as where a minor factor
        is split, and for inner shards."""
        out = []
        for p in spec:
            if p >= self.ndim:
                return None
            dim = self.tensor_dim(p) if p >= 0 else p
            if p >= 0 and p != next(i for i in self.logical_dims(dim) if self.logical_shape[i] > 1 and i not in self.part_dims):
                return None
            out.append(dim)
        return tuple(out)

    def unflatten(self, logical: tuple[int, ...]) -> tuple[int, ...]:
        """Tensor shape for a (local) logical shape with the same factor structure."""
        out, i = [], 0
        for f in self.factors:
            out.append(prod(logical[i:i + len(f)]))
            i += len(f)
        return tuple(out)


@dataclass(frozen=True, order=True)
class Ref:
    """Output `index` of the op named `op`."""

    op: str
    index: int = 0

    def __str__(self) -> str:
        return self.op if self.index == 0 else f"{self.op}:{self.index}"


@dataclass(frozen=True)
class Slot:
    """Stands for tensor input `index` inside the args of a `Call`."""

    index: int


@dataclass(frozen=True)
class Call:
    """An op without names: what rules, costs and caches see. Hashable.

    `args`/`kwargs` are the op's arguments with tensors replaced by `Slot(i)` into `inputs`."""

    target: Any
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]
    inputs: tuple[TensorMeta, ...]
    outputs: tuple[TensorMeta | None, ...]

    @cached_property
    def _hash(self) -> int:
        return hash((str(self.target), self.args, self.kwargs, self.inputs, self.outputs))

    def __hash__(self) -> int:
        return self._hash

    def argument(self, name: str, default: Any = None) -> Any:
        """The value of a schema argument by name, positional or keyword; its default when absent."""
        for i, arg in enumerate(self.target._schema.arguments):
            if arg.name == name:
                if i < len(self.args):
                    return self.args[i]
                return dict(self.kwargs).get(name, arg.default_value if arg.has_default_value() else default)
        return default

    def given(self, name: str) -> TensorMeta | None:
        """The tensor passed for a schema argument; None where there is none."""
        value = self.argument(name)
        return self.inputs[value.index] if isinstance(value, Slot) else None

    def tensor(self, name: str) -> TensorMeta:
        """`given`, for an argument that is always a tensor."""
        found = self.given(name)
        assert found is not None, f"{self.target} was called without a tensor for {name}"
        return found

    def output(self, index: int = 0) -> TensorMeta:
        """Output `index`, where it is one that is always made."""
        found = self.outputs[index]
        assert found is not None, f"{self.target} makes no output {index}"
        return found


@dataclass(frozen=True)
class Op:
    """One step. `args` hold `Ref`s where the model passes tensors. Kinds other than "call":

    param / buffer   target = its qualified name          input     target = its name ("x", "input:0")
    tangent          target = index of the user output    output    target = an `Output`; one Ref in args

    `traced_at`: of a forward call its number in the trace, of a backward call that of the forward call whose gradient it takes part
    in (of its autograd node); -1 where there is none. It outlives ops that were simplified away.
    """

    name: str
    kind: Kind
    target: Any
    args: tuple[Any, ...] = ()
    kwargs: tuple[tuple[str, Any], ...] = ()
    outputs: tuple[TensorMeta | None, ...] = ()
    phase: Phase = "forward"
    module: str = ""
    source: str = ""
    code: str = ""
    traced_at: int = -1

    @cached_property
    def refs(self) -> tuple[Ref, ...]:
        """Tensor inputs in argument order (a tensor used twice appears twice)."""
        return tuple(iter_refs((self.args, tuple(v for _, v in self.kwargs))))

    @cached_property
    def kept(self) -> tuple[Ref, ...]:
        """Of a source (recompute/rewrite.py): the values of forward that it may keep; they come last in `refs`."""
        kept: tuple[Ref, ...] = dict(self.kwargs).get(KEPT, ())
        return kept

    @property
    def is_port(self) -> bool:
        """Whether another stage of a pipeline is at its other end: its placement is free, and tied to nothing here."""
        return any(key == PORT for key, _ in self.kwargs)

    def mapped(self, change: Callable[[Any], Any]) -> Op:
        """The op with every leaf of its arguments changed."""
        return replace(self, args=map_args(change, self.args), kwargs=tuple((k, map_args(change, v)) for k, v in self.kwargs))

    def reading(self, now: Callable[[Ref], Ref]) -> Op:
        """The op with other values to read."""
        return self.mapped(lambda leaf: now(leaf) if isinstance(leaf, Ref) else leaf)

    @property
    def where(self) -> str:
        """For messages: op, module path and the user's file:line."""
        place = " ".join(p for p in (f"in {self.module}" if self.module else "", f"at {self.source}" if self.source else "") if p)
        return f"{self.name} ({self.target}) {place}".strip()


def iter_refs(value: Any) -> Iterator[Ref]:
    if isinstance(value, Ref):
        yield value
    elif isinstance(value, (tuple, list)):
        for v in value:
            yield from iter_refs(v)


def map_args(fn: Callable[[Any], Any], value: Any) -> Any:
    """Apply `fn` to every leaf of nested tuples."""
    return tuple(map_args(fn, v) for v in value) if isinstance(value, tuple) else fn(value)


@dataclass(frozen=True)
class Window:
    """A part of a step that runs as one program: its name and its ops in execution order. What it makes and a later window
    reads is saved between them."""

    name: Phase
    ops: tuple[Op, ...]


@dataclass(frozen=True)
class Graph:
    """A forward graph, or a joint forward + backward graph, in execution order.

    `in_tree`/`out_tree` describe how the user calls the model (pytree specs as JSON text; see trace). `tied`: (alias, name
    that is kept) of parameters that are one tensor; `unused`: parameters that no op reads; `idle`: bytes of such parameters and of such
    buffers, which every rank has whole; `microbatches`: how often a step runs
    what is neither at its start nor at its end (see windows.py); `notes`: what the user should know of them."""

    ops: tuple[Op, ...]
    training: bool
    in_tree: str = ""
    out_tree: str = ""
    tied: tuple[tuple[str, str], ...] = ()
    unused: tuple[str, ...] = ()
    idle: tuple[int, int] = (0, 0)
    microbatches: int = 1
    notes: tuple[str, ...] = ()

    @cached_property
    def by_name(self) -> dict[str, Op]:
        return {op.name: op for op in self.ops}

    @cached_property
    def facts(self) -> dict[str, Any]:
        """What functions of the whole graph found out about it, by the function (program/flow.py)."""
        return {}

    @cached_property
    def order(self) -> dict[str, int]:
        """Position of every op by name."""
        return {op.name: i for i, op in enumerate(self.ops)}

    @cached_property
    def windows(self) -> tuple[Window, ...]:
        """What a step consists of, in order: the ops by the window they run in."""
        ops: dict[Phase, list[Op]] = {}
        for op in self.ops:
            ops.setdefault(op.phase, []).append(op)
        return tuple(Window(name, tuple(its)) for name, its in ops.items())

    @cached_property
    def window_index(self) -> dict[Phase, int]:
        """Position of every window by name."""
        return {w.name: i for i, w in enumerate(self.windows)}

    @cached_property
    def runs(self) -> tuple[int, ...]:
        """How often a step runs each window."""
        return tuple(1 if w.name in ONCE else self.microbatches for w in self.windows)

    def runs_of(self, phase: Phase) -> int:
        """How often a step runs the ops of a window."""
        return 1 if phase in ONCE else self.microbatches

    def window_of(self, name: str) -> int:
        """Position of the window in which the op runs."""
        return self.window_index[self.by_name[name].phase]

    def op(self, name: str) -> Op:
        return self.by_name[name]

    def meta(self, ref: Ref) -> TensorMeta:
        found = self.by_name[ref.op].outputs[ref.index]
        assert found is not None, f"{ref.op} makes no output {ref.index}"
        return found

    @cached_property
    def users(self) -> dict[Ref, tuple[tuple[str, int], ...]]:
        """Per value: (consumer op name, index into the consumer's refs), in execution order."""
        out: dict[Ref, list[tuple[str, int]]] = {}
        for op in self.ops:
            for i, ref in enumerate(op.refs):
                out.setdefault(ref, []).append((op.name, i))
        return {k: tuple(v) for k, v in out.items()}

    def of_kind(self, *kinds: Kind) -> tuple[Op, ...]:
        if kinds not in self._of_kind:
            self._of_kind[kinds] = tuple(op for op in self.ops if op.kind in kinds)
        return self._of_kind[kinds]

    @cached_property
    def _of_kind(self) -> dict[tuple[Kind, ...], tuple[Op, ...]]:
        """Answers of `of_kind`: some passes ask once per op."""
        return {}

    def outputs(self, role: Role) -> dict[str | int, Op]:
        """The output ops of one role by what they belong to (`Output.name`), in execution order."""
        return self._outputs.get(role, {})

    @cached_property
    def _outputs(self) -> dict[Role, dict[str | int, Op]]:
        found: dict[Role, dict[str | int, Op]] = {}
        for op in self.of_kind("output"):
            found.setdefault(op.target.role, {})[op.target.name] = op
        return found

    @cached_property
    def ties(self) -> dict[str, str]:
        """Op -> op that it lies as: a gradient as its parameter or input, a mutation as its buffer, a tangent as its output (where that is
        not in another stage of a pipeline)."""
        stored = {op.target: op.name for op in self.of_kind("param", "input", "buffer")}
        results = self.outputs(Role.USER)
        owned = [op for op in self.of_kind("output") if op.target.role is not Role.USER and op.target.name in stored]
        ties = {op.name: stored[op.target.name] for op in owned}
        return ties | {op.name: results[op.target].name for op in self.of_kind("tangent") if op.target in results}

    @cached_property
    def calls(self) -> dict[str, Call]:
        """The name-free view of every op of kind "call"."""
        return {op.name: self._call_of(op) for op in self.ops if op.kind == "call"}

    def _call_of(self, op: Op) -> Call:
        slots = iter(range(len(op.refs)))
        bare = op.mapped(lambda leaf: Slot(next(slots)) if isinstance(leaf, Ref) else leaf)
        return Call(op.target, bare.args, bare.kwargs, tuple(self.meta(r) for r in op.refs), op.outputs)

    @cached_property
    def hash(self) -> str:
        """Hex digest over everything that decides numerics and costs; not over source lines."""
        h = hashlib.sha256()
        for op in self.ops:
            args = op.args[:2] if op.target is CHECKED else op.args  # without what it says, which names source lines
            h.update(repr((op.name, op.kind, str(op.target), args, op.kwargs, op.outputs, op.phase)).encode())
        h.update(repr((self.training, self.in_tree, self.out_tree, self.tied)).encode())
        if parts := [(op.name, m.part_dims) for op in self.ops for m in op.outputs if m is not None and m.part_dims]:
            h.update(repr(parts).encode())
        if padded := [(op.name, m.unpadded) for op in self.ops for m in op.outputs if m is not None and m.unpadded]:
            h.update(repr(padded).encode())
        if self.microbatches > 1:
            h.update(f"{self.microbatches} micro-batches".encode())
        return h.hexdigest()[:32]
