"""Record the collectives a program really issues, at the point where they enter c10d."""
from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from autoshard import _torch
from autoshard.runtime.direct import NOTE


@dataclass(frozen=True)
class Issued:
    """One call: kind, mesh axis, bytes per rank by the convention of cost/collectives.py."""

    kind: str
    axis: str
    nbytes: int


class _Recorder(_torch.DispatchMode):
    def __init__(self, axes: Mapping[str, str], found: list[Issued]) -> None:
        super().__init__()
        self.axes, self.found = axes, found

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        kind = _torch.COLLECTIVE_KINDS.get(func)
        if kind is not None:
            self.note(kind, str(args[-1]), out if kind == "all_gather" else args[0])
        return out

    def note(self, kind: str, group: str, buffer: torch.Tensor) -> None:
        self.found.append(Issued(kind, self.axes.get(group, group), buffer.numel() * buffer.element_size()))


@contextmanager
def recorded_collectives(device_mesh: Any) -> Iterator[list[Issued]]:
    """The list of calls made inside the block, backward passes included, in order. Call the model's `prepare()`
    before: lowering tries collectives on shapes, and those would be counted.

    Every functional collective is one call of its process group (they are not coalesced), and so is one that gloo carries
    as messages; a group that is none of the mesh's axes shows under its own name."""
    found: list[Issued] = []
    axes = {group: axis for axis, group in _torch.group_names(device_mesh).items()}
    recorder = _Recorder(axes, found)
    token = NOTE.set(recorder.note)
    try:
        with recorder:
            yield found
    finally:
        NOTE.reset(token)
