"""Draws a plan in a terminal. `what.py` decides what is shown; here are only words, units and tables."""
from __future__ import annotations

from collections.abc import Iterator, Mapping

from rich.columns import Columns
from rich.console import Console, Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from autoshard.base import quantities
from autoshard.base.plan import Plan
from autoshard.report import stages, what
from autoshard.report.tables import report_console, section, table

MOST_COLLECTIVES = 24
SCHEDULE_WIDTH = 44
PROVEN = 1e-9  # a relative gap below this is rounding
KIND_WORDS = {"weight": "weight", "buffer": "buffer", "input": "input", "activation": "output", "output": "result"}
PASS_WORDS = {"start": "start", "forward": "fwd", "backward": "bwd", "weight": "wgt", "end": "end"}


def show(plan: Plan, console: Console | None = None) -> None:
    """Print the whole report of `plan`."""
    console = console or report_console()
    for part in parts(plan):
        console.print(part)


def parts(plan: Plan) -> Iterator[RenderableType]:
    """The report from top to bottom; sections without content are left out."""
    yield _header(plan)
    yield Columns((_step_time(plan), _memory(plan)), padding=(0, 4))
    if stages.is_pipeline(plan):
        yield _stages(plan)
        yield from _schedule(plan)
    if lines := what.memory_worth(plan):
        yield section("What memory is worth", Group(*map(Text, lines)))
    if plan.layouts:
        yield _layers(plan)
    yield _collectives(plan)
    yield _fallbacks(plan)
    if plan.notes:
        yield section("Notes", Group(*(Text(f"- {n}") for n in plan.notes)))
    yield _search(plan)
    if plan.timings:
        yield timings(plan.timings)


def timings(phases: Mapping[str, float]) -> RenderableType:
    """Seconds per phase of planning."""
    grid = table("phase", ">seconds")
    for name, seconds in phases.items():
        grid.add_row(escape(name), f"{seconds:.2f}")
    grid.add_section()
    grid.add_row("total", f"{sum(phases.values()):.2f}")
    return section("Planning took", grid)


def _header(plan: Plan) -> RenderableType:
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="bold", no_wrap=True)
    grid.add_column(overflow="fold")
    for label, text in what.header(plan):
        grid.add_row(label, escape(text))
    grid.add_row("status", escape(status(plan)))
    return section("Plan", grid)


def status(plan: Plan) -> str:
    if plan.bound_s <= 0:
        return f"{plan.status}: {quantities.seconds(plan.objective_s)} a step (nothing is proven about it)"
    best = "the best plan over decision units" if plan.refined else "the best possible"
    none_cheaper = "equal layers treated alike" if plan.tied else "no plan over decision units is cheaper" if plan.refined else "proven"
    certainty = f"within {100 * plan.gap:.2g} % of {best}" if plan.gap > PROVEN else none_cheaper
    return f"{plan.status}: {quantities.seconds(plan.objective_s)} a step ({certainty})"


def bound_name(plan: Plan) -> str:
    """What `bound_s` is a bound of."""
    return "lower bound of all plans" if plan.tied else "lower bound over decision units" if plan.refined else "proven lower bound"


def _step_time(plan: Plan) -> RenderableType:
    grid = table("of the busiest rank" if stages.is_pipeline(plan) else "per step", ">time", ">share")
    rows, total = what.step_time(plan), plan.predicted.get("step_s", plan.objective_s)
    for row in (r for r in rows if r.counts):
        grid.add_row(row.label, quantities.seconds(row.value), quantities.share(row.value, total))
    grid.add_section()
    grid.add_row("step", quantities.seconds(total), quantities.share(total, total), style="bold")
    for row in (r for r in rows if not r.counts):
        grid.add_row(row.label, quantities.seconds(row.value), "not added", style="dim")
    return section("Predicted step time", Group(grid, *(Text(line, style="dim") for line in _synchronisation(plan))))


def _synchronisation(plan: Plan) -> list[str]:
    """How much of the step is communication; nothing on one rank."""
    waits, shown = what.synchronisation(plan)
    hidden = f"; {100 * shown:.0f} % if none of it were hidden behind compute" if plan.predicted.get("hidden_s") else ""
    return [f"synchronisation of the ranks takes {100 * waits:.0f} % of the step{hidden}"] if plan.mesh.size > 1 else []


def _memory(plan: Plan) -> RenderableType:
    grid = table(f"rank of stage {plan.fullest.index}" if stages.is_pipeline(plan) else "per rank", ">memory", ">share")
    total, limit = plan.memory.get("total") or 0.0, plan.memory.get("limit")
    for row in (r for r in what.memory(plan) if r.value):
        grid.add_row(escape(row.label), quantities.size(row.value), quantities.share(row.value, total))
    grid.add_section()
    grid.add_row("total", quantities.size(total), quantities.share(total, total), style="bold")
    if limit is not None:
        grid.add_row("limit", quantities.size(limit), f"{quantities.share(total, limit)} used", style="dim")
    return section("Memory at its peak", Group(grid, *(Text(line, style="dim") for line in what.peak(plan))))


