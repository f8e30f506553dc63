"""Where stages begin: from names of modules as a user gives them, or balanced by the seconds of blocks."""
from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate

import numpy as np

from autoshard.base.graph import Graph
from autoshard.cost.cluster import Cluster
from autoshard.cost.compute import call_seconds
from autoshard.cost.fusion import NOTHING, Fused, untouched
from autoshard.errors import UsageError
from autoshard.pipeline.cutting.blocks import Blocks, forward_calls

BLOCK = "block "
"""In front of a name: the block of exactly this name, wherever else its module runs."""


def names_of(blocks: Blocks, starts: Iterable[int]) -> tuple[str, ...]:
    """What `named` reads as these blocks: paths of modules, with `BLOCK` in front where a path does not say where to cut. That is so of a module
    that runs again later, of a layer with a norm that it shares with others, and of ops of a module that run behind its layers."""
    return tuple(name if _own(blocks, name)[0] == at and _runs(blocks.graph, name) == 1 else BLOCK + name
                 for at, name in ((at, blocks.names[at]) for at in starts))


def named(blocks: Blocks, cuts: Sequence[str], stages: int) -> tuple[int, ...]:
    """The blocks before which to cut. Raises UsageError for paths of which no block begins, for modules that run twice, and for another
    number of stages."""
    if len(cuts) != stages - 1:
        raise UsageError(f"{len(cuts)} cuts ({', '.join(cuts)}) make {len(cuts) + 1} stages, and the pipeline has {stages}; "
                         f"name {stages - 1} modules")
    found = tuple(_start(blocks, name) for name in cuts)
    for before, after, name in zip(found, found[1:], cuts[1:], strict=False):
        if after <= before:
            raise UsageError(f"cut {name!r} does not come behind {cuts[cuts.index(name) - 1]!r} in the model; give cuts in order of execution")
    if found and found[0] == 0:
        raise UsageError(f"cut {cuts[0]!r} is where the model begins, so the first stage would be empty; cut at a later module")
    return found


def _start(blocks: Blocks, name: str) -> int:
    if name.startswith(BLOCK) and name.removeprefix(BLOCK) in blocks.names:
        return blocks.names.index(name.removeprefix(BLOCK))
    own = _own(blocks, name)
    if not own:
        inside = next((b for b in blocks.names if name.startswith(f"{b}.")), None)
        where = f"; it is inside {inside!r}, and stages begin where such a block does" if inside else ""
        raise UsageError(f"cut {name!r} is no module at which a stage can begin{where}; blocks are {', '.join(blocks.names)}")
    runs = _runs(blocks.graph, name)
    if runs > 1:
        raise UsageError(f"cut {name!r}: the module runs {runs} times, with other modules between, so it does not say where to cut; cut at a "
                         f"module that runs once: {', '.join(b for b in blocks.names if _runs(blocks.graph, b) == 1)}"
                         + (f"; or where it runs first: {BLOCK + name!r}" if name in blocks.names else ""))
    return own[0]


def _own(blocks: Blocks, name: str) -> list[int]:
    """Blocks inside the module."""
    return [i for i, label in enumerate(blocks.names) if label == name or label.startswith(f"{name}.")]


def _runs(graph: Graph, name: str) -> int:
    """How often the module runs: stretches of its ops in order of execution."""
    inside = [op.module == name or op.module.startswith(f"{name}.") for op in sorted(forward_calls(graph), key=lambda op: op.traced_at)]
    return sum(now and not before for before, now in zip([False, *inside], inside, strict=False))


def balanced(blocks: Blocks, cluster: Cluster, stages: int, allowed: np.ndarray | None = None) -> tuple[int, ...]:
    """The cut whose slowest stage is fastest, by the seconds of the blocks on one device, forward and backward. `allowed`: see `Course`.
    Raises UsageError for more stages than blocks."""
    n = len(blocks.blocks)
    if stages > n:
        raise UsageError(f"{stages} stages need {stages} blocks at least, and the model has {n}: {', '.join(blocks.names)}; use a shorter pipeline")
    total = [0.0, *accumulate(block_seconds(blocks, cluster))]
    best = {(0, 0): (0.0, ())}
    for s in range(1, stages + 1):
        for end in range(s, n - (stages - s) + 1):
            ways = ((max(best[s - 1, at][0], total[end] - total[at]), (*best[s - 1, at][1], at)) for at in range(s - 1, end)
                    if (s - 1, at) in best and (allowed is None or allowed[s - 1, at, end]))
            if (way := min(ways, default=None)) is not None:
                best[s, end] = way
    return best[stages, n][1][1:]


def even_cuts(graph: Graph, cluster: Cluster, stages: int) -> tuple[str, ...]:
    """`balanced`, by name."""
    blocks = Blocks.of(graph)
    return names_of(blocks, balanced(blocks, cluster, stages))


def block_seconds(blocks: Blocks, cluster: Cluster, phase: str | None = None) -> list[float]:
    """Seconds of each block on one device; `phase`: of ops of that window alone. Ops of backward count for the block of their forward op."""
    out, kept = [0.0] * len(blocks.blocks), untouched(blocks.graph, cluster.device)
    for op in blocks.graph.of_kind("call"):
        if phase not in (None, op.phase):
            continue
        at = blocks.of_op.get(op.name, blocks.at(op.traced_at) if op.traced_at >= 0 else len(out) - 1)
        out[at] += op_seconds(blocks.graph, op.name, cluster, kept.get(op.name, NOTHING))
    return out


def op_seconds(graph: Graph, name: str, cluster: Cluster, kept: Fused = NOTHING) -> float:
    """Seconds of one op on one device. `kept`: what of its tensors it need not read or write."""
    call = graph.calls[name]
    ins, outs = [list(m.logical_shape) for m in call.inputs], [None if m is None else list(m.logical_shape) for m in call.outputs]
    return float(call_seconds(call, ins, outs, cluster.device, kept))
