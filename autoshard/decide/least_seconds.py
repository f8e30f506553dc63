"""A bound on what a program takes, whatever is around it."""
from __future__ import annotations

from dataclasses import replace

import numpy as np

from autoshard.decide.how import How
from autoshard.formulate.problem_of import formulate, unreachable
from autoshard.space.cost_table import CostTable, build_cost_table
from autoshard.space.layers import repeated_layers

MANY = 2**20
"""Runs in a step. What is paid once a step is less than a millionth of the bound then."""


def least_seconds(table: CostTable, how: How) -> tuple[float, float]:
    """Seconds of one run of all windows that run for every micro-batch, at least, and of the optimizer's update, at least: with ample memory, and
    all communication that can be hidden is. So the sum over parts of a program is a bound of the whole, since communication that
    one part does not hide another one may."""
    graph = replace(table.graph, microbatches=MANY)
    often = build_cost_table(graph, table.mesh, table.cluster, table.strategies, table.training)
    problem = formulate(replace(often, seeds=table.seeds), layers=repeated_layers(graph)).problem
    free = np.array([unreachable(problem.items, r) for r in range(len(problem.row_limit))])
    found = how.solve(replace(problem, row_limit=free))
    return max(0.0, found.bound) / MANY, sum(float(np.min(table.ops[op.name].update)) for op in graph.of_kind("param"))
