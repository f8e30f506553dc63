"""Draws what changed numbers of a machine would do in a terminal."""
from __future__ import annotations

from rich.console import Console, Group
from rich.markup import escape
from rich.text import Text

from autoshard.base import quantities
from autoshard.report.tables import report_console, section, table
from autoshard.study.what_if import HEADINGS, WhatIf, WhatIfs


def show(found: WhatIfs, console: Console | None = None) -> None:
    """Print a `what_if.WhatIfs`: today, and a row per scenario; below, why some do not fit."""
    console = console or report_console()
    *headings, _ = HEADINGS  # what changes is below: it is long
    grid = table(*(f"!{h}" if i == 0 else f">{h}" for i, h in enumerate(headings)))
    for i, cells in enumerate(found.cells()):
        grid.add_row(*map(escape, cells[:-1]), style="bold" if i == 0 else None)
        if i == 0:
            grid.add_section()
    changes = [Text(f"{row.asked}: {cells[-1]}") for row, cells in zip(found.rows, found.cells()[1:], strict=True) if row.plan is not None]
    lines = ["gain: seconds of a step less than today, or more where it is negative; today's plan: a step of it there, planned as today."]
    lines += [f"{row.asked}: the gain is between {quantities.seconds(row.least_gain_s(found.today))} and "
              f"{quantities.seconds(row.most_gain_s(found.today))}, by the bounds" for row in found.rows if _is_vague(found, row)]
    lines += [f"{row.asked}: {row.why}" for row in found.rows if row.plan is None]
    title = f"What if, for {found.today.mesh} on {found.today.cluster.get('name')}"
    console.print(section(title, Group(grid, *changes, *(Text(t, style="dim") for t in lines))))


def _is_vague(found: WhatIfs, row: WhatIf) -> bool:
    """Whether the bounds leave more open than rounding."""
    return row.plan is not None and max(row.plan.gap, found.today.gap) > 1e-4
