"""`autoshard memory`."""
from __future__ import annotations

import json
import sys
from typing import Annotated

import typer

from autoshard.cli.common import JsonOption, QuietOption, end_with
from autoshard.cli.progress import progress_shown
from autoshard.cli.request import Request
from autoshard.errors import UsageError

EXAMPLES = """
[bold]Examples[/bold]

  autoshard memory gpt:tiny --mesh dp=4 --cluster cpu-gloo

  autoshard memory llama:8b --mesh dp=8,tp=8 --batch 16 --seq 8192 --dtype bf16 --budget 40GiB --budget 60GiB --budget 80GiB
"""


def memory(request: Request,
           budget: Annotated[list[str] | None, typer.Option(
               help="Memory a rank may use: 40GiB. May be repeated; default: from what the fastest plan takes downwards.")] = None,
           steps: Annotated[int, typer.Option(min=2, max=50, help="How many budgets, where none is given.")] = 6,
           as_json: JsonOption = False, quiet: QuietOption = False) -> None:
    """What less memory costs: the best plan for MODEL within each of several budgets."""
    from autoshard.base.fine_mesh import NEVER
    from autoshard.decide.options import parse_bytes

    if request.memory is not None:
        raise UsageError(f"--memory {request.memory}: budgets are what is swept here; give --budget {request.memory}, or use `autoshard plan`")
    wanted = [parse_bytes(text) for text in budget or []]
    with progress_shown(not quiet) as progress:
        asked = request.traced(progress)
        from autoshard.decide.phase_timer import PhaseTimer
        from autoshard.planner.finer import plan_and_prices
        from autoshard.planner.one_stage import prices
        from autoshard.study.sweep import sweep

        clock = PhaseTimer(progress)
        if asked.options.refine_axes == NEVER:
            table = prices(asked.traced, asked.mesh, asked.options, clock=clock)
        else:  # budgets are swept on the axes, in parts or not, of the plan with ample memory
            _, table = plan_and_prices(asked.traced, asked.mesh, asked.options, clock=clock, has_loss=asked.has_loss)
        points = sweep(table, asked.options, wanted, steps=steps, has_loss=asked.has_loss, model=asked.model,
                       say=lambda text: progress("search", text), clock=clock)
    if as_json:
        sys.stdout.write(json.dumps([p.to_dict() for p in points], indent=1, sort_keys=True) + "\n")
    elif not quiet:
        from autoshard.report.commands.sweep import show

        show(points)
    plans = [p.plan for p in points if p.plan is not None]
    end_with([p.status for p in plans], quiet, cut=clock.ended.is_set() and not any(p.interrupted for p in plans))
