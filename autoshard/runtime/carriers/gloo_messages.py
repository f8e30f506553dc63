"""Collectives over gloo as messages between pairs of ranks.

gloo's all-gather and reduce-scatter work on private copies, its reduce-scatter is an all-reduce, and each call goes
through a thread of its own. Messages straight into the result take a third of the CPU time: 8 MB gathered on 2 ranks 2.0
instead of 5.2 ms, 64 KB 0.05 instead of 0.18 ms. The numbers are the same: sums are taken in the order of ranks. All ranks
issue the same collectives in the same order, which is how messages find each other.
"""
from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup, ReduceOp

from autoshard.collectives.all_to_all_rows import parts, result
from autoshard.collectives.exchange import Exchange
from autoshard.collectives.kind import Collective
from autoshard.collectives.reduce_ops import combine_into
from autoshard.errors import CollectiveError, UsageError
from autoshard.lower.overwrite_table import swaps

TAG = 7919
"""Keeps these messages apart from a program's own."""
NOTE: ContextVar[Callable[[str, str, torch.Tensor], None] | None] = ContextVar("note", default=None)
"""Told of every call made here (kind, group, buffer), for whoever records collectives."""


class Members:
    """The ranks of a process group, `world` their global ranks. Does not keep the group alive: its threads end with the last who holds it,
    and must end before the interpreter does (leaving.py)."""

    def __init__(self, group: ProcessGroup) -> None:
        self.name, self.me, self.n = group.group_name, group.rank(), group.size()
        self.world = tuple(dist.get_process_group_ranks(group))
        self._group = weakref.ref(group)

    @property
    def group(self) -> ProcessGroup:
        """Raises UsageError once it is gone."""
        found = self._group()
        if found is None:
            raise UsageError("the model's process group was destroyed; call torch.distributed.destroy_process_group() after its last step")
        return found


@dataclass
class Flight:
    """Messages under way, and what to do once they are there. Holds what is sent until then. `what`: words for errors."""

    works: list[Any]
    finish: Callable[[], torch.Tensor]
    sent: tuple[torch.Tensor, ...]
    what: Callable[[], str] = lambda: "a collective"


def land(flight: Flight) -> torch.Tensor:
    """The collective's result."""
    try:
        for work in flight.works:
            work.wait()
    except RuntimeError as e:
        raise failed(e, flight.what()) from e
    try:
        return flight.finish()
    except CollectiveError as e:
        raise CollectiveError(f"{flight.what()}: {e}") from e


def in_words(kind: Collective, x: torch.Tensor, group: Members) -> str:
    """A call on `x` in words."""
    return f"{kind.name} of {x.dtype} {tuple(x.shape)} among ranks {', '.join(map(str, group.world))}"


def failed(e: RuntimeError, what: str = "a collective") -> CollectiveError:
    """gloo's error as ours, without its advice. It names no rank."""
    return CollectiveError(f"{what} failed: {(str(e).splitlines() or [type(e).__name__])[0].partition('. This is typically')[0]}")


def exchange(kind: Collective, x: torch.Tensor, op: str, group: Members, in_place: bool = False, late: bool = False) -> Flight:
    """Start a collective of any kind. `op`: how it combines, if it does; `in_place`: `x` may be overwritten, if the kind can; `late`: compute
    comes before the wait."""
    if kind.runs is Exchange.REDUCE:
        return _reduce_whole(kind, x if in_place else x.clone(), op, group, late)
    if kind.runs.paired:
        return _swap(kind, x, group)
    sent = [x] * group.n if kind.runs.whole else list(x.chunk(group.n))
    return (_reduce if kind.runs.reduces else _concatenate)(kind, x, sent, op, group)


