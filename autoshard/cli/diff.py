"""`autoshard diff`."""
from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from autoshard.cli.common import JsonOption, QuietOption

EXAMPLES = """
[bold]Examples[/bold]

  autoshard diff monday.json tuesday.json

  autoshard diff plans/ddp.json plans/chosen.json --json
"""
DIFFERENT = 1


def diff(
    a: Annotated[Path, typer.Argument(metavar="PLAN_A", help="A plan file.")],
    b: Annotated[Path, typer.Argument(metavar="PLAN_B", help="The plan to compare it with.")],
    as_json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Show what differs between two plans: placements, collectives, times, memory. Exit code 0: nothing, 1: something."""
    from autoshard.base.plan import Plan
    from autoshard.study.diff import diff as compare

    found = compare(Plan.load(a), Plan.load(b))
    if as_json:
        sys.stdout.write(json.dumps(found.to_dict(), indent=1, sort_keys=True) + "\n")
    elif not quiet:
        from autoshard.report.commands.diff import show

        show(found, (str(a), str(b)))
    raise typer.Exit(0 if found.equal else DIFFERENT)
