"""Cuts as Megatron-LM writes them (`--pipeline-model-parallel-layout`): "Et*2|(t*2|)*3t*2L".

E is what runs before the layers, t a layer, L what runs behind them; `|` ends a stage, `*n` repeats what is in front of it, commas mean nothing.
"""
from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import groupby

from autoshard.errors import UsageError
from autoshard.pipeline.cutting.blocks import Blocks

GROUP = re.compile(r"(?:\(([^()]*)\)|([EtL|]))\*(\d+)")


def starts_of(layout: str, blocks: Blocks, stages: int) -> tuple[int, ...]:
    """The blocks at which stages begin, but for the first. Raises UsageError."""
    parts, layers = _expanded(layout).split("|"), layers_of(blocks)
    if not layers:
        raise UsageError(f"layout {layout!r}: the model has no list of layers; name the modules that begin stages instead, cuts=[...]")
    whole = "".join(parts)
    if whole.count("t") != len(layers):
        raise UsageError(f"layout {layout!r} has {whole.count('t')} layers (t), and the model {len(layers)}: {blocks.names[layers[0]]} to "
                         f"{blocks.names[layers[-1]]}")
    behind = layers[-1] + 1 < len(blocks.blocks)
    if not re.fullmatch(r"E?t+L?" if layers[0] else r"t+L?", whole) or "L" in whole and not behind:
        raise UsageError(f"layout {layout!r}: E stands once in front of the layers{'' if layers[0] else ' (the model has nothing there)'}, L once "
                         f"behind them{'' if behind else ' (the model has nothing there)'}")
    if len(parts) != stages or not all(parts):
        raise UsageError(f"layout {layout!r} has {len(parts)} stages{'' if all(parts) else ', some without a layer'}, and the pipeline {stages}")
    return tuple(_start(part, "".join(parts[:s + 1]).count("t"), layers) for s, part in enumerate(parts[1:]))


def layout_of(blocks: Blocks, starts: Sequence[int]) -> str:
    """Inverse of `starts_of`; "" where it has no words for them: a model without a list of layers, or what is before or behind it
    in several stages."""
    layers = layers_of(blocks)
    if not layers:
        return ""
    bounds = [0, *starts, len(blocks.blocks)]
    parts = [_part([("E" if b < layers[0] else "L" if b > layers[-1] else "t" if b in layers else "") for b in range(*ends)])
             for ends in zip(bounds, bounds[1:])]
    if sum("E" in part for part in parts) > 1 or sum("L" in part for part in parts) > 1 or not all(parts):
        return ""
    runs = [(part, len(list(same))) for part, same in groupby(parts[:-1])]
    return "".join(f"({part}|)*{n}" if n > 1 else f"{part}|" for part, n in runs) + parts[-1]


def layers_of(blocks: Blocks) -> list[int]:
    """Blocks that are items of lists of modules."""
    return [i for i, name in enumerate(blocks.names) if name.rpartition(".")[2].isdigit()]


def _start(part: str, before: int, layers: list[int]) -> int:
    """Where a stage begins that has `before` layers in front of it. What runs between two lists goes with the layers behind it."""
    return layers[-1] + 1 if part[0] == "L" else layers[before - 1] + 1 if before else layers[0]


def _part(letters: list[str]) -> str:
    """Several blocks may be in front of the layers, and behind them."""
    count = letters.count("t")
    return "E" * ("E" in letters) + ("t" if count == 1 else f"t*{count}" if count else "") + "L" * ("L" in letters)


def _expanded(layout: str) -> str:
    text = re.sub(r"[\s,]", "", layout)
    while (found := GROUP.search(text)) is not None:
        if int(found[3]) * len(found[1] or found[2]) > 10_000:
            raise UsageError(f"layout {layout!r:.80} has too many layers")
        text = text[:found.start()] + (found[1] or found[2] or "") * int(found[3]) + text[found.end():]
    text = text.replace("()", "")
    if not re.fullmatch(r"[EtL|]+", text):
        raise UsageError(f"cannot read layout {layout!r}; write for example 'Et*2|(t*2|)*3t*2L': E, t for a layer, L, | behind a stage, *n")
    return text
