"""`autoshard plan` and `autoshard report`."""
from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from autoshard.cli.common import HtmlOption, JsonOption, OutputOption, QuietOption, end_with
from autoshard.cli.progress import progress_shown
from autoshard.cli.request import Request
from autoshard.errors import InfeasibleError, UsageError

EXAMPLES = """
[bold]Examples[/bold]

  autoshard plan gpt:tiny --mesh tp=2 --cluster cpu-gloo

  autoshard plan llama:8b --mesh dp=2,tp=4 --batch 8 --seq 4096 --dtype bf16 --memory 70GiB -o plan.json

  autoshard plan gpt:124m --mesh dp=2,tp=2 --html report.html --with-baselines

  autoshard plan llama:8b --devices 64 --batch 64 --seq 8192 --dtype bf16      the mesh is chosen, with or without pipeline stages

  autoshard plan mypackage.model:factory --mesh dp=8        factory() returns (model, example_inputs)

  autoshard plan --hf config.json --mesh dp=4 --inference   a Hugging Face config

  autoshard plan gpt:124m --mesh dp=2,tp=2 --seed 'h.*.attn.c_attn.weight=tp,-' --seed 'input:0=dp,?'

  autoshard plan llama:tiny --mesh tp=2 --json | python -m json.tool
"""


def plan(request: Request, output: OutputOption = None, html: HtmlOption = None,
         with_baselines: Annotated[bool, typer.Option(
             "--with-baselines", help="With --html: plans made by hand (DDP, FSDP, tensor parallel ...) beside the chosen one.")] = False,
         as_json: JsonOption = False, quiet: QuietOption = False) -> None:
    """Search the cheapest plan for MODEL on a mesh, and print what was chosen and why it costs what it costs."""
    from autoshard.base.plan import check_writable

    if with_baselines and html is None:
        raise UsageError("--with-baselines is a part of the HTML report; give --html report.html too, or use `autoshard compare`")
    if with_baselines and request.is_open:
        raise UsageError("--with-baselines needs --mesh and a number of micro-batches; plan again with those that were chosen")
    for path in filter(None, (output, html)):
        check_writable(path)
    with progress_shown(not quiet) as progress:
        plain = html is None or request.is_open
        found = _plan_and_page(request, html, progress) if plain else _plan_with_page(request, html, with_baselines, progress)
    if output is not None:
        found.save(output)
    if as_json or not quiet:
        print_plan(found, as_json)
    if output is not None and not (as_json or quiet):
        typer.echo(f"Plan saved to {output}; show it again with: autoshard report {output}", err=True)
    if html is not None and not (as_json or quiet):
        typer.echo(f"Report saved to {html}; open it in a browser", err=True)
    end_with([found.status], quiet)


def report(
    path: Annotated[Path, typer.Argument(metavar="PLAN", help="A plan file, as `autoshard plan -o` writes it.")],
    html: HtmlOption = None,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Show a saved plan again: in the terminal, as JSON, or as an HTML file."""
    from autoshard.base.plan import Plan

    found = Plan.load(path)
    if html is not None:
        from autoshard.report.html import write

        write(html, found)
    if as_json or (html is None and not quiet):
        print_plan(found, as_json)
    elif not quiet:
        typer.echo(f"Report saved to {html}; open it in a browser", err=True)


def print_plan(plan: Any, as_json: bool) -> None:
    if as_json:
        from autoshard.report.what import to_json

        sys.stdout.write(to_json(plan))
        return
    from autoshard.cli.shapes import show_shapes
    from autoshard.report.text import show

    show(plan)
    show_shapes(plan)


def _plan_and_page(request: Request, html: Path | None, progress: Callable[[str, str], None]) -> Any:
    found = request.plan(progress)
    if html is not None:
        from autoshard.report.html import write

        write(html, found)
    return found


def _plan_with_page(request: Request, html: Path, with_baselines: bool, progress: Callable[[str, str], None]) -> Any:
    """The plan, with its page written: what is known beyond the plan while the model is at hand is in it too."""
    from autoshard.decide.phase_timer import PhaseTimer
    from autoshard.planner.one_stage import decide, prices
    from autoshard.planner.stages import plan_traced
    from autoshard.report.html import write
    from autoshard.study.alternatives import alternatives
    from autoshard.study.compare import comparison
    from autoshard.study.explain import chosen_by

    clock = PhaseTimer(progress)
    asked = request.traced(progress, clock)
    stages, beside, known = asked.options.pipeline.stages(asked.mesh), None, ()
    if with_baselines:
        beside = comparison(asked.traced, asked.mesh, asked.options, model=asked.model, has_loss=asked.has_loss, clock=clock,
                            own=asked.own)
        found = beside.chosen.plan
        if found is None:
            raise InfeasibleError(beside.chosen.note)
    elif stages > 1:
        found = plan_traced(asked.traced, asked.mesh, asked.options, clock=clock, has_loss=asked.has_loss, model_info=asked.model)
    if stages == 1:
        table = prices(asked.traced, asked.mesh, asked.options, clock=clock)
        if beside is None:
            found = decide(table, asked.options, clock=clock, has_loss=asked.has_loss, model_info=asked.model)
        known = tuple(alternatives(chosen_by(found, table)))
    progress("report", "")
    write(html, found, beside, known)
    return found
