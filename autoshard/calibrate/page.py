"""The page of a calibration: a chart per collective and op, of what was measured beside what was fitted. One HTML file in the style of the
plan's report, with charts in SVG: no script, and nothing to load."""
from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from importlib import resources
from math import ceil, floor, log10
from pathlib import Path

from autoshard.base.files import write_atomically
from autoshard.base.quantities import seconds
from autoshard.calibrate.fit import Error
from autoshard.calibrate.report import grouped
from autoshard.calibrate.run import Calibration

WIDTH, HEIGHT, LEFT, FOOT, EDGE = 300, 200, 52, 24, 6
MOST_TICKS = 5
MEASURED, FITTED = "var(--c0)", "var(--c5)"
HEAD = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<title>{title} - autoshard</title>
<style>{style}
main {{ display: grid; grid-template-columns: repeat(auto-fill, minmax(18rem, 1fr)); gap: 1rem; max-width: none; }}
section {{ margin: 0; }} svg {{ width: 100%; font-size: 10px; fill: var(--quiet); }}</style></head>
<body><header><h1>{title}</h1></header>
<header><p class="quiet">Seconds over bytes on the wire, bytes moved, or FLOP. Dots: fitted to; rings: held out; line: the profile.</p></header>
<main>
"""


@dataclass(frozen=True)
class Axis:
    """A logarithmic axis from 10 ** low at `start` to 10 ** high at `end`."""

    low: int
    high: int
    start: float
    end: float

    def at(self, value: float) -> float:
        return self.start + (self.end - self.start) * (log10(value) - self.low) / (self.high - self.low)

    @property
    def ticks(self) -> list[float]:
        """Powers of ten, as many as can be told apart."""
        return [10.0**k for k in range(self.low, self.high + 1, ceil((self.high - self.low) / MOST_TICKS))]


def page(found: Calibration, path: Path) -> None:
    """Write the page. Raises UsageError when the file cannot be written."""
    style = resources.files("autoshard.report.page").joinpath("parts", "style.css").read_text(encoding="utf-8")
    charts = (f"<section><h3>{escape(name)}</h3>{chart(errors)}</section>\n" for name, errors in sorted(grouped(found.errors).items()))
    write_atomically(path, HEAD.format(title=escape(found.cluster.description), style=style) + "".join(charts) + "</main></body></html>\n")


def chart(errors: Sequence[Error]) -> str:
    """SVG of one collective or op."""
    errors = sorted(errors, key=lambda e: e.sample.amount)
    x = _axis([e.sample.amount for e in errors], LEFT, WIDTH - EDGE)
    y = _axis([t for e in errors for t in (e.sample.seconds, e.predicted)], HEIGHT - FOOT, EDGE)
    marks = [*_grid(x, y), *_points(errors, x, y)]
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="measured and fitted seconds">{"".join(marks)}</svg>'


def _axis(values: Iterable[float], start: float, end: float) -> Axis:
    logs = [log10(v) for v in values]
    low = floor(min(logs))
    return Axis(low, max(ceil(max(logs)), low + 1), start, end)


def _grid(x: Axis, y: Axis) -> Iterator[str]:
    yield from (_line(x.at(v), y.start, x.at(v), y.end) + _text(x.at(v), HEIGHT - EDGE, "middle", f"{v:.0e}".replace("e+0", "e")) for v in x.ticks)
    yield from (_line(x.start, y.at(v), x.end, y.at(v)) + _text(x.start - 4, y.at(v) + 3, "end", seconds(v)) for v in y.ticks)


def _points(errors: Sequence[Error], x: Axis, y: Axis) -> Iterator[str]:
    fitted = " ".join(f"{x.at(e.sample.amount):.1f},{y.at(e.predicted):.1f}" for e in errors)
    yield f'<polyline points="{fitted}" fill="none" stroke="{FITTED}" stroke-width="1.5"/>'
    for s in (e.sample for e in errors):
        fill, what = ("none", "held out") if s.held_out else (MEASURED, "measured")
        yield (f'<circle cx="{x.at(s.amount):.1f}" cy="{y.at(s.seconds):.1f}" r="2.5" fill="{fill}" stroke="{MEASURED}">'
               f"<title>{what}: {seconds(s.seconds)} at {s.amount:.4g}</title></circle>")


def _line(x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="var(--line)"/>'


def _text(x: float, y: float, anchor: str, text: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'
