"""Draws a comparison in a terminal."""
from __future__ import annotations

from rich.console import Console, Group
from rich.markup import escape
from rich.text import Text

from autoshard.base import quantities
from autoshard.report.tables import report_console, section, table


def show(comparison, console: Console | None = None) -> None:
    """Print a `compare.Comparison`."""
    console = console or report_console()
    grid = table("plan", "axes", ">step", ">x", ">exposed", ">moved", ">memory", "!fits")
    base = comparison.chosen.plan.objective_s if comparison.chosen.plan else None
    for i, row in enumerate(comparison.contenders):
        plan = row.plan
        if plan is None:
            grid.add_row(escape(row.name), escape(row.axes), "-", "", "", "", "", "", style="dim")
            continue
        ratio = f"{plan.objective_s / base:.2f}" if base else ""
        grid.add_row(escape(row.name), escape(row.axes), quantities.seconds(plan.objective_s), ratio, quantities.seconds(row.exposed_s),
                     quantities.size(row.moved_bytes), quantities.size(row.memory_bytes), "yes" if row.fits else "no",
                     style="bold" if i == 0 else None)
        if i == 0:
            grid.add_section()
    console.print(section(f"Plans for {comparison.mesh} on {comparison.cluster}, {quantities.size(comparison.limit_bytes)} a rank",
                          Group(grid, *(Text(line, style="dim") for line in _lines(comparison)))))


def _lines(comparison) -> list[str]:
    lines = ["step: predicted seconds; x: times the chosen plan; exposed: communication that compute does not hide; "
             "moved: bytes a rank hands to collectives in a step."]
    notes = dict.fromkeys(row.note for row in comparison.contenders if row.note)
    lines += [f"{', '.join(row.name for row in comparison.contenders if row.note == note)}: {note}" for note in notes]
    best, chosen = comparison.best_baseline, comparison.chosen.plan
    if best is not None and chosen is not None:
        saved = best.plan.objective_s - chosen.objective_s
        share, way = quantities.share(abs(saved), best.plan.objective_s) or "0 %", "faster" if saved >= 0 else "slower"
        lines.append(f"The chosen plan is {quantities.seconds(abs(saved))} ({share}) {way} a step than the best baseline that fits, {best.name}.")
    return lines + list(comparison.notes)
