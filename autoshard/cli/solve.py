"""`autoshard solve`."""
from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from autoshard.cli.common import JsonOption, OutputOption, QuietOption

EXAMPLES = """
[bold]Examples[/bold]

  autoshard solve problem.json.gz --time-limit 30 -o answer.json

  autoshard solve problem.json --json
"""
STARTED = time.monotonic()  # so that a time limit counts the imports too


def solve(
    problem: Annotated[Path, typer.Argument(help="A contest problem: .json or .json.gz.")],
    time_limit: Annotated[float, typer.Option(help="Seconds, reading and writing included.")] = 60.0,
    threads: Annotated[int, typer.Option(help="Threads the search may use.")] = 2,
    seed: Annotated[int, typer.Option(help="Seed of the randomised searches.")] = 0,
    output: OutputOption = None,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Solve a bare search problem (format of the ASPLOS 2025 contest on intra-operator parallelism); Ctrl-C keeps the best so far."""
    from autoshard.search.contest.command import solve_command

    raise typer.Exit(solve_command(str(problem), time_limit, threads, seed, None if output is None else str(output),
                                   as_json, quiet, start=STARTED))
