"""The collectives of gloo_messages.py over shared memory: each rank posts its data and reads what it needs from the others."""
from __future__ import annotations

from collections.abc import Sequence

import torch

from autoshard.runtime.carriers import gloo_messages
from autoshard.runtime.carriers.gloo_messages import COMBINE, Flight, note
from autoshard.runtime.carriers.shared_memory import Post, Shared


def all_gather(x: torch.Tensor, n: int, shared: Shared) -> Flight:
    post = shared.post(x)
    if post is None:
        return gloo_messages.all_gather(x, n, shared.group)
    out = x.new_empty((n * x.shape[0], *x.shape[1:]))
    note("all_gather", out, shared.group)
    pieces = out.chunk(n)
    pieces[shared.me].copy_(x)

    def finish() -> torch.Tensor:
        shared.wait(post)
        for rank in shared.others:
            shared.copy(post, rank, 0, pieces[rank])
        shared.land(post)
        return out

    return Flight([], finish, (x,))


def all_to_all(x: torch.Tensor, received: Sequence[int], sent: Sequence[int], shared: Shared) -> Flight:
    post = shared.post(x)
    if post is None:
        return gloo_messages.all_to_all(x, received, sent, shared.group)
    note("all_to_all", x, shared.group)
    out = torch.empty_like(x)
    me, pieces = shared.me, out.split(list(received))
    pieces[me].copy_(x.split(list(sent))[me])

    def finish() -> torch.Tensor:
        shared.wait(post)
        for rank in shared.others:
            shared.copy(post, rank, me * pieces[rank].nbytes, pieces[rank])
        shared.land(post)
        return out

    return Flight([], finish, (x,))


def reduce_scatter(x: torch.Tensor, op: str, n: int, shared: Shared) -> Flight:
    post = shared.post(x)
    if post is None:
        return gloo_messages.reduce_scatter(x, op, n, shared.group)
    note("reduce_scatter", x, shared.group)
    shape, count = x.chunk(n)[0].shape, x.numel() // n

    def finish() -> torch.Tensor:
        shared.wait(post)
        total = torch.empty(shape, dtype=x.dtype)
        _sum(post, op, shared, x.dtype, shared.me * count, total)
        shared.land(post)
        return total

    return Flight([], finish, (x,))


def all_reduce(x: torch.Tensor, op: str, shared: Shared) -> Flight:
    return all_reduce_(x.clone(), op, shared)


def all_reduce_(x: torch.Tensor, op: str, shared: Shared) -> Flight:
    post = shared.post(x)
    if post is None:
        return gloo_messages.all_reduce_(x, op, shared.group)
    note("all_reduce", x, shared.group)

    def finish() -> torch.Tensor:
        shared.wait(post)
        if shared.n == 2:
            COMBINE[op](x.view(-1), shared.read(post, 1 - shared.me, x.dtype, 0, x.numel()))
        else:
            _sum(post, op, shared, x.dtype, 0, x)
        shared.land(post)
        return x

    return Flight([], finish, (x,))


def _sum(post: Post, op: str, shared: Shared, dtype: torch.dtype, first: int, total: torch.Tensor) -> None:
    """In the order of ranks, the same on all of them."""
    shared.copy(post, 0, first * dtype.itemsize, total)
    for rank in range(1, shared.n):
        COMBINE[op](total.view(-1), shared.read(post, rank, dtype, first, total.numel()))
