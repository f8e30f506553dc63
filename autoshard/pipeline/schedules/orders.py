"""The order in which a rank takes its (stage, micro-batch) pairs, and how forwards and backwards are merged."""
from __future__ import annotations

from collections.abc import Iterator, Sequence

from autoshard.pipeline.action_lists.actions import Action, Kind

Pair = tuple[int, int]  # stage, micro-batch


def rounds(ranks: int, microbatches: int) -> list[range]:
    """Micro-batches in rounds of at least `ranks`, as equal as possible and the larger ones first; fewer micro-batches are one round."""
    number = max(1, microbatches // ranks)
    short, longer = divmod(microbatches, number)
    sizes = [short + 1] * longer + [short] * (number - longer)
    starts = [sum(sizes[:i]) for i in range(number)]
    return [range(start, start + size) for start, size in zip(starts, sizes)]


def by_rounds(rank: int, ranks: int, chunks: Sequence[int], microbatches: int) -> list[Pair]:
    """Depth first: a round passes through all `chunks` of this rank before the next round begins."""
    return [(chunk * ranks + rank, m) for these in rounds(ranks, microbatches) for chunk in chunks for m in these]


def alternate(forwards: Sequence[Pair], backwards: Sequence[Pair], warmup: int) -> Iterator[Action]:
    """`warmup` forwards, then one forward and one backward in turn, then the backwards that are left."""
    yield from (Action("F", *pair) for pair in forwards[:warmup])
    for i, pair in enumerate(backwards):
        yield from (Action("F", *next_one) for next_one in forwards[warmup + i:warmup + i + 1])
        yield Action("B", *pair)


def delay_weights(actions: Iterator[Action], delay: int) -> Iterator[Action]:
    """The same with every backward split: W of a micro-batch follows the I that comes `delay` backwards later."""
    waiting: list[Pair] = []
    for action in actions:
        if action.kind != "B":
            yield action
            continue
        pair = (action.stage, action.microbatch or 0)
        yield Action("I", *pair)
        waiting.append(pair)
        if len(waiting) > delay:
            yield Action("W", *waiting.pop(0))
    yield from (Action("W", *pair) for pair in waiting)


def several(kind: Kind, stage: int, microbatches: range) -> list[Action]:
    return [Action(kind, stage, m) for m in microbatches]
