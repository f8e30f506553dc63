"""A simulation for people: on the terminal, and as data for the page."""
from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from autoshard.base.quantities import seconds, share, size
from autoshard.collectives import KINDS
from autoshard.report.page.tables import page_table
from autoshard.report.tables import report_console, section, table
from autoshard.simulation.result import Idle, Simulation
from autoshard.simulation.trace import COMPUTE, Track

MOST_ROWS = 16
MOST_TRACKS = 4
"""Ranks drawn in the page."""
SEEN = 1 / 1500
"""Of a step: what is shorter is drawn with its neighbours."""
WHY = {"stragglers": "waits for slower ranks", "queued": "waits behind an earlier call", "exposed": "exposed",
       "finished": "done before the last rank", "host": "waits for the host", "pipeline": "waits for other stages"}
MOVES = {"copy": "copies for collectives", "update": "optimizer", "rest": "Python and autograd"}


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
    for label, words in _facts(found):
        grid.add_row(label, escape(words))
    return grid


def _facts(found: Simulation) -> Iterator[tuple[str, str]]:
    plan, objective = found.plan, "the plan says no step for these: it is for another mesh, batch or cluster"
    if found.objective_s:
        objective = f"the plan's objective is {seconds(found.objective_s)} ({100 * (found.step_s / found.objective_s - 1):+.1f} %)"
    yield "step", f"{seconds(found.step_s)}; {objective}"
    yield "ranks", (f"{plan.mesh} ({plan.mesh.size}) of {plan.cluster['name']}; rank {found.slowest} ends last, the first one at "
                    f"{seconds(found.fastest_s)}")
    yield "program", "as executed: small gradients share calls" if found.executed else "as planned: each gradient is reduced by itself"
    for line in found.conditions.describe() or ("the machine is as its profile says",):
        yield "", line
    yield "MFU, HFU", f"{100 * found.mfu:.1f} %, {100 * found.hfu:.1f} %"


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


# ---- the page

def drawing(found: Simulation) -> dict[str, Any]:
    """What the page draws: per rank its streams, as [begin, end, what, window, how many], and what the links carry over time."""
    tracks = [{"title": track.title, "streams": list(_streams(track, found.step_s).items())} for track in found.tracks[:MOST_TRACKS]]
    traffic = [{"link": t.link, "part": t.part_s, "bytes": t.nbytes, "used": t.utilisation} for t in found.traffic]
    return {"step": found.step_s, "facts": list(_facts(found)), "tracks": tracks, "traffic": traffic}


def _streams(track: Track, step: float) -> dict[str, list[list[Any]]]:
    """Work and transfers by stream; those of one kind in one window that follow each other closely are one."""
    out: dict[str, list[list[Any]]] = {COMPUTE: []}
    for span in track.spans:
        if span.category == "idle":
            continue
        what, window = (_moved(span.name) if span.category == "communication" else span.category), span.details.get("window", "")
        rows = out.setdefault(span.stream, [])
        if rows and rows[-1][2:4] == [what, window] and span.begin - rows[-1][1] < SEEN * step:
            rows[-1][1], rows[-1][4] = max(rows[-1][1], span.end), rows[-1][4] + 1
        else:
            rows.append([span.begin, span.end, what, window, 1])
    return out


def _moved(name: str) -> str:
    """The kind of a collective ("all_reduce wte"), or of what a stage sends ("0SEND_F1")."""
    return "send" if re.fullmatch(r"\d+SEND_[A-Z]\d+", name) else name.partition(" ")[0]


def page_tables(found: Simulation) -> dict[str, dict[str, Any]]:
    """The tables of the terminal, whole."""
    idle = [("work", "", "", found.work_s, None), *((WHY[r.why], _kind(r.kind), r.axis, r.mean_s, r.most_s) for r in found.idle)]
    critical = [(MOVES.get(r.what, _kind(r.what)), r.axis, r.module, r.times, r.seconds) for r in found.critical]
    sent = [(r.link, r.nbytes, r.busy_s, f"{100 * r.utilisation:.1f} %") for r in found.links]
    by_size = [(_kind(r.kind), r.axis, r.window, r.least, r.calls, r.nbytes) for r in found.sizes]
    return {"idle": page_table("mean_over_ranks:word collective:word axis:word time:seconds most:seconds", idle),
            "critical": page_table("what:word axis:word module:name times:count time:seconds", critical),
            "links": page_table("link:word sent:bytes sending:seconds utilisation:word", sent),
            "sizes": page_table("collective:word axis:word window:word from:bytes calls:count bytes:bytes", by_size)}