def exchange_rows(kind: Collective, x: torch.Tensor, sends: torch.Tensor, gets: torch.Tensor, room: int, where: str,
                  balanced: int, group: Members) -> Flight:
    """Start an exchange of as many rows as counts say. Ranks that have nothing for each other send no message. Raises CapacityError."""
    to, come = parts(sends, group.n), parts(gets, group.n)
    out, got = result(x, come, room, where)
    sent, me = list(x[:sum(to)].split(to)), group.me
    note(kind.name, x.new_empty((balanced, *x.shape[1:]), device="meta"), group)
    got[me].copy_(sent[me])
    others = [r % group.n for r in range(me + 1, me + group.n)]
    works = [group.group.recv([got[r]], r, TAG) for r in reversed(others) if len(got[r])]
    works += [group.group.send([sent[r]], r, TAG) for r in others if len(sent[r])]
    return Flight(works, lambda: out, (x,))


def _swap(kind: Collective, x: torch.Tensor, group: Members) -> Flight:
    """With the mirrored rank, which may be this one."""
    note(kind.name, x, group)
    other = group.n - 1 - group.me
    if other == group.me:
        return Flight([], x.clone, (x,))
    out = torch.empty_like(x)
    return Flight([group.group.recv([out], other, TAG), group.group.send([x], other, TAG)], lambda: out, (x,))


def _concatenate(kind: Collective, x: torch.Tensor, sent: list[torch.Tensor], op: str, group: Members) -> Flight:
    """Messages straight into the result."""
    out = x.new_empty((kind.runs.rows(x.shape[0], group.n), *x.shape[1:]))
    got = out.chunk(group.n)
    works = _exchange(kind.name, kind.buffer(x, out), sent, got, group)
    got[group.me].copy_(sent[group.me])
    return Flight(works, lambda: out, (x,))


def _reduce(kind: Collective, x: torch.Tensor, sent: list[torch.Tensor], op: str, group: Members) -> Flight:
    """Takes n - 1 pieces beside `x`: the own one is added where it lies."""
    me = group.me
    got = [None if i == me else torch.empty_like(sent[me]) for i in range(group.n)]
    works = _exchange(kind.name, kind.buffer(x, sent[me]), sent, got, group)

    def finish() -> torch.Tensor:
        pieces = [sent[me] if piece is None else piece for piece in got]
        if me == 0:  # `x` is not ours to write to; a sum of two is the same in either order
            pieces[:2] = pieces[1::-1]
        total = pieces[0]
        for piece in pieces[1:]:
            combine_into(total, piece, op)
        return total

    return Flight(works, finish, (x,))


def _reduce_whole(kind: Collective, x: torch.Tensor, op: str, group: Members, late: bool) -> Flight:
    """Into `x`. Of two ranks each adds the other's buffer to its own. Large buffers and more ranks are gloo's own, in c10d's call:
    functional collectives under way at once corrupt memory, see docs/runtime.md."""
    if not swaps(group.n, x.nbytes, late):
        note(kind.name, x, group)
        return Flight([dist.all_reduce(x, getattr(ReduceOp, op.upper()), group.group, async_op=True)], lambda: x, (x,))
    got = torch.empty_like(x)
    works = _exchange(kind.name, x, [x, x], [got, got], group)
    return Flight(works, lambda: combine_into(x, got, op), (x,))


def note(kind: str, buffer: torch.Tensor, group: Members) -> None:
    told = NOTE.get()
    if told is not None:
        told(kind, group.name, buffer)


def _exchange(kind: str, buffer: torch.Tensor, send: Sequence[torch.Tensor], receive: Sequence[torch.Tensor | None],
              group: Members) -> list[Any]:
    """Start all messages to and from the other ranks, nearest first. `buffer`: whose bytes the call counts."""
    note(kind, buffer, group)
    me, n, through = group.me, group.n, group.group
    works = [through.recv([receive[(me - k) % n]], (me - k) % n, TAG) for k in range(1, n)]
    return works + [through.send([send[(me + k) % n]], (me + k) % n, TAG) for k in range(1, n)]
