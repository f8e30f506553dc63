"""What rules' local implementations ask and emit while a window's graph is built."""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from autoshard.lower.emit import Emitter
from autoshard.rules.types import LocalContext


@dataclass(frozen=True)
class Context(LocalContext):
    """On FX proxies. `where`: what errors at run time call the op, with the user's line."""

    emit: Emitter
    where: str

    def index(self, axes: Sequence[int]) -> Any:
        return self.emit.index(axes)

    def all_reduce(self, x: Any, reduce_op: str, axes: Sequence[int]) -> Any:
        for axis in sorted(axes, reverse=True):
            x = self.emit.wait(self.emit.collective("all_reduce", x, (axis,), reduce_op))
        return x

    def all_to_all(self, x: Any, axis: int) -> Any:
        return self.emit.wait(self.emit.collective("all_to_all", x, (axis,)))

    def all_to_all_rows(self, x: Any, sends: Any, gets: Any, room: int, balanced: int, axis: int) -> Any:
        return self.emit.wait(self.emit.rows_apart(x, sends, gets, room, self.where, balanced, axis))

    def mirror(self, x: Any, axes: Sequence[int]) -> Any:
        for axis in sorted(axes, reverse=True):
            x = self.emit.wait(self.emit.collective("mirror", x, (axis,)))
        return x
