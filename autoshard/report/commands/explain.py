"""Draws edge tables, op tables and forced choices in a terminal."""
from __future__ import annotations

from functools import singledispatch
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.markup import escape
from rich.text import Text

from autoshard.base import quantities
from autoshard.report.commands import diff as diff_report
from autoshard.report.tables import report_console, section, table
from autoshard.study.explain import EdgeTable, OpTable, WhyNot
from autoshard.study.layout_pairs import LayoutPair

CHOSEN = "chosen"


def show(found: Any, console: Console | None = None) -> None:
    """Print what `autoshard explain` found."""
    console = console or report_console()
    for part in _parts(found):
        console.print(part)


@singledispatch
def _parts(found: Any) -> tuple[RenderableType, ...]:
    raise TypeError(f"no picture for {type(found).__name__}")


@_parts.register
def _(found: EdgeTable) -> tuple[RenderableType, ...]:
    grid = table("source", "target", "redistribution", ">bytes", ">cost", ">op", "!")
    for row in found.rows:
        grid.add_row(escape(row.source), escape(", ".join(row.targets)), row.words, quantities.size(row.nbytes) if row.nbytes else "0",
                     quantities.seconds(row.seconds), quantities.seconds(row.compute_s), CHOSEN if row.chosen else "",
                     style="bold" if row.chosen else None)
    lines = [f"{found.value} is {quantities.shape(found.shape)} {quantities.dtype(found.dtype)}, made by {found.maker}",
             f"input {found.input} of {found.reader}"]
    tail = ["source: the layout it is made in; target: the layouts of all inputs of the reader under one of its strategies;",
            "cost: seconds of the cheapest redistribution; op: the reader's own seconds under that strategy."]
    return (section("Edge", Group(*map(Text, lines))), section("What changing the layout takes", Group(
        grid, *(Text(t, style="dim") for t in [*tail, *_more(found.left_out)]))))


@_parts.register
def _(found: LayoutPair) -> tuple[RenderableType, ...]:
    grid = table("source", "target", "redistribution", ">bytes", ">cost")
    grid.add_row(escape(found.source), escape(found.target), found.words, quantities.size(found.nbytes) if found.nbytes else "0",
                 quantities.seconds(found.seconds))
    tail = [] if found.in_plans else ["plans nest axes in mesh order, but of weights and their gradients: none has this pair; the price is that of "
                                      "the cheapest sequence there would be"]
    title = Text(f"{found.value} is {quantities.shape(found.shape)}")
    return (section("From layout to layout", Group(title, grid, *(Text(t, style="dim") for t in tail))),)


@_parts.register
def _(found: OpTable) -> tuple[RenderableType, ...]:
    grid = table("inputs", "outputs", ">op", ">inside", ">moving inputs", ">output", ">regret", "!")
    for row in found.rows:
        regret = "impossible" if row.regret_s is None else quantities.seconds(row.regret_s)
        moved = "-" if row.moved_s is None else quantities.seconds(row.moved_s)
        grid.add_row(escape(", ".join(row.inputs)) or "-", escape(", ".join(row.outputs)) or "-", quantities.seconds(row.compute_s + row.update_s),
                     quantities.seconds(row.inner_s), moved, quantities.size(row.nbytes), regret,
                     CHOSEN if row.chosen else "", style="bold" if row.chosen else None)
    tail = ["op: seconds on local shapes (optimizer's update for a parameter); inside: collectives of its implementation;",
            "regret: how much longer a step takes if only this op changes. With its neighbours free to follow (--why-not) it is less."]
    return (section(escape(found.where), Group(grid, *(Text(t, style="dim") for t in [*tail, *_more(found.left_out)]))),)


@_parts.register
def _(found: WhyNot) -> tuple[RenderableType, ...]:
    word = "slower" if found.regret_s >= 0 else "faster"
    share = quantities.share(abs(found.regret_s), found.before_s)
    what = (f"Without the seed {found.key}={found.seed}" if found.freed else
            f"With {found.key}={found.layout}{f' instead of the seed {found.seed}' if found.seed else ''}")
    line = (f"{what} a step takes {quantities.seconds(found.after_s)} instead of {quantities.seconds(found.before_s)}: "
            f"{quantities.seconds(abs(found.regret_s))} ({share or '0 %'}) {word}.")
    names = ("seeded", "free" if found.freed else "forced") if found.seed else ("free", "forced")
    proof = "; ".join(f"{name}: {status}" for name, status in zip(names, found.statuses, strict=True))
    return (section("Why not?", Group(Text(line), Text(proof, style="dim"))), *diff_report.parts(found.difference, names))


def _more(left_out: int) -> list[str]:
    return [f"{left_out} dearer rows are left out; --rows shows more."] if left_out else []
