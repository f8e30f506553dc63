"""The shapes that a pipeline may have: how devices, batch and schedule divide.

All stages have the same submesh (dp, tp): transfers are one to one, and each stage may use its submesh as it likes. Without stages there may be a
third axis between the two, and tp may reach over nodes: with ranks that fill nodes in order these are all meshes of so many axes.
"""
from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from autoshard.errors import MeshError
from autoshard.pipeline.action_lists.actions import ActionTable
from autoshard.pipeline.schedules import SCHEDULES, make_schedule

CHUNKS = (1, 2, 4)
MOST_ROUNDS = 32
"""Micro-batches per rank of the pipeline; with more of them the bubble is below 1/32, and they only get smaller. With fewer than one some
ranks always wait; such a shape must be asked for."""


@dataclass(frozen=True)
class Slot:
    """Where a stage runs, and on how much: a submesh, and the rows of a micro-batch over all of it. `mp`: an axis between the other two."""

    dp: int
    tp: int
    rows: int
    mp: int = 1

    @property
    def ranks(self) -> int:
        return self.dp * self.mp * self.tp


@dataclass(frozen=True)
class Shape:
    """One way to run a step; `microbatches` of `slot.rows` rows are the batch."""

    pp: int
    slot: Slot
    microbatches: int
    schedule: str
    chunks: int = 1
    warmup: int = 0

    @property
    def stages(self) -> int:
        return self.pp * self.chunks

    def table(self) -> ActionTable:
        return make_schedule(self.schedule, self.pp, self.microbatches, self.chunks, self.warmup)

    def __str__(self) -> str:
        more = (f" v={self.chunks}" if self.chunks > 1 else "") + (f" warmup={self.warmup}" if self.warmup else "")
        middle = f",mp={self.slot.mp}" if self.slot.mp > 1 else ""
        return f"pp={self.pp},dp={self.slot.dp}{middle},tp={self.slot.tp} {self.microbatches} x {self.slot.rows} rows {self.schedule}{more}"


@dataclass(frozen=True)
class Room:
    """What is given: devices, how many of them a tensor axis may have, rows of a batch, and blocks that can be stages. What is not None
    of pp, dp, tp and microbatches is fixed. `warmups`: schedules that can warm up for longer are also tried so. `axes`: at most so many, without
    stages."""

    devices: int
    most_tp: int
    batch: int
    blocks: int
    pp: int | None = None
    dp: int | None = None
    tp: int | None = None
    microbatches: int | None = None
    schedules: Sequence[str] = tuple(SCHEDULES)
    chunks: Sequence[int] = CHUNKS
    warmups: bool = True
    axes: int = 2


def shapes(room: Room) -> list[Shape]:
    """Every shape that divides evenly. Raises MeshError with what does not, if there is none."""
    slots = [(pp, *slot) for pp, dp, mp, tp in _factorings(room) for slot in _microbatches(room, pp, dp, mp, tp)]
    found = [shape for pp, slot, count in slots for shape in _scheduled(room, pp, slot, count)]
    if not found:
        raise MeshError(f"no pipeline of {room.devices} devices divides a batch of {room.batch} rows and {room.blocks} blocks evenly, with at most "
                        f"{room.most_tp} devices in a tensor axis: change the number of devices, the batch, or what is fixed")
    return found


def _divisors(number: int) -> Iterator[int]:
    return (n for n in range(1, number + 1) if number % n == 0)


def _factorings(room: Room) -> Iterator[tuple[int, int, int, int]]:
    """(pp, dp, mp, tp)."""
    for pp in _divisors(room.devices):
        for tp in _divisors(room.devices // pp):
            dp = room.devices // pp // tp
            given = all(fixed in (None, value) for fixed, value in ((room.pp, pp), (room.dp, dp), (room.tp, tp)))
            if given and pp <= room.blocks and (pp == 1 or tp <= room.most_tp or room.tp == tp):
                yield from ((pp, dp // mp, mp, tp) for mp in _middles(room, pp, dp, tp))


def _middles(room: Room, pp: int, dp: int, tp: int) -> Iterator[int]:
    yield 1
    if pp == 1 and tp > 1 and room.axes > 2 and room.dp is None:
        yield from (mp for mp in _divisors(dp) if 1 < mp < dp)


def _microbatches(room: Room, pp: int, dp: int, mp: int, tp: int) -> Iterator[tuple[Slot, int]]:
    """A batch that stays whole need not divide: axes may split other dims. Of two names for one mesh there is the first."""
    for count in _divisors(room.batch):
        rows = room.batch // count
        few = pp <= count <= MOST_ROUNDS * pp if room.microbatches is None else count == room.microbatches
        free = pp == 1 and count == 1 and room.dp is None
        twice = pp == dp == mp == 1 and tp > 1 and (free or rows % tp == 0) and room.dp is None
        if few and (free or rows % dp == 0) and not twice:
            yield Slot(dp, tp, rows, mp), count


def _scheduled(room: Room, pp: int, slot: Slot, count: int) -> Iterator[Shape]:
    if pp == 1:
        yield Shape(1, slot, count, "1f1b")
        return
    for name in room.schedules:
        for chunks in (c for c in room.chunks if c in SCHEDULES[name].chunks and pp * c <= room.blocks):
            for warmup in (0, pp - 1) if SCHEDULES[name].takes_warmup and room.warmups else (0,):
                yield Shape(pp, slot, count, name, chunks, warmup)
