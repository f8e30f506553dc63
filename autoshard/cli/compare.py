"""`autoshard compare`."""
from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from autoshard.cli.common import HtmlOption, JsonOption, QuietOption, end_with
from autoshard.cli.progress import progress_shown
from autoshard.cli.request import Request
from autoshard.errors import InfeasibleError

EXAMPLES = """
[bold]Examples[/bold]

  autoshard compare gpt:124m --mesh tp=4 --batch 8

  autoshard compare llama:8b --mesh dp=8,tp=8 --batch 16 --seq 8192 --dtype bf16

  autoshard compare gpt:tiny --mesh d=2 --cluster cpu-gloo --save-dir plans        a plan file for each
"""


def compare(request: Request,
            save_dir: Annotated[Path | None, typer.Option(help="Save every plan as JSON in this folder.")] = None,
            html: HtmlOption = None, as_json: JsonOption = False, quiet: QuietOption = False) -> None:
    """Price DDP, ZeRO, FSDP and tensor parallelism beside the plan that the search chooses for MODEL."""
    from autoshard.base.plan import check_folder, check_writable

    if save_dir is not None:
        check_folder(save_dir)
    if html is not None:
        check_writable(html)
    with progress_shown(not quiet) as progress:
        asked = request.traced(progress)
        from autoshard.decide.phase_timer import PhaseTimer
        from autoshard.study.compare import comparison, save

        found = comparison(asked.traced, asked.mesh, asked.options, model=asked.model, has_loss=asked.has_loss,
                           clock=PhaseTimer(progress), own=asked.own)
    if save_dir is not None:
        save(found, save_dir)
    if html is not None:
        if found.chosen.plan is None:
            raise InfeasibleError(found.chosen.note)
        from autoshard.report.html import write

        write(html, found.chosen.plan, found)
    if as_json:
        sys.stdout.write(json.dumps(found.to_dict(), indent=1, sort_keys=True) + "\n")
    elif not quiet:
        from autoshard.report.compare import show

        show(found)
    end_with([found.chosen.note], quiet)
