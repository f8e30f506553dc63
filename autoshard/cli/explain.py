"""`autoshard explain`."""
from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from autoshard.cli.common import JsonOption, QuietOption, end_with
from autoshard.cli.progress import progress_shown
from autoshard.cli.request import Request, TracedRequest
from autoshard.errors import PlanError, UsageError

EXAMPLES = """
[bold]Examples[/bold]

  autoshard explain gpt:tiny --mesh tp=4 --edge 'h.0.mlp.c_fc->gelu_0'        what changing the layout in between takes

  autoshard explain gpt:tiny --mesh dp=2,tp=2 --edge 'h.0.mlp.c_fc->gelu_0' --source dp,-,tp --target tp*dp,-,-    one pair of layouts

  autoshard explain plan.json --op h.0.mlp.c_fc                              the ways to run an op, and their regret

  autoshard explain plan.json --why-not 'h.0.mlp.c_fc.weight=-,tp'           force a choice, solve again, show the difference

MODEL may be a plan file: then its model, mesh and options are used, and nothing is searched for --edge and --op.
Names are parameters, module paths or ops; a layout is AXIS,... per dim (dp,-) or a placement per mesh axis (S(0),R).
"""

SAID_BY_PLANS = ("mesh", "devices", "hf", "batch", "seq", "dtype", "inference", "optimizer", "precision", "inputs", "outputs", "seed", "seeds",
                 "fallback", "offload", "expert_capacity", "pad", "refine_axes", "microbatches", "schedule", "cut", "layout")
"""Of the options of a request, those that a plan file answers."""


def explain(request: Request,
            edge: Annotated[str | None, typer.Option(help="PRODUCER->CONSUMER: prices of every change of layout in between.")] = None,
            op: Annotated[str | None, typer.Option(help="Strategies of an op: its time, bytes, and the regret of each.")] = None,
            why_not: Annotated[str | None, typer.Option(help="NAME=LAYOUT: force it, solve again, show what changes.")] = None,
            source: Annotated[str | None, typer.Option(help="With --edge: the producer's layout; default: the chosen one.")] = None,
            target: Annotated[str | None, typer.Option(help="With --edge and --source: the price of this layout alone; axes in any "
                                                         "order (tp*dp,-).")] = None,
            rows: Annotated[int, typer.Option(min=1, help="Rows to show.")] = 24,
            as_json: JsonOption = False, quiet: QuietOption = False) -> None:
    """Say why a plan is what it is: the price table of an edge, the strategies of an op, or what a forced choice would cost."""
    asks = [name for name, value in (("--edge", edge), ("--op", op), ("--why-not", why_not)) if value]
    if len(asks) != 1:
        raise UsageError(f"give one of --edge, --op and --why-not{f', not {len(asks)}' if asks else ''}; for example --op h.0.mlp.c_fc")
    if target is not None and (source is None or edge is None):
        raise UsageError("--target is one end of a pair; give --edge and --source too, for example --edge 'relu_0->mm_1' --source dp,tp "
                         "--target tp,dp")
    if source is not None and edge is None:
        raise UsageError("--source is a layout of the producer of an edge; give --edge too, for example --edge 'relu_0->mm_1' --source dp,tp")
    with progress_shown(not quiet) as progress:
        asked, plan = _asked(request, progress)
        found, statuses = (_edge(asked, plan, edge, (source, target), rows, progress) if edge else _op(asked, plan, op, rows, progress) if op
                           else _why_not(asked, plan, why_not, progress))
    if as_json:
        sys.stdout.write(json.dumps(found.to_dict(), indent=1, sort_keys=True) + "\n")
    elif not quiet:
        from autoshard.report.commands.explain import show

        show(found)
    end_with(statuses, quiet)


