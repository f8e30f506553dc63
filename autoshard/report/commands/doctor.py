"""Draws what `autoshard doctor` found."""
from __future__ import annotations

from rich.console import Console
from rich.markup import escape

from autoshard.report.tables import report_console, section, table

STYLE = {"note": "cyan", "warning": "yellow", "failed": "bold red"}


def show(found, console: Console | None = None) -> None:
    """Print findings of `calibrate.doctor` by topic, then what to do."""
    console = console or report_console()
    for topic in dict.fromkeys(f.topic for f in found):
        rows = table("!what", "found")
        for f in (f for f in found if f.topic == topic):
            rows.add_row(escape(f.name), escape(f.value), style=STYLE.get(f.state))
        rows.show_header = False
        console.print(section(topic, rows))
    advised = [f for f in found if f.advice]
    for f in advised:
        console.print(f"[{STYLE[f.state]}]{f.state}[/] {escape(f'{f.topic}, {f.name}: {f.advice}')}")
    if not advised:
        console.print("all is well")