def _stages(plan: Plan) -> RenderableType:
    grid = table(">stage", "blocks", ">parameters", "!of a micro-batch", ">once", ">flying", ">memory", "sends")
    for row in stages.stage_rows(plan):
        windows = "\n".join(f"{PASS_WORDS.get(name, name)} {quantities.seconds(s)}" for name, s in row.ordered)
        sends = "\n".join(row.sent.split(", "))
        grid.add_row(str(row.index), escape(row.blocks) + (f"\n{row.ops} ops" if row.ops else ""), quantities.amount(row.parameters), windows,
                     quantities.seconds(row.once_s), str(row.in_flight), quantities.size(row.nbytes), sends)
    line = Text("flying: micro-batches of which values are kept at once. What is sent is of one micro-batch and rank.", style="dim")
    return section("Stages of the pipeline", Group(grid, line))


def _schedule(plan: Plan) -> Iterator[RenderableType]:
    """Nothing where the schedule was a file that is gone."""
    played = stages.playback(plan)
    if played is None:
        return
    grid = table(">rank", "stages", ">computes", ">waits", ">", "!one step")
    rows = stages.rank_rows(plan, played)
    for row, line in zip(rows, stages.lines(plan, played, SCHEDULE_WIDTH), strict=True):
        grid.add_row(str(row.rank), ", ".join(map(str, row.stages)), quantities.seconds(row.busy_s), quantities.seconds(row.idle_s),
                     quantities.share(row.idle_s, plan.objective_s), Text(line))
    split = "; W its part for the weights" if any(a.kind == "W" for a in played.network.events) else ""
    end = "; = the end of the step (reductions, update)" if any(row.end_s for row in rows) else ""
    yield section("Schedule", Group(grid, Text(f"F forward; B backward{split}{end}; . waits.", style="dim")))


def _layers(plan: Plan) -> RenderableType:
    grid = table("!tensor", "!", "shape", "!dtype", "placement", ">alike")
    for group in what.layer_groups(plan):
        if group.name:
            grid.add_section()
            grid.add_row(Text(group.name, style="bold"))
        indent = "  " if group.name else ""
        for row in group.rows:
            grid.add_row(escape(indent + row.name), KIND_WORDS[row.kind], quantities.shape(row.shape), quantities.dtype(row.dtype),
                          Text(row.placement, style="cyan"), quantities.times(row.copies))
    whole = what.whole_buffers(plan)
    lines = [Text(what.reading(plan), style="dim")]
    if whole:
        lines.append(Text(f"{whole} buffer{'s' if whole > 1 else ''} held whole by every rank.", style="dim"))
    return section("What was chosen", Group(grid, *lines))


def _collectives(plan: Plan) -> RenderableType:
    rows = what.collectives(plan)
    if not rows:
        return section("Collectives", Text("none: no rank talks to another"))
    grid = table("!collective", "!axis", "where", "!pass", ">calls", ">each", ">total", ">time")
    shown = rows if len(rows) <= MOST_COLLECTIVES + 1 else rows[:MOST_COLLECTIVES]
    for row in shown:
        where = escape(row.where) + (" *" if row.hideable else "")
        grid.add_row(escape(row.kind), row.axis, where, PASS_WORDS.get(row.phase, row.phase), str(row.count),
                     quantities.size(row.nbytes), quantities.size(row.total_bytes), quantities.seconds(row.seconds))
    if len(shown) < len(rows):
        grid.add_row(*_totals_row(f"{len(rows) - len(shown)} smaller rows", rows[len(shown):]), style="dim")
    grid.add_section()
    grid.add_row(*_totals_row("all", rows), style="bold")
    lines = []
    if any(row.hideable for row in rows):
        lines.append(Text("* may run beside compute (a parameter gather or a gradient reduction).", style="dim"))
    sent = "; ".join(f"{quantities.size(use.nbytes)} over {escape(use.link)} ({100 * use.utilisation:.1f} % of the step)" for use in what.links(plan))
    if sent:
        lines.append(Text(f"A rank sends {sent}.", style="dim"))
    of = "of one rank of every stage, per step" if stages.is_pipeline(plan) else "per rank and step"
    return section(f"Collectives, {of}", Group(grid, *lines))


def _totals_row(label: str, rows: tuple[what.CollectiveRow, ...]) -> tuple[str, ...]:
    count, nbytes, seconds = what.communication_totals(rows)
    return label, "", "", "", str(count), "", quantities.size(nbytes), quantities.seconds(seconds)


def _fallbacks(plan: Plan) -> RenderableType:
    rows = what.fallbacks(plan)
    if not rows:
        return section("Ops without a sharding rule", Text("none"))
    grid = table("op", "module", "source", ">count", ">time")
    for row in rows:
        grid.add_row(*map(escape, (row.target, row.where, row.source)), str(row.count), quantities.seconds(row.seconds))
    line = Text("These run whole on every rank, at the price shown; docs/add-an-op-rule.md says how to do better.",
                style="dim")
    return section("Ops without a sharding rule", Group(grid, line))


def _search(plan: Plan) -> RenderableType:
    grid = table("search", ">")
    grid.add_row("objective", quantities.seconds(plan.objective_s))
    grid.add_row(bound_name(plan), quantities.seconds(plan.bound_s))
    grid.add_row("gap", "0 %" if plan.gap <= PROVEN else f"{100 * plan.gap:.3g} %")
    for label, text in what.search_facts(plan):
        grid.add_row(escape(label), escape(text))
    return section("Search", grid)
