"""Draws the shapes that were tried where the mesh, or the number of micro-batches, was chosen."""
from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console, Group
from rich.text import Text

from autoshard.base import quantities
from autoshard.base.plan import NOT_FOUND, Plan, TriedShape
from autoshard.report.tables import report_console, section, table


def show_shapes(plan: Plan, console: Console | None = None) -> None:
    """A line for every mesh: the best of its shapes. All of them are in the plan file."""
    if not plan.shapes:
        return
    front = on_front(plan.shapes)
    grid = table("", "mesh", ">micro-batches", "!schedule", ">step", ">memory", ">gap", "what is known")
    for shape in lines_of(plan.shapes):
        gap = quantities.share(shape.step_s - (shape.bound_s or 0.0), shape.step_s) if shape.step_s else ""
        mark = "*" if shape.chosen else "+" if shape in front else ""
        grid.add_row(mark, shape.mesh, str(shape.microbatches), _schedule(shape), quantities.seconds(shape.step_s),
                     quantities.size(shape.memory), gap, says(shape), style="bold" if shape.chosen else None)
    below = [Text("+ no shape that was planned is faster in as little memory", style="dim")] if any(not s.chosen for s in front) else []
    (console or report_console()).print(section(f"{len(plan.shapes)} shapes tried, the best of each mesh", Group(grid, *below)))


def on_front(shapes: Sequence[TriedShape]) -> list[TriedShape]:
    """Of the shapes that were planned, those than which none is both faster and leaner, or one of these and as good in the other."""
    planned = [(s, (s.step_s, s.memory)) for s in shapes if s.step_s is not None and s.memory is not None]
    return [s for s, own in planned if not any(other != own and all(x <= y for x, y in zip(other, own, strict=True)) for _, other in planned)]


def lines_of(shapes: Sequence[TriedShape]) -> list[TriedShape]:
    """The best known shape of every mesh, the fastest first."""
    best: dict[str, TriedShape] = {}
    for shape in sorted(shapes, key=_rank):
        best.setdefault(shape.mesh, shape)
    return list(best.values())


def _rank(shape: TriedShape) -> tuple[bool, bool, float]:
    known = [s for s in (shape.step_s, shape.about_s, shape.bound_s) if s is not None]
    return not shape.chosen, shape.step_s is None, known[0] if known else float("inf")


def _schedule(shape: TriedShape) -> str:
    return shape.schedule + (f" x {shape.chunks}" if shape.chunks > 1 else "")


def says(shape: TriedShape) -> str:
    """In words."""
    if shape.chosen:
        return "chosen"
    if shape.step_s is not None:
        return "planned"
    if shape.about_s is not None:
        return f"about {quantities.seconds(shape.about_s)}" + (" or more" if shape.why else "")
    if shape.bound_s is not None and not shape.why.startswith(NOT_FOUND):
        return f"not searched: at least {quantities.seconds(shape.bound_s)}"
    return shape.why
