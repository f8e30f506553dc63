"""Draws what differs between two plans."""
from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rich.console import Console, RenderableType
from rich.markup import escape
from rich.text import Text

from autoshard.base import quantities
from autoshard.report.collapse import collapse
from autoshard.report.tables import report_console, section, table

MOST = 40


def show(found: Any, names: tuple[str, str], console: Console | None = None) -> None:
    """Print a `diff.PlanDiff` between the plans called `names`."""
    console = console or report_console()
    for part in parts(found, names):
        console.print(part)


def parts(found: Any, names: tuple[str, str]) -> Iterator[RenderableType]:
    """Sections without a difference are left out."""
    if found.equal:
        yield Text(f"{names[0]} and {names[1]} are the same plan.")
        return
    a, b = names
    if found.settings:
        yield section("Settings", _pairs([(c.name, _text(c.before), _text(c.after)) for c in found.settings], a, b))
    if found.numbers:
        rows = [(f"{c.kind}: {c.name}", _number(c.kind, c.before), _number(c.kind, c.after)) for c in found.numbers]
        yield section("Predicted, per rank and step", _pairs(rows, a, b))
    if found.collectives:
        yield section("Collectives, per rank and step", _collectives(found, a, b))
    if found.placements:
        folded = collapse((_name(c), (c.kind, c.before, c.after)) for c in found.placements)
        rows = [(f"{row.name.removesuffix('.(layer)')} {quantities.times(row.copies)}".strip(), _text(row.payload[1]), _text(row.payload[2]))
                for row in folded]
        yield section("Placements", _pairs(rows[:MOST], a, b))
        if len(rows) > MOST:
            yield Text(f"  and {len(rows) - MOST} more; --json has all", style="dim")
    if found.other_ops:
        yield Text(f"{found.other_ops} ops or copies differ beyond the tensors named above.", style="dim")


def _name(change: Any) -> str:
    return f"{change.name}.(layer)" if change.kind == "activation" else change.name


def _pairs(rows: list[tuple[str, str, str]], a: str, b: str) -> RenderableType:
    grid = table("!", escape(a), escape(b))
    for row in rows:
        grid.add_row(*map(escape, row))
    return grid


def _collectives(found: Any, a: str, b: str) -> RenderableType:
    grid = table("!collective", "!axis", "!pass", f">{escape(a)}", f">{escape(b)}")
    for c in found.collectives:
        cells = [f"{n} x, {quantities.size(size)}, {quantities.seconds(s)}" if n else "-" for n, size, s in (c.before, c.after)]
        grid.add_row(c.kind, c.axis, c.phase, *cells)
    return grid


def _number(kind: str, value: Any) -> str:
    if value is None:
        return "-"
    return quantities.seconds(value) if kind == "predicted" else quantities.size(value)


def _text(value: Any) -> str:
    return "-" if value is None else str(value)
