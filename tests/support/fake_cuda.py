"""CUDA devices that are not there, for tests: tensors with shapes, strides, dtypes and devices but no memory, and everything that a program
would ask of the device or of NCCL written down.

`FakeTensorMode` gives `cuda:0` tensors on a build of torch without CUDA: kernels are their meta functions, and an op of tensors on two devices
raises as it would there. All stand-ins are bound here, and nowhere else. What torch cannot do without a CUDA build: backward of autograd,
streams, inductor's kernels.
"""
from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from autoshard import _torch
from autoshard.collectives import KIND_OF

CUDA = torch.device("cuda:0")
aten = torch.ops.aten
HOPPER = (9, 0)
KINDS_OF_DEVICES, AT_CUDA, AT_META = 22, 1, 14
"""Of c10's table of device guards: its length, and the places of two kinds in it."""


@dataclass(frozen=True)
class Issued:
    """A call of NCCL: what the ranks of a group must agree on, in the order they issue it."""

    kind: str
    group: str
    reduce: tuple[Any, ...]
    dtype: torch.dtype
    shape: tuple[int, ...]


@dataclass
class Recorded:
    """`pinned`: bytes of host memory that was asked for pinned; `to_host`, `to_device`: bytes of copies, and whether each was told not to block;
    `races`: what a GPU would do wrong, in words."""

    issued: list[Issued] = field(default_factory=list)
    pinned: list[int] = field(default_factory=list)
    to_host: list[tuple[int, bool]] = field(default_factory=list)
    to_device: list[tuple[int, bool]] = field(default_factory=list)
    races: list[str] = field(default_factory=list)


class Recorder(TorchDispatchMode):
    """Sees every op of a program above the fake tensors. NCCL works beside the compute stream: from the call to its wait the result has no
    value yet, and what the call reads must not change."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = Recorded()
        self._flying: dict[int, tuple[torch.Tensor, torch.Tensor, str]] = {}

    def __torch_dispatch__(self, op: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if op is _torch.WAIT:
            return self._wait(args[0])
        self._check(op, args, kwargs)
        if (kind := KIND_OF.get(op)) is not None:
            return self._issue(kind.name, op, args)
        self._note_copies(op, args, kwargs)
        return _missing(op, args) or op(*args, **kwargs)

    def end(self) -> Recorded:
        """What was seen, once everything is waited for."""
        self.seen.races += [f"{name} is never waited for" for _, _, name in self._flying.values()]
        return self.seen

    def _issue(self, name: str, op: Any, args: tuple[Any, ...]) -> torch.Tensor:
        sent, *rest = args
        out = sent if op._schema.is_mutable else op(*args)
        self.seen.issued.append(Issued(name, str(rest[-1]), tuple(map(str, rest[:-1])), sent.dtype, tuple(sent.shape)))
        if sent.device.type != "cuda":
            self.seen.races.append(f"{name} is called on {sent.device}")
        if not sent.is_contiguous():
            self.seen.races.append(f"{name} is called on a tensor that is not contiguous")
        self._flying[_torch.storage_key(out)] = (out, sent, name)
        return out

    def _wait(self, out: torch.Tensor) -> torch.Tensor:
        if self._flying.pop(_torch.storage_key(out), None) is None:
            self.seen.races.append("a wait for what was not issued, or was waited for before")
        return out

    def _check(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        reads = {_torch.storage_key(t) for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        names = [a for a in op._schema.arguments if a.alias_info is not None and a.alias_info.is_write]
        writes = {_torch.storage_key(t) for a in names for i, b in enumerate(op._schema.arguments) if a is b
                  for t in tree_leaves(args[i] if i < len(args) else kwargs.get(a.name)) if isinstance(t, torch.Tensor)}
        is_view = op in (aten.view.default, aten.detach.default, aten.alias.default)
        for key, (_, sent, name) in self._flying.items():
            if key in reads and not is_view:
                self.seen.races.append(f"{op} reads the result of {name} before its wait")
            if _torch.storage_key(sent) in writes:
                self.seen.races.append(f"{op} overwrites what {name} still sends")

    def _note_copies(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if kwargs.get("pin_memory"):
            self.seen.pinned.append(args[0].nbytes if isinstance(args[0], torch.Tensor) else 0)
        if op is aten.copy_.default and args[0].device.type != args[1].device.type:
            blocks = bool(args[2]) if len(args) > 2 else bool(kwargs.get("non_blocking"))
            (self.seen.to_host if args[0].device.type == "cpu" else self.seen.to_device).append((args[1].nbytes, blocks))


def _missing(op: Any, args: tuple[Any, ...]) -> Any:
    """The results of ops whose meta functions torch has in CUDA builds only."""
    if op is aten.batch_norm_update_stats.default:
        wide = torch.float32 if args[0].dtype in (torch.bfloat16, torch.float16) else args[0].dtype
        return tuple(args[0].new_empty(args[0].shape[1], dtype=wide) for _ in range(2))
    return None


@contextmanager
def _device_guard() -> Iterator[None]:
    """Kernels in front of the fake tensors (copies, indexing) set the current device, for which this build of torch has no code. A build with CUDA
    has torch put a guard there that does nothing while there is no GPU; that of the meta device is one."""
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    guards = (ctypes.c_void_p * KINDS_OF_DEVICES).in_dll(library, "_ZN3c104impl26device_guard_impl_registryE")
    before = guards[AT_CUDA]
    guards[AT_CUDA] = before or guards[AT_META]
    try:
        yield
    finally:
        guards[AT_CUDA] = before


@contextmanager
def said_of_gpus(capability: tuple[int, int] = HOPPER, count: int = 1) -> Iterator[None]:
    """torch says that there are GPUs, of which the first is the current one."""
    with ExitStack() as stack:
        for name, value in (("is_available", True), ("current_device", 0), ("device_count", count), ("get_device_capability", capability)):
            stack.enter_context(mock.patch.object(torch.cuda, name, lambda *_, value=value: value))
        stack.enter_context(mock.patch.object(torch.cuda, "default_generators", (torch.Generator(),)))
        yield


@contextmanager
def fake_cuda(capability: tuple[int, int] = HOPPER) -> Iterator[Recorder]:
    """One fake GPU, on which code inside runs."""
    recorder = Recorder()
    with said_of_gpus(capability), _device_guard(), FakeTensorMode(), recorder:
        yield recorder


def on_cuda(t: torch.Tensor) -> torch.Tensor:
    """A tensor like `t` (fake ones too) on the fake device; call it inside."""
    return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=CUDA)
