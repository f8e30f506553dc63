"""What benchmarks/simulation/simulation.py says of its rows: errors by kind of prices, and which targets are met."""
from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import mean, median
from typing import Any

import numpy as np

from benchmarks.shared.about import about, line, markdown
from benchmarks.simulation.prediction import rank_correlation

CONVOLUTIONS = ("resnet",)
MODES = ("profile", "earlier", "one", "shared", "beside")
MEDIAN, TENTH, SIGNED, RANKS, CONVOLVED = "median error", "90 % of errors within", "signed mean", "rank correlation", "median error, resnet"
OF_ONE = {MEDIAN: 0.03, TENTH: 0.08, SIGNED: 0.02, RANKS: 0.98}
TARGETS: Mapping[str, Mapping[str, float]] = {"profile": {MEDIAN: 0.05, CONVOLVED: 0.05}, "one": OF_ONE, "shared": OF_ONE}


@dataclass(frozen=True)
class Row:
    """A plan. `measured`, `first` and `again`: medians over rounds, of both steps of a round and of each; `seconds` and `errors` by mode. Errors of op times
    are medians over rounds of simulated over measured - 1, those of profiles over the median step."""

    model: str
    plan: str
    rounds: int
    measured: float
    first: float
    again: float
    seconds: Mapping[str, float]
    errors: Mapping[str, float]

    @property
    def floor(self) -> float:
        return self.again / self.first - 1.0


def row(model: str, plan: str, steps: Sequence[tuple[float, float]], profiles: Mapping[str, float], rounds: Mapping[str, Sequence[float]]) -> Row:
    """`steps`: the two of each round; `profiles`: seconds by mode; `rounds`: by mode, seconds that op times of each round give."""
    each = [mean(pair) for pair in steps]
    measured = median(each)
    errors = {mode: seconds / measured - 1.0 for mode, seconds in profiles.items()}
    errors |= {mode: median(s / m for s, m in zip(simulated, each, strict=True)) - 1.0 for mode, simulated in rounds.items()}
    return Row(model, plan, len(steps), measured, *(median(of) for of in zip(*steps, strict=True)),
               {**profiles, **{mode: median(simulated) for mode, simulated in rounds.items()}}, errors)


def figures(rows: Sequence[Row], mode: str) -> dict[str, float]:
    """What is said of one kind of prices."""
    errors = [r.errors[mode] for r in rows]
    found = {MEDIAN: median(map(abs, errors)), TENTH: float(np.quantile(np.abs(errors), 0.9)), SIGNED: mean(errors),
             RANKS: correlation([r.seconds[mode] for r in rows], [r.measured for r in rows])}
    convolved = [abs(r.errors[mode]) for r in rows if r.model in CONVOLUTIONS]
    return {**found, **({CONVOLVED: median(convolved)} if convolved else {})}


def correlation(a: Sequence[float], b: Sequence[float]) -> float:
    return rank_correlation(a, b) if len(a) > 1 else 1.0


def met(said: str, value: float, target: float) -> bool:
    return value >= target if said == RANKS else abs(value) < target


def verdicts(rows: Sequence[Row]) -> Iterator[tuple[str, str, str, str, str]]:
    """Mode, what is said, the figure, the target, and whether it is met."""
    for mode in MODES:
        targets = TARGETS.get(mode, {})
        for said, value in figures(rows, mode).items():
            target = targets.get(said)
            wanted = "" if target is None else f"at least {target}" if said == RANKS else f"below {target:.0%}"
            yield mode, said, shown(said, value), wanted, "" if target is None else "met" if met(said, value, target) else "NOT MET"


def shown(said: str, value: float) -> str:
    return f"{value:.3f}" if said == RANKS else f"{value:+.1%}" if said == SIGNED else f"{value:.1%}"


def saved(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """For JSON."""
    return [{**asdict(r), "floor": r.floor} for r in rows]


def show(rows: Sequence[Row]) -> None:
    print(f"\n{line(about(), f'{min(r.rounds for r in rows)} rounds')}\n")
    print(markdown(("model", "plan", "measured ms", "A/A", *(f"{mode} ms" for mode in MODES), *(f"{mode} error" for mode in MODES)), (
        (r.model, r.plan, f"{1e3 * r.measured:.1f}", f"{r.floor:+.1%}", *(f"{1e3 * r.seconds[mode]:.1f}" for mode in MODES),
         *(f"{r.errors[mode]:+.1%}" for mode in MODES)) for r in rows)))
    floor, again = [abs(r.floor) for r in rows], correlation([r.again for r in rows], [r.first for r in rows])
    print(f"\n{len(rows)} plans of {len({r.model for r in rows})} models; A/A: median {median(floor):.1%}, 90 % within {np.quantile(floor, 0.9):.1%}, "
          f"rank correlation {again:.3f}\n")
    print(markdown(("model", *(f"{mode}, median" for mode in MODES)), (
        (m, *(f"{median(r.errors[mode] for r in rows if r.model == m):+.1%}" for mode in MODES)) for m in dict.fromkeys(r.model for r in rows))))
    print(f"\n{markdown(('prices', 'figure', 'found', 'wanted', 'target'), verdicts(rows))}")
