"""Rounds under limits that a plan's timeline has corrected: mixtures come first, and what searches have met is kept."""
from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from autoshard.decide.how import How
from autoshard.decide.memory import fit
from autoshard.decide.program import NOTHING
from autoshard.search import Clock, Items, Problem
from autoshard.search.problem import Solution, evaluate

LAYERS = 10
FAST, LEAN = np.zeros(LAYERS, dtype=np.int64), np.ones(LAYERS, dtype=np.int64)
BEST = 11.2  # four layers fast with 10 bytes each, six lean with one


def layers(limit: float = 50.0) -> Problem:
    """Equal layers that take 1 s with 10 bytes or 1.2 s with one."""
    node, strategy = np.repeat(np.arange(LAYERS), 2), np.tile(np.arange(2), LAYERS)
    items = Items(node, strategy, np.zeros(2 * LAYERS, dtype=np.int64), np.tile([10.0, 1.0], LAYERS))
    return Problem(tuple(np.array([1.0, 1.2]) for _ in range(LAYERS)), (), np.array([limit]), np.array([np.inf]), items)


def again(bound: float, near: list[np.ndarray], monkeypatch: pytest.MonkeyPatch) -> tuple[Solution, list[tuple[np.ndarray, ...]]]:
    """What a round finds after FAST, which is over the limit; and the starts of the searches that it made."""
    searched, solve = [], How.solve

    def watched(how, problem, starts=(), near=()):
        searched.append(tuple(starts))
        return solve(how, problem, starts, near)

    monkeypatch.setattr(How, "solve", watched)
    first = replace(NOTHING, choice=FAST, cost=10.0, bound=bound)
    return fit._again(layers(), SimpleNamespace(starts=()), first, FAST, near, How(Clock(20.0))), searched


def test_a_mixture_near_the_bound_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    found, searched = again(BEST * (1 - 1e-3), [LEAN], monkeypatch)
    assert found.cost == pytest.approx(BEST) and not searched
    assert found.bound == BEST * (1 - 1e-3), "the bound stays that of the first search"


def test_a_mixture_far_from_the_bound_is_where_a_search_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    found, searched = again(BEST / 2, [LEAN], monkeypatch)
    assert found.cost == pytest.approx(BEST) and len(searched) == 1
    assert evaluate(layers(), searched[0][0]) == pytest.approx(BEST)


def test_where_nothing_met_keeps_the_limit_a_search_looks_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    found, searched = again(BEST, [FAST], monkeypatch)
    assert found.cost == pytest.approx(BEST) and len(searched) == 1


def test_choices_are_kept_once_the_last_first() -> None:
    kept = fit._met((LEAN,), (FAST, LEAN.copy()))
    assert [choice.tolist() for choice in kept] == [LEAN.tolist(), FAST.tolist()]
    many = [np.full(LAYERS, i) for i in range(2 * fit.MET)]
    assert len(fit._met(many[:fit.MET], many[fit.MET:])) == fit.MET