def _asked(request: Request, progress: Callable) -> tuple[TracedRequest, Any]:
    """The traced model, and the plan where one was given instead of a model."""
    if not (request.model or "").endswith(".json"):
        if not request.mesh:
            raise UsageError("--mesh is missing; write for example --mesh dp=2,tp=4, or give a plan file")
        return request.traced(progress), None
    from autoshard.base.plan import Plan

    plan = Plan.load(Path(request.model))
    from autoshard.decide.options import planned_under

    return _source(request, plan).traced(progress, **planned_under(plan)), plan


def _source(request: Request, plan: Any) -> Request:
    """The request for the model of a plan. Raises PlanError for a plan of a model that has no reference."""
    from autoshard.cost.cluster import Cluster

    model, none = plan.model, Request()
    given = [name for name in SAID_BY_PLANS if getattr(request, name) not in (getattr(none, name), "", [])]
    if given:
        raise UsageError(f"--{given[0].replace('_', '-')}: {request.model} says for which model, mesh and options it was made, and these are used; "
                         "leave it out, or give the model instead of the plan")
    if not model.get("reference"):
        raise PlanError(f"{request.model} does not say which model it is for (it was made in Python); give the model and --mesh")
    hf = model.get("hf")
    return replace(request, mesh=str(plan.mesh), model=None if hf else model["reference"], hf=Path(hf) if hf else None, batch=model.get("batch"),
                   seq=model.get("seq"), dtype=model.get("dtype"), inference=not plan.settings["training"],
                   cluster=request.cluster if request.cluster != Request.cluster else Cluster.from_snapshot(plan.cluster))


def _chosen(asked: TracedRequest, plan: Any, progress: Callable) -> tuple[Any, tuple[str, ...]]:
    """What the plan chose, on today's tables; searched first where there is no plan, and then with the search's status."""
    from autoshard.decide.phase_timer import PhaseTimer
    from autoshard.planner.finer import plan_and_prices
    from autoshard.study.explain import chosen_by

    found, table = plan_and_prices(asked.traced, asked.mesh, asked.options, plan, clock=PhaseTimer(progress), has_loss=asked.has_loss)
    return chosen_by(found, table), () if plan else (found.status,)


def _edge(asked: TracedRequest, plan: Any, text: str, layouts: tuple[str | None, str | None], rows: int,
          progress: Callable) -> tuple[Any, tuple[str, ...]]:
    from autoshard.decide.phase_timer import PhaseTimer
    from autoshard.planner.one_stage import prices
    from autoshard.seeds.grammar import specs_of
    from autoshard.seeds.names import find_edge
    from autoshard.study.explain import edge_table

    source, target = layouts
    if source is None:
        chosen, statuses = _chosen(asked, plan, progress)
        return edge_table(chosen.table, find_edge(chosen.table.graph, text), chosen, most=rows), statuses
    table = prices(asked.traced, plan.spec_mesh if plan else asked.mesh, asked.options, clock=PhaseTimer(progress))
    edge = find_edge(table.graph, text)
    if target is not None:
        from autoshard.study.layout_pairs import layout_pair

        return layout_pair(table, edge[0], source, target), ()
    sources = specs_of(source, table.graph.meta(edge[0]), table.mesh, f"--source {source}")
    return edge_table(table, edge, sources=sources, most=rows), ()


def _op(asked: TracedRequest, plan: Any, name: str, rows: int, progress: Callable) -> tuple[Any, tuple[str, ...]]:
    from autoshard.seeds.names import find_op
    from autoshard.study.explain import op_table

    chosen, statuses = _chosen(asked, plan, progress)
    progress("regrets", name)
    return op_table(chosen, find_op(chosen.table.graph, name).name, most=rows), statuses


def _why_not(asked: TracedRequest, plan: Any, text: str, progress: Callable) -> tuple[Any, tuple[str, ...]]:
    from autoshard.study.why_not import why_not

    name, _, layout = text.rpartition("=")
    if not name or not layout:
        raise UsageError(f"cannot read --why-not {text!r}; write for example layers.0.mlp.w1=S(0),R")
    found = why_not(asked.traced, asked.mesh, asked.options, name, layout, plan=plan, has_loss=asked.has_loss, progress=progress)
    return found, found.statuses[1:]
