"""`autoshard compare`."""
from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from autoshard.cli.common import HtmlOption, JsonOption, QuietOption, end_with
from autoshard.cli.progress import progress_shown
from autoshard.cli.request import Request
from autoshard.errors import InfeasibleError

EXAMPLES = """
[bold]Examples[/bold]

  autoshard compare gpt:124m --mesh tp=4 --batch 8

  autoshard compare llama:8b --mesh dp=8,tp=8 --batch 16 --seq 8192 --dtype bf16

  autoshard compare llama:8b --mesh pp=2,dp=4 --batch 32 --microbatches 8 --dtype bf16       ways to run a pipeline

  autoshard compare gpt:tiny --mesh d=2 --cluster cpu-gloo --save-dir plans        a plan file for each
"""


def compare(request: Request,
            save_dir: Annotated[Path | None, typer.Option(help="Save every plan as JSON in this folder.")] = None,
            html: HtmlOption = None, as_json: JsonOption = False, quiet: QuietOption = False) -> None:
    """Price DDP, ZeRO, FSDP and tensor parallelism beside the plan that the search chooses for MODEL."""
    from autoshard.base.files import check_folder, check_outputs

    if save_dir is not None:
        check_folder(save_dir)
    check_outputs({"--html": html}, request.files)
    with progress_shown(not quiet) as progress:
        found = (_of_pipelines if request.has_stages else _of_layouts)(request, progress)
    if save_dir is not None:
        from autoshard.study.compare import save

        save(found, save_dir)
    if html is not None:
        if found.chosen.plan is None:
            raise InfeasibleError(found.chosen.note)
        from autoshard.report.page.html import write

        write(html, found.chosen.plan, found)
    if as_json:
        sys.stdout.write(json.dumps(found.to_dict(), indent=1, sort_keys=True) + "\n")
    elif not quiet:
        from autoshard.report.commands.compare import show

        show(found)
    end_with([found.chosen.note], quiet)


def _of_layouts(request: Request, progress: Callable[[str, str], None]) -> Any:
    asked = request.traced(progress)
    from autoshard.decide.phase_timer import PhaseTimer
    from autoshard.study.compare import comparison

    return comparison(asked.traced, asked.mesh, asked.options, model=asked.model, has_loss=asked.has_loss, clock=PhaseTimer(progress),
                      own=asked.own)


def _of_pipelines(request: Request, progress: Callable[[str, str], None]) -> Any:
    spec, batch = request.batch_of(progress)
    from autoshard.decide.phase_timer import PhaseTimer
    from autoshard.study.compare_pipelines import pipeline_comparison

    return pipeline_comparison(batch, request.given_mesh, request.options, model={"reference": spec.reference, **spec.settings},
                               has_loss=spec.loss_fn is not None, clock=PhaseTimer(progress))
