"""Collectives over shared memory: each rank posts its data and reads what it needs from the others."""
from __future__ import annotations

import torch

from autoshard.collectives.exchange import Exchange
from autoshard.collectives.kind import Collective
from autoshard.collectives.reduce_ops import combine_into
from autoshard.runtime.carriers import gloo_messages
from autoshard.runtime.carriers.gloo_messages import Flight, note
from autoshard.runtime.carriers.shared_memory import Post, Shared


def exchange(kind: Collective, x: torch.Tensor, op: str, shared: Shared, in_place: bool = False, late: bool = False) -> Flight:
    """Start a collective of any kind, as `gloo_messages.exchange` does, which carries what the ring has no room for."""
    if kind.runs is Exchange.REDUCE and not in_place:
        x, in_place = x.clone(), True
    post = shared.post(x)
    if post is None:
        return gloo_messages.exchange(kind, x, op, shared.group, in_place, late)
    if kind.runs is Exchange.REDUCE:
        return _reduce_whole(kind, x, op, shared, post)
    if kind.runs.paired:
        return _swap(kind, x, shared, post)
    return (_reduce_chunks if kind.runs.reduces else _concatenate)(kind, x, op, shared, post)


def _swap(kind: Collective, x: torch.Tensor, shared: Shared, post: Post) -> Flight:
    note(kind.name, x, shared.group)

    def finish() -> torch.Tensor:
        shared.wait(post)
        out, other = torch.empty_like(x), shared.n - 1 - shared.me
        if other == shared.me:
            out.copy_(x)
        else:
            shared.copy(post, other, 0, out)
        shared.land(post)
        return out

    return Flight([], finish, (x,))


def _concatenate(kind: Collective, x: torch.Tensor, op: str, shared: Shared, post: Post) -> Flight:
    out = x.new_empty((kind.runs.rows(x.shape[0], shared.n), *x.shape[1:]))
    note(kind.name, kind.buffer(x, out), shared.group)
    me, pieces = shared.me, out.chunk(shared.n)
    pieces[me].copy_(x if kind.runs.whole else x.chunk(shared.n)[me])

    def finish() -> torch.Tensor:
        shared.wait(post)
        for rank in shared.others:
            shared.copy(post, rank, 0 if kind.runs.whole else me * pieces[rank].nbytes, pieces[rank])
        shared.land(post)
        return out

    return Flight([], finish, (x,))


def _reduce_chunks(kind: Collective, x: torch.Tensor, op: str, shared: Shared, post: Post) -> Flight:
    chunk = x.chunk(shared.n)[shared.me]
    note(kind.name, kind.buffer(x, chunk), shared.group)
    shape, count = chunk.shape, chunk.numel()

    def finish() -> torch.Tensor:
        shared.wait(post)
        total = torch.empty(shape, dtype=x.dtype)
        _combine(post, op, shared, shared.me * count, total)
        shared.land(post)
        return total

    return Flight([], finish, (x,))


def _reduce_whole(kind: Collective, x: torch.Tensor, op: str, shared: Shared, post: Post) -> Flight:
    """Into `x`."""
    note(kind.name, x, shared.group)

    def finish() -> torch.Tensor:
        shared.wait(post)
        if shared.n == 2:
            combine_into(x.view(-1), shared.read(post, 1 - shared.me, x.dtype, 0, x.numel()), op)
        else:
            _combine(post, op, shared, 0, x)
        shared.land(post)
        return x

    return Flight([], finish, (x,))


def _combine(post: Post, op: str, shared: Shared, first: int, total: torch.Tensor) -> None:
    """What all ranks posted from element `first` on, in the order of ranks, the same on all of them."""
    shared.copy(post, 0, first * total.dtype.itemsize, total)
    for rank in range(1, shared.n):
        combine_into(total.view(-1), shared.read(post, rank, total.dtype, first, total.numel()), op)
