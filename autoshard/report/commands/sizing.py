"""Draws a sweep over batches, devices and clusters in a terminal."""
from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console, Group
from rich.markup import escape
from rich.text import Text

from autoshard.report.tables import report_console, section, table
from autoshard.study.sizing import HEADINGS, Point, Sizing

LEFT = ("", "cluster", "mesh")


def show(found: Sizing, model: str = "", console: Console | None = None) -> None:
    """A row per point of a `sizing.Sizing`; below, why some have no plan."""
    points = found.ordered()
    rows = [p.cells() for p in points]
    shown = [i for i, name in enumerate(HEADINGS) if name not in _left_out(points)]
    grid = table(*(("!" if HEADINGS[i] in LEFT else ">") + HEADINGS[i] for i in shown))
    for p, row in zip(points, rows, strict=True):
        grid.add_row(*(escape(row[i]) for i in shown), style="bold" if p.best else "dim" if p.plan is None else None)
    lines = ["* no other case of that cluster trains faster with at most as many devices. parts: micro-batches.",
             *(f"{p.case}: {p.why}" for p in points if p.why)]
    clusters = sorted({p.case.cluster for p in points})
    title = f"Sweep{f' of {model}' if model else ''}{f' on {clusters[0]}' if len(clusters) == 1 else ''}"
    (console or report_console()).print(section(title, Group(grid, *(Text(line, style="dim") for line in lines))))


def _left_out(points: Sequence[Point]) -> set[str]:
    """Columns that say nothing: what is not varied; samples where there are tokens, and the other way round."""
    alike = {"cluster": {p.case.cluster for p in points}, "limit": {p.case.memory for p in points}}
    planned = [p for p in points if p.plan is not None]
    has_tokens = bool(planned) and all(p.tokens_s is not None for p in planned)
    return {name for name, values in alike.items() if len(values) < 2} | {"samples/s" if has_tokens else "tokens/s"}
