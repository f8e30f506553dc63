"""Messages between the ranks of a pipeline: FIFO channels, one per sender, receiver and window, and one per pair of stages that are no
neighbours.

Messages are plain sends and receives of c10d, never functional collectives (docs/runtime.md). A receive is posted before its value is
needed; what is sent is held until it is gone. On CPUs a tag keeps the channels of one process group apart; NCCL has no tags, so there
every directed channel has a communicator of its own, and a late receive never blocks one of another channel.
"""
from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from autoshard import _torch
from autoshard.base.graph import BACKWARD, FORWARD
from autoshard.base.turns import UNDER_WAY
from autoshard.errors import AutoshardError

TAG = 7927
"""Of the first channel; keeps these messages apart from a program's own and from those of collectives."""

ONCE = -1
"""In place of a micro-batch, for what is sent once a step."""
STEP = "step"
"""The channel of it."""
ORDERED = (FORWARD, BACKWARD, STEP)
"""Channels whose sends and receives stand in one order on all ranks, so that a send may wait for its receive."""


@dataclass(frozen=True)
class Message:
    """What passes a wire: `value` of micro-batch m (or `ONCE`) between two ranks of the pipeline's axis."""

    value: str
    microbatch: int
    source: int
    target: int
    channel: str

    def __str__(self) -> str:
        return self.value + ("" if self.microbatch < 0 else f" of micro-batch {self.microbatch}")


SENT: ContextVar[Callable[[Message, int], None] | None] = ContextVar("sent", default=None)
"""Told of every message that is sent, and its bytes, for whoever compares them with a plan."""


@dataclass(eq=False)
class Wires:
    """This rank's ends. `group`: the process group of the pipeline's axis, `me` this rank's coordinate on it; `trouble`: what is known of a
    coordinate's rank that does not answer."""

    group: dist.ProcessGroup
    me: int
    device: torch.device
    trouble: Callable[[int], str] = lambda coordinate: ""
    channels: tuple[str, ...] = ORDERED
    pairs: Mapping[tuple[int, int, str], dist.ProcessGroup] = field(default_factory=dict)
    _arriving: dict[tuple[str, int], tuple[Any, torch.Tensor, Message]] = field(default_factory=dict)
    _sent: list[tuple[Any, torch.Tensor, Message]] = field(default_factory=list)

    def send(self, message: Message, value: torch.Tensor) -> None:
        value = value.contiguous()
        told = SENT.get()
        if told is not None:
            told(message, value.nbytes)
        self._let_go(message)
        with self._named(message, message.target):
            self._sent.append((self._through(message).send([value], self._peer(message, message.target), self._tag(message)), value, message))

    def post(self, message: Message, shape: Iterable[int], dtype: torch.dtype) -> None:
        """Begin to receive, into a buffer of its own; again for the same message: nothing."""
        key = message.value, message.microbatch
        if key not in self._arriving:
            buffer = torch.empty(tuple(shape), dtype=dtype, device=self.device)
            with self._named(message, message.source):
                work = self._through(message).recv([buffer], self._peer(message, message.source), self._tag(message))
            self._arriving[key] = work, buffer, message

    def take(self, message: Message) -> torch.Tensor:
        """What was posted, once it is here."""
        work, buffer, _ = self._arriving.pop((message.value, message.microbatch))
        with self._named(message, message.source):
            work.wait()
        return buffer

    def flush(self) -> None:
        """Wait until all that was sent has left: at the end of a step nothing is under way."""
        for work, _, message in self._sent:
            with self._named(message, message.target):
                work.wait()
        self._sent.clear()

    def _let_go(self, message: Message) -> None:
        """Wait for the oldest sends of a channel before there are too many: every one holds a tensor. The order of sends and receives allows
        for sends that block (pipeline/action_lists/check.py), so this ends. What skips stages is not in that order, and never waits here."""
        if message.channel not in ORDERED:
            return
        there = [entry for entry in self._sent if (entry[2].target, entry[2].channel) == (message.target, message.channel)]
        for entry in there[:max(0, len(there) - UNDER_WAY + 1)]:
            with self._named(entry[2], entry[2].target):
                entry[0].wait()
            self._sent = [e for e in self._sent if e is not entry]

    def _through(self, message: Message) -> dist.ProcessGroup:
        return self.pairs.get((message.source, message.target, message.channel), self.group)

    def _peer(self, message: Message, coordinate: int) -> int:
        if (message.source, message.target, message.channel) in self.pairs:
            return int(coordinate == message.target)  # its members are sender, receiver
        return coordinate

    def _tag(self, message: Message) -> int:
        return TAG + self.channels.index(message.channel)

    def _named(self, message: Message, other: int) -> _Named:
        return _Named(self, message, other)


@dataclass(frozen=True)
class _Named:
    """Errors of c10d inside say which message it was, and what is known of the rank at the other end."""

    wires: Wires
    message: Message
    other: int

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, e: BaseException | None, trace: Any) -> None:
        if isinstance(e, RuntimeError):
            what = "send" if self.other == self.message.target else "receive"
            known = self.wires.trouble(self.other)
            raise AutoshardError(f"rank {self.wires.me} of the pipeline could not {what} {self.message} ({self.message.channel}), rank {self.other} "
                                 f"being at the other end{': ' + known if known else ''} ({str(e).splitlines()[0]})") from e


def directed_pairs(ranks: list[int], wanted: Iterable[tuple[int, int, str]], device: torch.device) -> dict[tuple[int, int, str], dist.ProcessGroup]:
    """A communicator of two ranks per directed channel, where the backend has no tags. `ranks`: global ranks by coordinate; all of them
    call this with the same `wanted`, in the same order."""
    group = dist.group.WORLD
    assert group is not None, "a pipeline has a process group"
    if _torch.transport(group, device.type) == "gloo":
        return {}
    made = {}
    for source, target, channel in sorted(wanted):
        if dist.get_rank() in (ranks[source], ranks[target]):
            made[source, target, channel] = dist.new_group([ranks[source], ranks[target]], use_local_synchronization=True, sort_ranks=False)
    return made
