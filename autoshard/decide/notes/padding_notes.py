"""Notes of a plan about dims that are padded so that they split."""
from __future__ import annotations

from autoshard.base.graph import Graph
from autoshard.padding.walk import PADDED


def more(names: list[str]) -> str:
    return f" and {len(names) - 1} more" if len(names) > 1 else ""


def padding_notes(graph: Graph) -> tuple[str, ...]:
    """One line for all lengths, with a weight that has each; empty where nothing is padded."""
    found: dict[tuple[int, int], list[str]] = {}
    for op in graph.of_kind("param"):
        for meta in op.outputs:
            for true, n in zip(meta.true_shape, meta.shape, strict=True) if meta is not None else ():
                if true != n and op.target not in found.setdefault((true, n), []):
                    found[true, n].append(op.target)
    parts = (f"{true:,} computed as {n:,} ({names[0]}{more(names)})" for (true, n), names in found.items())
    stored = (f"dims that do not divide are padded: {'; '.join(parts)}; stored and saved in their true lengths",) if found else ()
    return stored + _where_read(graph)


def _where_read(graph: Graph) -> tuple[str, ...]:
    """Dims that an op of the program pads: features of heads, and rows of inputs."""
    found: dict[tuple[int, int], list[str]] = {}
    for op in graph.of_kind("call"):
        if not op.name.endswith(PADDED) or op.name.removesuffix(PADDED).partition("_")[0] not in ("param", "input"):
            continue
        for old, new in zip(graph.meta(op.refs[0]).shape, op.outputs[0].shape if op.outputs[0] else (), strict=True):
            if old != new:
                found.setdefault((old, new), []).append(graph.op(op.refs[0].op).target or op.refs[0].op)
    parts = (f"{old:,} computed as {new:,} ({names[0]}{more(names)})" for (old, new), names in found.items())
    return (f"heads and rows that do not divide are padded where they are read: {'; '.join(parts)}",) if found else ()
