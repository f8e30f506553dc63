"""Record the collectives a program really issues, at the point where they enter c10d."""
from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from autoshard import _torch
from autoshard.collectives import KIND_OF
from autoshard.runtime.carriers.gloo_messages import NOTE
from autoshard.runtime.ranks.place import axes_of_ranks, group_names


@dataclass(frozen=True)
class Issued:
    """One call: kind, mesh axis (or several taken as one, "dp+tp"), bytes per rank by the convention of collectives/__init__.py."""

    kind: str
    axis: str
    nbytes: int


class _Recorder(_torch.DispatchMode):
    def __init__(self, axis_of: Callable[[str], str], found: list[Issued]) -> None:
        super().__init__()
        self.axis_of, self.found = axis_of, found

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        kind = KIND_OF.get(func)
        if kind is not None:
            self.found.append(Issued(kind.name, self.axis_of(str(args[-1])), kind.call_bytes(args[1:], args[0], out)))
        return out

    def note(self, kind: str, group: str, buffer: torch.Tensor) -> None:
        self.found.append(Issued(kind, self.axis_of(group), buffer.numel() * buffer.element_size()))


@contextmanager
def recorded_collectives(device_mesh: Any) -> Iterator[list[Issued]]:
    """The list of calls made inside the block, backward passes included, in order. Call the model's `prepare()`
    before: lowering tries collectives on shapes, and those would be counted.

    Every functional collective is one call of its process group (they are not coalesced), and so is one that gloo carries
    as messages; a group that is not of the mesh's axes shows under its own name."""
    found: list[Issued] = []
    known = {group: axis for axis, group in group_names(device_mesh).items()}

    def axis_of(group: str) -> str:
        if group not in known:
            ranks = dist.get_process_group_ranks(_torch.process_group(group))
            known[group] = axes_of_ranks(device_mesh, ranks) or group
        return known[group]

    recorder = _Recorder(axis_of, found)
    token = NOTE.set(recorder.note)
    try:
        with recorder:
            yield found
    finally:
        NOTE.reset(token)
