"""Draws time against memory in a terminal."""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console, Group
from rich.markup import escape
from rich.text import Text

from autoshard.base import quantities
from autoshard.report.tables import report_console, section, table

WIDTH = 14


def show(points: Sequence[Any], console: Console | None = None) -> None:
    """A row and a bar per `sweep.Point`; below, why the smallest does not fit."""
    console = console or report_console()
    slowest = max((p.plan.objective_s for p in points if p.plan), default=0.0)
    grid = table(">budget", ">step", "!", ">peak", ">split", ">saved", ">gap", ">a GiB", "peak at")
    for p in points:
        if p.plan is None:
            grid.add_row(quantities.size(p.budget), "-", "does not fit", style="dim")
            continue
        bar = "#" * max(1, round(WIDTH * p.plan.objective_s / slowest))
        peak = p.plan.fullest.peak
        grid.add_row(quantities.size(p.budget), quantities.seconds(p.plan.objective_s), bar, quantities.size(p.plan.memory["total"]),
                     f"{100 * p.split:.0f} %", quantities.size(p.plan.memory["saved"]), "0 %" if p.plan.gap < 1e-9 else f"{100 * p.plan.gap:.2g} %",
                     "" if p.gib_s is None else quantities.seconds(p.gib_s),
                     escape(peak.module or peak.op))
    lines = [Text("split: share of the weights that are stored split; a GiB: what one less per rank costs of a step, down to the next budget.",
                  style="dim")]
    lines += [Text(p.why) for p in points if p.plan is None][:1]
    console.print(section("Step time by memory per rank", Group(grid, *lines)))
