"""Bytes of live tensor storage, counted while a program runs."""
from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from autoshard import _torch
from autoshard.collectives import RUN
from autoshard.lower.overwrite_table import swaps

SENDS = tuple(kind.target for kind in RUN.values() if kind.holds_input)
IN_PLACE = tuple(kind.in_place for kind in RUN.values() if not kind.holds_input)


class LiveBytes(TorchDispatchMode):
    """Every storage that an op returns counts from then until it is freed; workspace inside kernels is not seen.
    `peak` is the most at the end of any op. `ranks`: of a process group by name; with it, what a collective sends or a buffer for
    what arrives is kept until it is waited for, as real ones do (fake ones do not)."""

    def __init__(self, ranks: Callable[[str], int] | None = None, watch: Callable[[Any, int], None] | None = None) -> None:
        super().__init__()
        self.live = self.peak = 0
        self.ranks, self.watch = ranks, watch
        self._elsewhere: dict[int, Any] = {}
        self._known: dict[int, weakref.ref[Any]] = {}
        self._sent: dict[int, Any] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if self.ranks and func in SENDS:
            self._sent[_storage(out)._cdata] = args[0]
        if self.ranks and func in IN_PLACE and swaps(self.ranks(args[-1]), args[0].nbytes):
            arriving = self._sent[_storage(out)._cdata] = torch.empty_like(args[0])
            self.track(arriving)
        self.track(out)
        if self.watch:
            self.watch(func, self.live)
        if self.ranks and func is _torch.WAIT:
            self._sent.pop(_storage(args[0])._cdata, None)
        return out

    def track(self, *values: Any) -> None:
        """Count storages that no op under this mode has made."""
        for t in pytree.tree_leaves(values):
            if isinstance(t, torch.Tensor):
                self._track(_storage(t))
        self.peak = max(self.peak, self.live)

    def ignore(self, *values: Any) -> None:
        """These do not count, whoever returns them: they stand for memory of another place."""
        self._elsewhere.update((_storage(t)._cdata, _storage(t)) for t in pytree.tree_leaves(values) if isinstance(t, torch.Tensor))

    def _track(self, storage: torch.UntypedStorage) -> None:
        key, nbytes = storage._cdata, storage.nbytes()
        if key in self._known or key in self._elsewhere:
            return
        self.live += nbytes

        def freed(_: Any) -> None:
            del self._known[key]
            self.live -= nbytes

        self._known[key] = weakref.ref(storage, freed)


def _storage(t: torch.Tensor) -> torch.UntypedStorage:
    return (t._local_tensor if isinstance(t, DTensor) else t).untyped_storage()


def step_peak(compiled: torch.nn.Module, batch: tuple[torch.Tensor, ...]) -> int:
    """The most bytes live in a training step that moves nothing, when the optimizer's state exists."""
    optimizer = torch.optim.AdamW(compiled.parameters(), lr=0.0)
    for watched in (False, True):
        with LiveBytes() as seen:
            if watched:
                seen.track(list(compiled.parameters()), list(compiled.buffers()), [list(s.values()) for s in optimizer.state.values()], batch)
            compiled(*batch).backward()
            optimizer.step()
            optimizer.zero_grad()
    return seen.peak
