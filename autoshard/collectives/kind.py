"""`Collective`: everything the package knows about one kind of collective, as one value."""
from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np

from autoshard.collectives.exchange import Exchange
from autoshard.collectives.levels import Levels

Steps = tuple[Callable[..., Any], Callable[..., Any]]


class Emitter(Protocol):
    """What writes a redistribution, as `before` and `after` see it: pieces of tensors, nothing else (see lower/emit.py)."""

    def at_least_1d(self, x: Any) -> Any: ...
    def cut(self, x: Any, dim: int, n: int) -> Any: ...
    def join(self, pieces: Any, dim: int) -> Any: ...
    def split(self, x: Any, dim: int, n: int) -> Any: ...
    def drop_first(self, x: Any) -> Any: ...


def unchanged(emit: Emitter, x: Any, step: Any, n: int) -> Any:
    return x


@dataclass(frozen=True)
class Collective:
    """One kind. Gathers and scatters work on dim 0 of what they are called on.

    name        as plans, profiles and reports in JSON write it;  words: as people do
    counted     the bytes convention: which buffer `nbytes` is of, what goes "in" or what comes "out"
    seconds     (nbytes as float64 array, levels of the axis) -> seconds
    per_byte    (ranks) -> bytes that one rank sends in a ring, per byte of `nbytes`
    steps       (ranks) -> steps that pay a link's latency where curves are measured
    exchange    what is sent and what is made of it, by which everything that carries collectives runs it; None for kinds that
                plans do not run
    target      torch's functional op, or one made with base/custom_op.py;  in_place: its form that overwrites the tensor
    arguments   (rows of the tensor, ranks, reduce op) -> what `target` takes between tensor and group; a reduce op comes first
    nbytes      (what `target` takes after the tensor, tensor that goes in, tensor that comes out) -> bytes of a call, where sizes are known at
                run time only; None: those of the buffer that counts
    changes     (source, target placement) -> whether this kind is the step between them
    before      makes of a local tensor what `target` is called on: (emitter, tensor, step, ranks);  after: of its result
                the local tensor
    """

    name: str
    words: str
    counted: Literal["in", "out"]
    seconds: Callable[[np.ndarray, Levels], np.ndarray]
    per_byte: Callable[[int], float]
    steps: Callable[[int], int]
    exchange: Exchange | None = None
    target: Any = None
    in_place: Any = None
    arguments: Callable[[int, int, str], tuple[Any, ...]] = lambda rows, n, reduce_op: ()
    nbytes: Callable[[Sequence[Any], Any, Any], int] | None = None
    changes: Callable[[int, int], bool] = lambda source, target: False
    before: Callable[[Emitter, Any, Any, int], Any] = unchanged
    after: Callable[[Emitter, Any, Any, int], Any] = unchanged

    @property
    def runs(self) -> Exchange:
        """`exchange`, of a kind that plans run."""
        assert self.exchange is not None, f"{self.name} is priced only: it has no exchange"
        return self.exchange

    @property
    def holds_input(self) -> bool:
        """Whether a call reads its tensor until it is waited for. What can work in place works on a copy else."""
        return self.in_place is None

    def reduce_op(self, arguments: Sequence[Any]) -> str:
        """The reduce op among what `target` is called with after the tensor; "" for a kind that combines nothing."""
        return str(arguments[0]) if self.runs.reduces else ""

    def call_bytes(self, arguments: Sequence[Any], sent: Any, received: Any) -> int:
        """Bytes that a call of `target` counts; `arguments` are those after the tensor."""
        if self.nbytes is not None:
            return self.nbytes(arguments, sent, received)
        counted = self.buffer(sent, received)
        return int(counted.numel() * counted.dtype.itemsize)

    def buffer(self, sent: Any, received: Any) -> Any:
        """The one of the two whose bytes count."""
        return received if self.counted == "out" else sent
