"""AllToAll of rows: every rank sends some of its rows to every rank, how many is known at run time only.

A rank's rows lie in order of where they go. Both sides have counts of them, integers in as many equal parts as there are ranks: the r-th
part of `sends` adds up to what goes to rank r, that of `gets` to what comes from it. The result has `room` rows, whatever came and zeros
after it, so that shapes are known when programs are made. `balanced` is how many rows a rank sends and gets when loads are even: what a
call is priced and listed with.
"""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from autoshard import _torch
from autoshard.base.custom_op import custom_op
from autoshard.collectives.all_to_all import ALL_TO_ALL
from autoshard.collectives.exchange import Exchange
from autoshard.collectives.kind import Collective
from autoshard.errors import CapacityError


def parts(counts: Tensor, n: int) -> list[int]:
    """Rows for (or from) each of `n` ranks."""
    return [int(x) for x in counts.reshape(n, -1).sum(1).tolist()]


def result(x: Tensor, gets: Sequence[int], room: int, where: str) -> tuple[Tensor, list[Tensor]]:
    """An empty result, zero after what will come, and the part of it for each rank. `where`: the layer that it is for. Raises CapacityError,
    before anything is sent."""
    came = sum(gets)
    if came > room:
        raise CapacityError(f"{where}: {came} rows of tokens go to the experts of this rank, which has room for {room}: loads are too uneven for "
                            "expert_capacity; give a larger one (rows that a rank takes, over those of a balanced load), or balance the router")
    out = x.new_empty((room, *x.shape[1:]))
    out[came:].zero_()
    return out, list(out[:came].split(list(gets)))


def reference(xs: Sequence[Tensor], sends: Sequence[Tensor], gets: Sequence[Tensor], room: int, where: str = "experts") -> list[Tensor]:
    """The results of a group's ranks, from what they have, in one process."""
    n = len(xs)
    pieces = [x[:sum(p)].split(p) for x, p in ((x, parts(s, n)) for x, s in zip(xs, sends, strict=True))]
    made = []
    for me in range(n):
        out, places = result(xs[me], parts(gets[me], n), room, where)
        for place, piece in zip(places, (pieces[r][me] for r in range(n)), strict=True):
            place.copy_(piece)
        made.append(out)
    return made


def _run(x: Tensor, sends: Tensor, gets: Tensor, room: int, where: str, balanced: int, group: str) -> Tensor:
    """Through the process group itself, as NCCL has it."""
    through = _torch.process_group(group)
    to, come = parts(sends, through.size()), parts(gets, through.size())
    out, _ = result(x, come, room, where)
    torch.distributed.all_to_all_single(out[:sum(come)], x[:sum(to)].contiguous(), come, to, group=through)
    return out


def _shape(x: Tensor, sends: Tensor, gets: Tensor, room: int, where: str, balanced: int, group: str) -> Tensor:
    return x.new_empty((room, *x.shape[1:]))


def _counted(arguments: Sequence[Any], sent: Any, received: Any) -> int:
    """Bytes of a balanced load."""
    row: int = sent.numel() // max(len(sent), 1)
    return int(arguments[-2]) * row * sent.dtype.itemsize


ALL_TO_ALL_ROWS = Collective(
    "all_to_all_rows", "AllToAll of rows", counted="in", seconds=ALL_TO_ALL.seconds, per_byte=ALL_TO_ALL.per_byte, steps=ALL_TO_ALL.steps,
    exchange=Exchange.ROWS, target=custom_op("all_to_all_rows", "(Tensor x, Tensor sends, Tensor gets, int room, str where, int balanced, "
                                             "str group) -> Tensor", _run, _shape), nbytes=_counted)
