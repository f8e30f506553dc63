"""The schedules that can be asked for by name. One generator per file, one row of `SCHEDULES` each."""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from autoshard.errors import ScheduleError
from autoshard.pipeline.action_lists.actions import ActionTable
from autoshard.pipeline.schedules.gpipe import gpipe
from autoshard.pipeline.schedules.interleaved import interleaved
from autoshard.pipeline.schedules.one_f_one_b import one_f_one_b
from autoshard.pipeline.schedules.zbv import zbv
from autoshard.pipeline.schedules.zero_bubble import zb1p, zb2p


@dataclass(frozen=True)
class Family:
    """`generate(ranks, microbatches, chunks, warmup)`; a rank may have `chunks` stages, of which the first is the default."""

    generate: Callable[[int, int, int, int], ActionTable]
    chunks: range = range(1, 2)
    split_backward: bool = False
    takes_warmup: bool = False


MOST_CHUNKS = 1 << 16
SCHEDULES: dict[str, Family] = {
    "gpipe": Family(gpipe),
    "1f1b": Family(one_f_one_b, takes_warmup=True),
    "interleaved": Family(interleaved, chunks=range(2, MOST_CHUNKS)),
    "zb1p": Family(zb1p, chunks=range(1, MOST_CHUNKS), split_backward=True),
    "zb2p": Family(zb2p, split_backward=True),
    "zbv": Family(zbv, chunks=range(2, 3), split_backward=True),
}


def make_schedule(name: str, ranks: int, microbatches: int, chunks: int | None = None, warmup: int = 0) -> ActionTable:
    """The computations of schedule `name`. `chunks`: stages per rank; `warmup`: see `one_f_one_b`."""
    if name not in SCHEDULES:
        raise ScheduleError(f"no schedule {name!r}; there are {', '.join(SCHEDULES)}")
    family = SCHEDULES[name]
    chunks = family.chunks[0] if chunks is None else chunks
    for word, number, least in (("rank", ranks, 1), ("micro-batch", microbatches, 1), ("chunk", chunks, 1), ("more forward", warmup, 0)):
        if number < least:
            raise ScheduleError(f"a pipeline needs at least {least} {word}, not {number}")
    if chunks not in family.chunks:
        raise ScheduleError(f"schedule {name!r} has {_words(family.chunks)} on a rank, not {chunks}; "
                            f"with {chunks} there are {', '.join(n for n, f in SCHEDULES.items() if chunks in f.chunks)}")
    if warmup and not family.takes_warmup:
        raise ScheduleError(f"schedule {name!r} has no warm-up to choose; {', '.join(n for n, f in SCHEDULES.items() if f.takes_warmup)} has")
    return family.generate(ranks, microbatches, chunks, warmup)


def _words(chunks: range) -> str:
    stages = f"{chunks[0]} stage{'s' * (chunks[0] > 1)}"
    return f"{stages} or more" if chunks[-1] > chunks[0] else stages
