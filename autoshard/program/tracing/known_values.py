"""Values of a trace that depend on shapes and constants only. Code may read them: they are computed while tracing.

Example: a model that makes a mask of ones and calls `mask.all()` takes the same branch at every call, so the graph is valid.
"""
from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from autoshard import _torch
from autoshard.base.graph import Op, Ref, map_args
from autoshard.program.taken import dense_buffers
from autoshard.program.tracing.tape import Tape, is_random

ASKED = (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.equal.default)
SMALL = 64
"""Largest number of elements of a buffer that is looked at."""
LARGEST = 1 << 26
"""Largest number of elements of a value that is computed while tracing."""


@dataclass(eq=False)
class Constants:
    """Answers reads of data during a trace. `otherwise` is called where the data depends on parameters, inputs or random numbers. `buffers`:
    those of the model that may be looked at (`small_buffers`), while they are `as_stored`; `assumed`: which of them were, whose values the
    program must find again."""

    tape: Tape
    otherwise: Callable[[Any, Any], Any] | None = None
    buffers: Mapping[str, torch.Tensor] = field(default_factory=dict)
    as_stored: Callable[[str], bool] = lambda name: True
    assumed: set[str] = field(default_factory=set)
    _read: int = 0
    _makers: dict[str, Op] = field(default_factory=dict)
    _values: dict[str, tuple[Any, ...]] = field(default_factory=dict)

    def __call__(self, op: Any, args: tuple[Any, ...]) -> Any:
        """The number or truth value that `op` reads, or NotImplemented."""
        values = self._values_of([self.tape.find(a) for a in args]) if op in ASKED else None
        if values is None:
            return NotImplemented if self.otherwise is None else self.otherwise(op, args)
        with _torch.no_modes(), torch.no_grad():
            return op(*values)

    def value_of(self, t: torch.Tensor) -> torch.Tensor | None:
        """The values of a tensor in the model's code, where they are known."""
        held = _torch.from_fun(t)
        if not isinstance(held, _torch.FakeTensor):
            return None if held.is_meta else held
        values = self._values_of([self.tape.find(held)])
        return None if values is None else values[0]

    def _values_of(self, refs: Sequence[Ref | None]) -> list[Any] | None:
        self._look_at_new_ops()
        if not all(ref is not None and ref.op in self._makers for ref in refs):
            return None
        known = [ref for ref in refs if ref is not None]
        wanted = self._needed({r.op for r in known})
        if not all(self._may_read(name) for name in self._of_model(wanted)):
            return None
        with _torch.no_modes(), torch.no_grad():
            self._compute(wanted)
        return [self._values[r.op][r.index] for r in known]

    @contextmanager
    def strictly(self) -> Iterator[None]:
        """No data is made up meanwhile."""
        kept, self.otherwise = self.otherwise, None
        try:
            yield
        finally:
            self.otherwise = kept

    def _look_at_new_ops(self) -> None:
        """Find the constant ops among those recorded since the last call."""
        for op in self.tape.ops[self._read:]:
            if self._is_constant(op):
                self._makers[op.name] = op
        self._read = len(self.tape.ops)

    def _is_constant(self, op: Op) -> bool:
        if op.kind == "buffer":
            return op.target in self.buffers or (op.target in self.tape.constants and not self.tape.constants[op.target].is_meta)
        small = all(m is not None and m.numel <= LARGEST for m in op.outputs)
        plain = isinstance(op.target, torch._ops.OpOverload) and not is_random(op.target) and "empty" not in str(op.target)
        return op.kind == "call" and small and plain and all(r.op in self._makers for r in op.refs)

    def _needed(self, names: set[str]) -> set[str]:
        """The ops `names` and those that they depend on."""
        for op in reversed(tuple(self._makers.values())):
            if op.name in names:
                names |= {r.op for r in op.refs}
        return names

    def _of_model(self, names: set[str]) -> list[str]:
        """The model's buffers among the ops `names`."""
        return [op.target for op in map(self._makers.__getitem__, names) if op.kind == "buffer" and op.target in self.buffers]

    def _may_read(self, name: str) -> bool:
        """Whether a buffer of the model is as it was stored, and can still be compared with that: the program does so at the end of the forward."""
        return self.as_stored(name) and (name in self.assumed or self.tape.phase == "forward")

    def _compute(self, wanted: set[str]) -> None:
        """Compute the wanted values, in program order."""
        self.assumed.update(self._of_model(wanted))
        for op in [op for op in self._makers.values() if op.name in wanted and op.name not in self._values]:
            made = self.stored(op.target) if op.kind == "buffer" else op.target(
                *map_args(self._value, op.args), **{k: map_args(self._value, v) for k, v in op.kwargs})
            self._values[op.name] = tuple(made) if isinstance(made, (tuple, list)) else (made,)

    def stored(self, name: str) -> torch.Tensor:
        """The value of a buffer of the model, or of a constant of the trace."""
        return self.buffers[name].cpu() if name in self.buffers else self.tape.constants[name]

    def _value(self, leaf: Any) -> Any:
        return self._values[leaf.op][leaf.index] if isinstance(leaf, Ref) else leaf


def small_buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    """Buffers that may be settings (the stride of a convolution, a probability), not data: few numbers, and they are at hand. Those that lie on
    several ranks are gathered, before a trace has its own meaning of collectives; every rank traces."""
    small = {name: b.detach() for name, b in dense_buffers(model) if type(b) in (torch.Tensor, nn.Buffer, DTensor) and b.numel() <= SMALL}
    return {name: b.full_tensor() if isinstance(b, DTensor) else b for name, b in small.items() if not b.is_meta}
