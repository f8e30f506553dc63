"""What train.py found: figures per plan, which plan by hand is the one to beat, tables and a plot."""
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.shared.about import markdown
from benchmarks.shared.rounds import ratio, spread
from benchmarks.training.contenders import AUTO, Contender

Ratio = tuple[float, float, float]
"""Median over rounds, and the ends of its 95 % interval."""
SAME = 1e-2
"""Relative difference of losses up to which two plans train the same model: rounding, and what Adam makes of it. Normalising
another batch or seeing a part of it differs by far more."""
BOUNDS = ("one", "independent")
"""Not parallel, and not the same training: bases of comparison only."""


@dataclass(frozen=True)
class Row:
    """One plan's figures. Seconds per step as (median, quartiles), bytes per rank."""

    plan: str
    seconds: tuple[float, float, float]
    samples_per_s: float
    speed_up: Ratio | None
    of_ceiling: Ratio | None
    auto_over_this: Ratio | None
    communication_share: float
    memory: int
    loss_difference: float | None
    rounds: list[float] = field(default_factory=list)

    @property
    def same_model(self) -> bool:
        """Whether its losses are those of one process."""
        return self.loss_difference is not None and self.loss_difference <= SAME


def rows(contenders: Mapping[str, Contender], seconds: Mapping[str, list[float]], shares: Mapping[str, tuple[float, int]],
         samples: int) -> list[Row]:
    base = contenders.get("one") or next(iter(contenders.values()))

    def over(above: str, below: str) -> Ratio | None:
        return ratio(seconds[above], seconds[below]) if above in seconds and below in seconds else None

    return [Row(name, spread(seconds[name]), samples / spread(seconds[name])[0], over("one", name), over("independent", name),
                over("auto", name), shares[name][0], c.stored() + shares[name][1],
                max(abs(a - b) / abs(b) for a, b in zip(c.losses, base.losses, strict=True)) if c.losses else None, seconds[name])
            for name, c in contenders.items()]


def verdict(found: list[Row]) -> list[str]:
    """The chosen plan beside the fastest by hand that trains the same model, and beside the ceiling; DDP's layout beside DDP."""
    by_name = {r.plan: r for r in found}
    lines = []
    if {"auto-ddp", "ddp"} <= set(by_name):
        lines.append(f"auto-ddp / ddp: {interval(ratio(by_name['auto-ddp'].rounds, by_name['ddp'].rounds), digits=3)}")
    auto = by_name.get("auto")
    if auto is None:
        return lines
    by_hand = [r for r in found if r.plan not in (*AUTO, *BOUNDS)]
    same = [r for r in by_hand if r.same_model] + [r for r in found if r.plan == "one"]
    if same:
        best = min(same, key=lambda r: r.seconds[0])
        lines.append(f"chosen plan / {best.plan}, the fastest of the same model: {interval(best.auto_over_this)}")
    if auto.of_ceiling:
        lines.append(f"chosen plan, of the speed-up of independent processes: {interval(auto.of_ceiling)}")
    return lines + [f"{r.plan} trains another model: its losses differ by {r.loss_difference:.0e}" for r in by_hand if not r.same_model]


COLUMNS = ("plan", "ms/step", "25..75 %", "samples/s", "speed-up over one", "of ceiling", "auto / this", "comm", "MiB", "loss differs")


def cells(r: Row) -> list[str]:
    return [r.plan, f"{1e3 * r.seconds[0]:.1f}", f"{1e3 * r.seconds[1]:.1f}..{1e3 * r.seconds[2]:.1f}", f"{r.samples_per_s:.1f}",
            interval(r.speed_up), interval(r.of_ceiling), interval(r.auto_over_this), f"{r.communication_share:.0%}",
            f"{r.memory / 2**20:.0f}", "" if r.loss_difference is None else f"{r.loss_difference:.0e}"]


def interval(r: Ratio | None, digits: int = 2) -> str:
    return "" if r is None else f"{r[0]:.{digits}f} [{r[1]:.{digits}f}, {r[2]:.{digits}f}]"


def show(found: list[Row], title: str, as_markdown: bool) -> None:
    if as_markdown:
        print(f"{title}\n\n{markdown(COLUMNS, map(cells, found))}\n")
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    for column in COLUMNS:
        table.add_column(column, justify="left" if column == "plan" else "right", no_wrap=True)
    for r in found:
        table.add_row(*cells(r))
    Console(width=160).print(table)


def plot(found: list[Row], title: str, path: Path) -> None:
    """Step times as bars with their quartiles, an HTML page that needs no network."""
    import plotly.graph_objects as go

    middle = [1e3 * r.seconds[0] for r in found]
    bars = go.Bar(x=[r.plan for r in found], y=middle,
                  error_y={"type": "data", "symmetric": False, "array": [1e3 * (r.seconds[2] - r.seconds[0]) for r in found],
                           "arrayminus": [1e3 * (r.seconds[0] - r.seconds[1]) for r in found]})
    go.Figure(bars, layout={"title": title, "yaxis": {"title": "ms per step"}}).write_html(path, include_plotlyjs=True)
