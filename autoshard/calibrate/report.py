"""What was measured beside what was fitted, as tables for the terminal."""
from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import median
from typing import Any

from rich.console import Console
from rich.markup import escape

from autoshard.calibrate.fit import Error
from autoshard.calibrate.overlap import Timing
from autoshard.calibrate.run import Calibration
from autoshard.calibrate.sample import Sample
from autoshard.report.tables import report_console, section, table

TARGETS = {"collective": 0.15, "op": 0.20, "optimizer": 0.20}
"""Median error that a calibration should reach at held-out sizes; a warning is printed above it."""
NOISY = 0.25


def show(found: Calibration, console: Console | None = None) -> None:
    """Fit errors per collective and op, the overlap, and a warning where the fit is not good enough to trust."""
    console = console or report_console()
    rows = table("!median error", ">sizes", ">fitted", ">held out", ">worst", ">noise")
    for key, mine in sorted(grouped(found.errors).items()):
        rows.add_row(escape(key), str(len(mine)), _percent(median(_sizes(mine, False))), _percent(_median(_sizes(mine, True))),
                     _percent(max(_sizes(mine, True), default=None)), _percent(median(e.sample.spread for e in mine)))
    console.print(section("Measured and fitted", rows))
    console.print(section("Held-out sizes, all together", _summary(found.errors)))
    overlap = found.cluster.overlap
    if found.timings is not None:
        short, long = found.timings
        console.print(f"Overlap of a matmul and an all_reduce: {_percent(short.hidden)} of a short one hides, {_percent(long.hidden)} "
                      f"beside a long one; eta {overlap.eta:.2f}, interference {overlap.interference:.2f}")
    for line in (*warnings(found.errors), *contradictions(found.timings)):
        console.print(f"[yellow]{escape(line)}[/yellow]")


def warnings(errors: Sequence[Error]) -> list[str]:
    """What keeps the profile from being trusted, in words."""
    out = []
    for kind, limit in TARGETS.items():
        held = _sizes([e for e in errors if e.sample.kind == kind], True)
        if held and median(held) > limit:
            out.append(f"{kind}: the median error at held-out sizes is {median(held):.0%}, above {limit:.0%}; the machine was "
                       "busy or its speed changes: calibrate again when it is quiet, or with more --seconds")
    noise = median(e.sample.spread for e in errors)
    if noise > NOISY:
        out.append(f"the same thing took {noise:.0%} more or less time from round to round: something else is running here")
    return out


def contradictions(timings: Sequence[Timing] | None) -> list[str]:
    """A line where the overlap was measured as something that cannot be."""
    odd = [t for t in timings or () if not t.possible]
    return [f"overlap: compute alone took {1e3 * t.compute:.3g} ms, the collective alone {1e3 * t.collective:.3g} ms and both together "
            f"{1e3 * t.both:.3g} ms, which cannot be on one machine at one speed: calibrate again when it is quiet, or with more --seconds"
            for t in odd]


def _summary(errors: Sequence[Error]) -> Any:
    rows = table("!kind", ">samples", ">median error", ">worst", ">wanted")
    for kind, limit in TARGETS.items():
        held = _sizes([e for e in errors if e.sample.kind == kind], True)
        if held:
            rows.add_row(kind, str(len(held)), _percent(median(held)), _percent(max(held)), f"<= {limit:.0%}")
    return rows


def grouped(errors: Iterable[Error]) -> dict[str, list[Error]]:
    """By what was measured."""
    out: dict[str, list[Error]] = {}
    for e in errors:
        out.setdefault(label(e.sample), []).append(e)
    return out


def label(s: Sample) -> str:
    """`all_gather over 2`, `aten::mm bfloat16`, `optimizer adamw`."""
    if s.kind == "collective":
        return f"{s.key} over {s.ranks}" + (f", link {s.link}" if s.link else "")
    return f"optimizer {s.key}" if s.kind == "optimizer" else f"{s.key} {s.dtype}"


def _sizes(errors: Iterable[Error], held_out: bool) -> list[float]:
    return [abs(e.error) for e in errors if e.sample.held_out is held_out]


def _median(values: list[float]) -> float | None:
    return median(values) if values else None


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"
