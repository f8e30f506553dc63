"""`autoshard plan` and `autoshard report`."""
from __future__ import annotations

import json
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

  autoshard plan llama:8b --mesh dp=8,tp=8 --batch 16 --seq 8192 --dtype bf16 --memory 32GiB --worth      what a GiB more or less changes

  autoshard plan llama:8b --mesh dp=8,tp=8 --batch 16 --seq 8192 --dtype bf16 --what-if links.infiniband.bandwidth=2x --what-if memory=+16GiB

[bold]What if[/bold]

--what-if PATH=CHANGE plans today's model for today's machine and for a changed one, and prints a table: a step now and then, what is gained, what
a step of today's plan would take there, and how the plan differs. Changes with commas hold together: mesh.dp=2x,memory=40GiB.

  memory             bytes a rank may use                 memory=96GiB, memory=+16GiB
  mesh.AXIS          ranks of a mesh axis                 mesh.dp=16, mesh.dp=2x
  device.NUMBER      of the cluster profile               device.peak=2x, device.memory_bandwidth=4.8TB/s
  links.NAME.NUMBER  of a link of the profile             links.nvlink.bandwidth=900GB/s, links.infiniband.latency=-50%

`autoshard clusters show NAME` prints all numbers of a profile; a path that is not there is answered with those that are.
"""


def plan(request: Request, output: OutputOption = None, html: HtmlOption = None,
         with_baselines: Annotated[bool, typer.Option(
             "--with-baselines", help="With --html: plans made by hand (DDP, FSDP, tensor parallel ...) beside the chosen one.")] = False,
         what_if: Annotated[list[str] | None, typer.Option(
             "--what-if", metavar="PATH=CHANGE", help="Instead of the report, a table: the plan of today and the one under a change of the machine, "
             "see below: links.infiniband.bandwidth=2x. May be repeated.")] = None,
         worth: Annotated[bool, typer.Option(
             "--worth", help="Search also within a GiB more and less (of small budgets a sixteenth): the report says what memory is worth.")] = False,
         as_json: JsonOption = False, quiet: QuietOption = False) -> None:
    """Search the cheapest plan for MODEL on a mesh, and print what was chosen and why it costs what it costs."""
    from autoshard.base.files import check_outputs

    if with_baselines and html is None:
        raise UsageError("--with-baselines is a part of the HTML report; give --html report.html too, or use `autoshard compare`")
    if with_baselines and worth:
        raise UsageError("--worth and --with-baselines are asked for one at a time")
    if with_baselines and request.is_open:
        raise UsageError("--with-baselines needs --mesh and a number of micro-batches; plan again with those that were chosen")
    if what_if and (html or worth):
        raise UsageError(f"--what-if prints a table of its own; plan without it for {'--html' if html else '--worth'}")
    check_outputs({"-o": output, "--html": html}, request.files)
    if what_if:
        _print_what_if(request, what_if, output, as_json, quiet)
        return
    with progress_shown(not quiet) as progress:
        if worth:
            found = _worth_plan(request, html, progress)
        else:
            found = _found(request, html, with_baselines, progress)
    if output is not None:
        found.save(output)
    if as_json or not quiet:
        print_plan(found, as_json)
    if output is not None and not (as_json or quiet):
        typer.echo(f"Plan saved to {output}; show it again with: autoshard report {output}", err=True)
    if html is not None and not (as_json or quiet):
        typer.echo(f"Report saved to {html}; open it in a browser", err=True)
    end_with([found.status], quiet)


def _print_what_if(request: Request, asked: list[str], output: Path | None, as_json: bool, quiet: bool) -> None:
    """The table of `--what-if`. The plan that is saved is today's."""
    from autoshard.cost.cluster import load_cluster
    from autoshard.study.scenario import scenarios

    scenarios(asked, request.given_mesh, request.options, load_cluster(request.cluster))  # a typo, before the model is loaded
    with progress_shown(not quiet) as progress:
        bench, clock = _bench(request, progress)
        from autoshard.study.what_if import what_if

        found = what_if(bench, request.given_mesh, request.options, asked, clock=clock)
    if output is not None:
        found.today.save(output)
    if as_json:
        sys.stdout.write(json.dumps(found.to_dict(), indent=1, sort_keys=True) + "\n")
    elif not quiet:
        from autoshard.report.commands.what_if import show

        show(found)
    end_with([found.today.status, *(row.plan.status for row in found.rows if row.plan is not None)], quiet, found.interrupted)


def _bench(request: Request, progress: Callable[[str, str], None]) -> tuple[Any, Any]:
    from autoshard.decide.phase_timer import PhaseTimer
    from autoshard.planner.workbench import Workbench

    spec, batch = request.batch_of(progress)
    return Workbench(batch, spec.loss_fn is not None, {"reference": spec.reference, **spec.settings}), PhaseTimer(progress)


def _worth_plan(request: Request, html: Path | None, progress: Callable[[str, str], None]) -> Any:
    from autoshard.report.page.html import write
    from autoshard.study.worth import with_worth

    bench, clock = _bench(request, progress)
    found = with_worth(bench, request.wanted, request.options, clock=clock)
    if html is not None:
        write(html, found)
    return found


def _found(request: Request, html: Path | None, with_baselines: bool, progress: Callable[[str, str], None]) -> Any:
    if html is None or request.is_open:
        return _plan_and_page(request, html, progress)
    return _plan_with_page(request, html, with_baselines, progress)


def report(
    path: Annotated[Path, typer.Argument(metavar="PLAN", help="A plan file, as `autoshard plan -o` writes it.")],
    html: HtmlOption = None,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Show a saved plan again: in the terminal, as JSON, or as an HTML file."""
    from autoshard.base.files import check_outputs
    from autoshard.base.plan import Plan

    check_outputs({"--html": html}, [path])
    found = Plan.load(path)
    if html is not None:
        from autoshard.report.page.html import write

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
        from autoshard.report.page.html import write

        write(html, found)
    return found


def _plan_with_page(request: Request, html: Path, with_baselines: bool, progress: Callable[[str, str], None]) -> Any:
    """The plan, with its page written: what is known beyond the plan while the model is at hand is in it too."""
    from autoshard.decide.phase_timer import PhaseTimer
    from autoshard.planner.finer import plan_and_prices
    from autoshard.planner.stages import plan_traced
    from autoshard.report.page.html import write
    from autoshard.study.alternatives import alternatives
    from autoshard.study.compare import comparison
    from autoshard.study.explain import chosen_by

    clock = PhaseTimer(progress)
    asked = request.traced(progress, clock)
    stages, beside, known, found = asked.options.pipeline.stages(asked.mesh), None, (), None
    if with_baselines:
        beside = comparison(asked.traced, asked.mesh, asked.options, model=asked.model, has_loss=asked.has_loss, clock=clock,
                            own=asked.own)
        found = beside.chosen.plan
        if found is None:
            raise InfeasibleError(beside.chosen.note)
    elif stages > 1:
        found = plan_traced(asked.traced, asked.mesh, asked.options, clock=clock, has_loss=asked.has_loss, model_info=asked.model)
    if stages == 1:
        found, table = plan_and_prices(asked.traced, asked.mesh, asked.options, found, clock=clock, has_loss=asked.has_loss,
                                       model_info=asked.model)
        known = tuple(alternatives(chosen_by(found, table)))
    progress("report", "")
    write(html, found, beside, known)
    return found
