"""A simulation for people."""
from __future__ import annotations

from collections.abc import Iterator

from rich.console import Console, Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from autoshard.base.quantities import seconds, share, size
from autoshard.collectives import KINDS
from autoshard.report.tables import report_console, section, table
from autoshard.simulation.result import Idle, Simulation

MOST_ROWS = 16
WHY = {"stragglers": "waits for slower ranks", "queued": "waits behind an earlier call", "exposed": "exposed",
       "finished": "done before the last rank", "host": "waits for the host", "pipeline": "waits for other stages"}
MOVES = {"copy": "copies for collectives", "update": "optimizer"}


def show(found: Simulation, console: Console | None = None) -> None:
    """Print a simulation."""
    console = console or report_console()
    for part in parts(found):
        console.print(part)


def parts(found: Simulation) -> Iterator[RenderableType]:
    """From top to bottom; sections without content are left out."""
    yield section("Simulated step", _summary(found))
    yield section("Where the time of a rank goes", _time(found))
    if found.stages:
        yield section("Stages of the pipeline", _stages(found))
    if found.critical:
        yield section("Critical path", _critical(found))
    if found.links:
        yield section("Links, per rank", _links(found))
        yield section("Sizes of transfers, per rank and step", _sizes(found))


def _summary(found: Simulation) -> RenderableType:
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="bold", no_wrap=True)
    grid.add_column(overflow="fold")
    plan, objective = found.plan, "the plan is for another mesh, batch or cluster"
    if found.objective_s:
        objective = f"the plan's objective is {seconds(found.objective_s)} ({100 * (found.step_s / found.objective_s - 1):+.1f} %)"
    grid.add_row("step", f"{seconds(found.step_s)}; {objective}")
    grid.add_row("ranks", f"{plan.mesh} ({plan.mesh.size}) of {plan.cluster['name']}; rank {found.slowest} ends last, the first one at "
                          f"{seconds(found.fastest_s)}")
    grid.add_row("program", "as executed: small gradients share calls" if found.executed else "as planned: each gradient is reduced by itself")
    for line in found.conditions.describe() or ("the machine is as its profile says",):
        grid.add_row("", escape(line))
    grid.add_row("MFU, HFU", f"{100 * found.mfu:.1f} %, {100 * found.hfu:.1f} %")
    return grid


def _time(found: Simulation) -> RenderableType:
    grid = table("mean over ranks", "!collective", "!axis", ">time", ">share", ">most")
    grid.add_row("work", "", "", seconds(found.work_s), share(found.work_s, found.step_s), "")
    if found.slowed_s:
        grid.add_row("  of it lost to collectives beside", "", "", seconds(found.slowed_s), share(found.slowed_s, found.step_s), "", style="dim")
    for row in found.idle[:MOST_ROWS]:
        grid.add_row(WHY[row.why], _kind(row.kind), row.axis, seconds(row.mean_s), share(row.mean_s, found.step_s), seconds(row.most_s))
    if rest := found.idle[MOST_ROWS:]:
        grid.add_row(f"{len(rest)} smaller rows", "", "", *_total(rest, found), "", style="dim")
    return grid


def _total(rows: tuple[Idle, ...], found: Simulation) -> tuple[str, str]:
    total = sum(row.mean_s for row in rows)
    return seconds(total), share(total, found.step_s)


def _stages(found: Simulation) -> RenderableType:
    grid = table(">stage", ">rank", ">forward", ">backward", ">weights", ">once a step", ">busy", ">waits")
    times = ("forward_s", "backward_s", "weight_s", "once_s", "busy_s", "idle_s")
    for row in found.stages:
        grid.add_row(str(row["stage"]), str(row["rank"]), *(seconds(row[name]) for name in times))
    return grid


def _critical(found: Simulation) -> RenderableType:
    grid = table("what", "!axis", "module", ">times", ">time", ">share")
    for row in found.critical[:MOST_ROWS]:
        grid.add_row(MOVES.get(row.what, _kind(row.what)), row.axis, escape(row.module or "(no module)"), str(row.times), seconds(row.seconds),
                     share(row.seconds, found.step_s))
    if rest := found.critical[MOST_ROWS:]:
        total = sum(row.seconds for row in rest)
        grid.add_row(f"{len(rest)} smaller rows", "", "", "", seconds(total), share(total, found.step_s), style="dim")
    return grid


def _links(found: Simulation) -> RenderableType:
    grid = table("!link", ">sent in a step", ">sending", ">utilisation")
    for row in found.links:
        grid.add_row(row.link, size(row.nbytes), seconds(row.busy_s), f"{100 * row.utilisation:.1f} %")
    return Group(grid, Text("Utilisation: of the bandwidth that collectives reach, over the whole step.", style="dim"))


def _sizes(found: Simulation) -> RenderableType:
    grid = table("!collective", "!axis", "!window", ">from", ">calls", ">bytes")
    for row in found.sizes:
        grid.add_row(_kind(row.kind), row.axis, row.window, size(row.least), str(row.calls), size(row.nbytes))
    return Group(grid, Text("A row: buffers of this size or more, and less than twice as much.", style="dim"))


def _kind(name: str) -> str:
    return KINDS[name].words if name in KINDS else name
