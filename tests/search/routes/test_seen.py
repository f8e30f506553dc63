"""Where tables are large, what a search of fewer strategies has seen says which prices to ask of all of them."""
from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

from autoshard.search import solve
from autoshard.search.board import Board
from autoshard.search.clock import Clock
from autoshard.search.problem import Problem, Solution, priced_cost, seen
from autoshard.search.reductions.core import build
from autoshard.search.routes import plans, priced, prices
from autoshard.search.routes.plans import search_few_rows
from autoshard.search.routes.prices import planes_of
from autoshard.search.tie import tied_core
from tests.search.random_problems import layered_problem


def with_fewer(problem: Problem, seed: int) -> Problem:
    """The problem with some strategies forbidden, the same ones in equal layers."""
    rng = np.random.default_rng(seed)
    costs = {id(cost): np.where((np.arange(len(cost)) == 0) | (rng.random(len(cost)) < 0.7), cost, np.inf) for cost in problem.node_costs}
    return replace(problem, node_costs=tuple(costs[id(cost)] for cost in problem.node_costs))


def searched(problem: Problem, start: np.ndarray | None = None, **known: Any) -> tuple[Solution, int]:
    """As a problem with large tables, with the number of answers it took."""
    answers = []

    def answer(*args: Any, **how: Any) -> Any:
        answers.append(args)
        return priced.solve_priced(*args, **how)

    with ExitStack() as patched:
        for module in (plans, priced, prices):
            patched.enter_context(patch.object(module, "STORED", -1))
        patched.enter_context(patch.object(plans, "CLOSE", 0.02))
        patched.enter_context(patch.object(prices, "solve_priced", answer))
        board = Board(problem, Clock(20.0), **known)
        if start is not None:
            board.offer(start)
        core = build(problem)[0]
        search_few_rows(board, core, 0, tied_core(problem, core))
        return board.solution(), len(answers)


def test_fewer_answers_and_bounds_that_hold() -> None:
    took = np.zeros(2, int)
    for seed in range(6):
        problem = layered_problem(seed)
        best, few = solve(problem, backend="milp"), with_fewer(problem, seed)
        near, _ = searched(few)
        alone, answers = searched(problem)
        told, fewer = searched(problem, near.choice, seen=seen(few, near.near))
        for found in (alone, told):
            assert found.bound <= best.cost * (1 + 1e-9) and best.cost <= found.cost * (1 + 1e-9) and found.gap <= 0.02
        took += answers, fewer
    assert took[1] < took[0], took


def test_their_planes_are_those_of_choices() -> None:
    """What a choice costs at any prices, without the choice."""
    problem = layered_problem(1)
    choices = [np.full(problem.n, s) % [len(cost) for cost in problem.node_costs] for s in range(3)]
    core = build(problem)[0]
    own, others = (planes_of(Board(problem, Clock(1.0), **known), core) for known in ({"near": choices}, {"seen": seen(problem, choices)}))
    for choice, (at, value, slope), (there, cost, excess) in zip(choices, own, others, strict=True):
        assert (at == there).all() and cost == pytest.approx(value) and excess == pytest.approx(slope)
        assert cost + excess @ [0.1, 0.2] == pytest.approx(priced_cost(problem, choice, np.array([0.1, 0.2])))
