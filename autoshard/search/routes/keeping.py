"""Whether any choice keeps the hard rows: asked at prices beside which costs hardly count."""
from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from ortools.math_opt.python import mathopt

from autoshard.search.problem import Problem, row_loads

STEEP = 1e4  # times the most that a choice costs: what one pays that is over its rows by their limits
OVER = 1e-9  # of a limit; less is not over


def most_cost(problem: Problem) -> float:
    """What no choice costs more than, rows left out."""
    highest: dict[int, float] = {}

    def most(array: np.ndarray) -> float:
        if id(array) not in highest:
            highest[id(array)] = float(np.max(array, where=np.isfinite(array), initial=0.0))
        return highest[id(array)]

    return sum(map(most, problem.node_costs)) + sum(most(edge.table) for edge in problem.edges)


def steep_prices(problem: Problem, rows: np.ndarray, choices: Sequence[np.ndarray]) -> np.ndarray | None:
    """Prices of the hard ones among `rows` (a mask) at which nothing else counts, such that all of `choices`, and all mixtures of them, pay for what
    they are over these rows together; None where there are none. Where a bound at them is above `most_cost`, every choice is over some row: Farkas'
    lemma. A linear program: the prices with the largest least payment, for excess in parts of the limits or of the loads, if these are more."""
    hard = np.flatnonzero(rows & np.isinf(problem.row_price))
    if not len(hard):
        return None
    loads = np.array([row_loads(problem, choice)[hard] for choice in choices]).reshape(-1, len(hard))
    unit = np.maximum(np.abs(problem.row_limit[hard]), np.abs(loads).max(axis=0, initial=1e-30))
    excess = (loads - problem.row_limit[hard]) / unit
    model = mathopt.Model()
    least = model.add_variable()
    share = [model.add_variable(lb=0.0) for _ in hard]
    model.add_linear_constraint(mathopt.fast_sum(share) == 1.0)
    for over in excess:
        model.add_linear_constraint(least <= mathopt.fast_sum([float(g) * x for g, x in zip(over, share, strict=True)]))
    model.maximize(least)
    result = mathopt.solve(model, mathopt.SolverType.GLOP)
    if not result.has_primal_feasible_solution() or result.objective_value() <= OVER:
        return None
    prices = np.zeros(len(problem.row_limit))
    prices[hard] = STEEP * most_cost(problem) * np.maximum([result.variable_values(x) for x in share], 0.0) / unit
    return prices
