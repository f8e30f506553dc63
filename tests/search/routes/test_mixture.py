"""The best mixture of known choices: every node does what one of them does, or what is never dearer, and no such choice is cheaper."""
from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np

from autoshard.search import Board, Clock, Edge, Problem, evaluate, mix
from autoshard.search.problem import Items
from autoshard.search.routes.mixture import mix_layers
from autoshard.search.tie import tie
from tests.search.random_problems import random_problem


def some(problem: Problem, count: int, seed: int) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [np.array([rng.integers(len(c)) for c in problem.node_costs]) for _ in range(count)]


def cheapest_mixture(problem: Problem, choices: list[np.ndarray]) -> float:
    """By trying all."""
    return min(evaluate(problem, np.array(each)) for each in itertools.product(*(sorted({int(c[v]) for c in choices}) for v in range(problem.n))))


def test_no_mixture_is_cheaper():
    better = 0
    for seed in range(60):
        problem = replace(random_problem(seed, nodes=7, most=3), intervals=None)
        choices = some(problem, 3, seed)
        least = min(evaluate(problem, choice) for choice in choices)
        found = mix(problem, choices, Clock(20.0))
        if found is None:
            assert not np.isfinite(least), seed
            continue
        choice, cost = found
        assert cost == evaluate(problem, choice), seed
        assert cost <= cheapest_mixture(problem, choices) * (1 + 1e-9) + 1e-12, seed
        better += cost < least
    assert better > 10, "one of the choices is seldom the best mixture"


def test_a_choice_alone_is_its_own_mixture():
    problem = next(p for p in (replace(random_problem(s), intervals=None) for s in range(50)) if np.isfinite(evaluate(p, some(p, 1, 0)[0])))
    choice, = some(problem, 1, 0)
    assert np.array_equal(mix(problem, [choice], Clock(20.0))[0], choice)


def layers(count: int, seed: int) -> Problem:
    """A chain of equal layers of two nodes, each of three strategies; a row that less than all layers may load."""
    rng = np.random.default_rng(seed)
    costs, inside, between = (rng.random(3), rng.random(3)), rng.random((3, 3)) / 4, rng.random((3, 3)) / 4
    every, nodes = np.arange(3), 2 * count
    edges = tuple(Edge(v, v + 1, between if v % 2 else inside, every, every) for v in range(nodes - 1))
    load = Items(np.repeat(np.arange(nodes), 3), np.tile(every, nodes), np.zeros(3 * nodes, dtype=np.int64), np.tile(rng.random(6), count))
    return Problem(costs * count, edges, np.array([0.4 * nodes]), np.array([np.inf]), load, groups=np.array([0, 1] * count))


def test_no_mixture_of_layers_is_cheaper():
    better = 0
    for seed in range(40):
        problem = layers(4, seed)
        tied, board = tie(problem), Board(problem, Clock(20.0))
        first = next((c for c in some(problem, 50, seed) if np.isfinite(evaluate(problem, c))), None)
        if first is None:
            continue
        board.offer(first)
        mix_layers(board, tied)
        assert board.cost == evaluate(problem, board.choice) <= evaluate(problem, first), seed
        assert board.cost <= cheapest_mixture(problem, [board.choice, *tied.spread(board.choice)]) * (1 + 1e-9) + 1e-12, seed
        better += board.cost < evaluate(problem, first)
    assert better > 10, "the first choice is seldom the best mixture of its layers"


def test_of_layers_that_are_alike_there_is_no_mixture():
    problem = layers(4, 0)
    board = Board(problem, Clock(20.0))
    board.offer(np.array([1, 2] * 4))
    mix_layers(board, tie(problem))
    assert board.choice is None or board.choice.tolist() == [1, 2] * 4
