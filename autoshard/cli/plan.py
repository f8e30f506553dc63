"""`autoshard plan` and `autoshard report`."""
from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from autoshard.cli.common import JsonOption, OutputOption, QuietOption
from autoshard.cli.progress import progress_shown
from autoshard.cli.request import Request

EXAMPLES = """
[bold]Examples[/bold]

  autoshard plan gpt:tiny --mesh tp=2 --cluster cpu-gloo

  autoshard plan llama:8b --mesh dp=2,tp=4 --batch 8 --seq 4096 --dtype bf16 --memory 70GiB -o plan.json

  autoshard plan mypackage.model:factory --mesh dp=8        factory() returns (model, example_inputs)

  autoshard plan --hf config.json --mesh dp=4 --inference   a Hugging Face config

  autoshard plan gpt:124m --mesh dp=2,tp=2 --seed 'h.*.attn.c_attn.weight=tp,-' --seed 'input:0=dp,?'

  autoshard plan llama:tiny --mesh tp=2 --json | python -m json.tool
"""


def plan(request: Request, output: OutputOption = None, as_json: JsonOption = False, quiet: QuietOption = False) -> None:
    """Search the cheapest plan for MODEL on a mesh, and print what was chosen and why it costs what it costs."""
    from autoshard.plan import check_writable

    if output is not None:
        check_writable(output)
    with progress_shown(not quiet) as progress:
        found = request.plan(progress)
    if output is not None:
        found.save(output)
    if as_json or not quiet:
        print_plan(found, as_json)
    if output is not None and not (as_json or quiet):
        typer.echo(f"Plan saved to {output}; show it again with: autoshard report {output}", err=True)


def report(
    path: Annotated[Path, typer.Argument(metavar="PLAN", help="A plan file, as `autoshard plan -o` writes it.")],
    as_json: JsonOption = False,
) -> None:
    """Show a saved plan again."""
    from autoshard.plan import Plan

    print_plan(Plan.load(path), as_json)


def print_plan(plan: Any, as_json: bool) -> None:
    if as_json:
        from autoshard.report.what import to_json

        sys.stdout.write(to_json(plan))
        return
    from autoshard.report.text import show

    show(plan)
