"""Recomputation chosen together with the placements: the best over all subsets of ops."""
from __future__ import annotations

from dataclasses import replace
from itertools import combinations

import pytest
import torch
from small_models import Wavy

from autoshard.base.mesh import parse_mesh
from autoshard.base.plan import RECOMPUTE_SUFFIX
from autoshard.decide.make_plan import chosen_by, price
from autoshard.decide.options import Options
from autoshard.formulate.builder import MEMORY
from autoshard.formulate.problem_of import formulate
from autoshard.planner.one_stage import prices
from autoshard.program.trace import trace
from autoshard.recompute.rewrite import candidates, with_recompute
from autoshard.recompute.undecided import open_table, open_units
from autoshard.search import solve
from autoshard.search.problem import evaluate, row_loads
from autoshard.space.decision_units import singletons


def subsets(table):
    """(seconds, bytes at the turn) of every program that recomputes some ops, on one rank: there are no placements to choose."""
    names = candidates(table.graph)
    for n in range(len(names) + 1):
        for again in combinations(names, n):
            graph = with_recompute(table.graph, again)
            ops, strategies = ({op.name: of[op.name.removesuffix(RECOMPUTE_SUFFIX)] for op in graph.ops} for of in (table.ops, table.strategies))
            program = replace(table, graph=graph, ops=ops, strategies=strategies, _tables={})
            problem = formulate(program, units=singletons(program)).problem
            choice = solve(problem).choice
            yield evaluate(problem, choice), row_loads(problem, choice)[MEMORY]


def test_the_choice_is_the_best_of_all_subsets() -> None:
    table = prices(trace(Wavy(), (torch.randn(64, 4),)), parse_mesh("dp=1"), Options(cluster="h100-dgx", optimizer="sgd"))
    every, opened = list(subsets(table)), open_table(table)
    units, again = open_units(singletons(table), opened), set()
    update = 2.0 * table.graph.of_kind("param")[0].outputs[0].nbytes  # the parameter and its gradient, by themselves less than any value
    for limit in sorted({nbytes for _, nbytes in every}):
        formulation = formulate(opened, memory_limit=max(limit, update), units=units)
        found = solve(formulation.problem)
        chosen = chosen_by(formulation, found.choice)
        again.add(sum(name.endswith(RECOMPUTE_SUFFIX) for name in chosen.strategies))
        assert found.cost == pytest.approx(min(s for s, nbytes in every if nbytes <= limit), rel=1e-9)
        assert price(chosen)["step_s"] == pytest.approx(found.cost, rel=1e-9)
    assert len(again) > 2 and 0 in again
    assert solve(formulate(opened, memory_limit=update / 2, units=units).problem).choice is None
