"""Notes of a plan about dims that are padded so that they split."""
from __future__ import annotations

from autoshard.base.graph import Graph


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
    if not found:
        return ()
    parts = (f"{true:,} computed as {n:,} ({names[0]}{more(names)})" for (true, n), names in found.items())
    return (f"dims that do not divide are padded: {'; '.join(parts)}; stored and saved in their true lengths",)
