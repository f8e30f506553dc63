"""Modules that the user put into stages: which stages may be, then."""
from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase

import numpy as np

from autoshard.errors import UsageError
from autoshard.pipeline.cutting.blocks import Blocks, forward_calls

Pins = Sequence[tuple[str, int]]


def allowed(blocks: Blocks, pinned: Pins, stages: int) -> np.ndarray | None:
    """[s, a, b]: whether blocks a..b-1 are what stage s may be; None where nothing is pinned. Raises UsageError for keys that match nothing,
    that contradict each other, and that leave a stage without blocks."""
    if not pinned:
        return None
    found, count = _stage_of_blocks(blocks, pinned, stages), len(blocks.blocks)
    last = (-1, -1, "the first block")
    for block, (stage, key) in [*sorted(found.items()), (count, (stages, "the last block"))]:
        if stage < last[1] or block - last[0] < stage - last[1]:
            raise UsageError(f"{_seed(key, stage) if block < count else key} and {_seed(last[2], last[1]) if last[0] >= 0 else last[2]} "
                             + ("are not in order of execution" if stage < last[1] else
                                f"leave {block - last[0] - 1} blocks for {stage - last[1] - 1} stages between them")
                             + f"; the blocks are {', '.join(blocks.names)}")
        last = (block, stage, key)
    out = np.ones((stages, count + 1, count + 1), dtype=bool)
    for block, (stage, _) in found.items():
        holds = np.zeros((count + 1, count + 1), dtype=bool)
        holds[:block + 1, block + 1:] = True
        out &= holds == (np.arange(stages) == stage)[:, None, None]
    return out


def check_pinned(blocks: Blocks, pinned: Pins, starts: Sequence[int]) -> None:
    """Raises UsageError where given cuts put a module into another stage than its seed."""
    for block, (stage, key) in _stage_of_blocks(blocks, pinned, len(starts) + 1).items():
        if (there := sum(block >= at for at in starts)) != stage:
            raise UsageError(f"{_seed(key, stage)}: the cuts put {blocks.names[block]} into stage {there}; leave one of them out")


def _stage_of_blocks(blocks: Blocks, pinned: Pins, stages: int) -> dict[int, tuple[int, str]]:
    found: dict[int, tuple[int, str]] = {}
    for key, stage in pinned:
        if stage >= stages:
            raise UsageError(f"{_seed(key, stage)}: the pipeline has {stages} stages, 0 to {stages - 1}")
        own = {i for i, name in enumerate(blocks.names) if fnmatchcase(name, key)}
        own |= {blocks.of_op[op.name] for op in forward_calls(blocks.graph) if op.module and fnmatchcase(op.module, key)}
        if not own:
            raise UsageError(f"{_seed(key, stage)} matches no module that runs; blocks are {', '.join(blocks.names)}")
        for block in own:
            other = found.setdefault(block, (stage, key))
            if other[0] != stage:
                raise UsageError(f"{_seed(*other[::-1])} and {_seed(key, stage)} both match {blocks.names[block]}; keep one of them")
    return found


def _seed(key: str, stage: int) -> str:
    return f"seed {key!r} = stage({stage})"
