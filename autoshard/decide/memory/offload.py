"""Optimizer state on the host: the search without it, and starting plans that fit because some of it is moved there.

The cost per byte on the host hardly depends on the parameter. So the fastest plan, with just enough optimizer state moved to the
host, is often close to the best. It is cheap to compute, and the search starts from it.
"""
from __future__ import annotations

from dataclasses import replace

import numpy as np

from autoshard.base.graph import Ref
from autoshard.cost.memory import stored_parts
from autoshard.decide.how import How
from autoshard.decide.memory.fit import search_within
from autoshard.decide.program import Program
from autoshard.formulate.problem_of import Formulation
from autoshard.search.problem import Solution

ALONE = 2 / 3
"""Share of the time for plans without state on the host."""


def search_offloading(program: Program, how: How) -> Solution:
    """`search_within` with optimizer state on the host allowed. Searches without it first, then with it from the plan found."""
    here = search_within(replace(program, formulation=on_device(program.formulation)), how.part(ALONE))
    starts = program.starts if here.choice is None else (*program.starts, here.choice)
    return search_within(replace(program, starts=starts), how)


def on_device(formulation: Formulation) -> Formulation:
    """The formulation without strategies that keep state on the host."""
    problem, sets, costs = formulation.problem, formulation.table.strategies, list(formulation.problem.node_costs)
    made: dict[tuple[int, int], np.ndarray] = {}
    for n, unit in enumerate(formulation.units.units):
        found = sets[unit.name]
        if found.on_host is not None:
            key = (id(costs[n]), id(found))
            if key not in made:
                made[key] = np.where(found.on_host[unit.picked[0]], np.inf, costs[n])
            costs[n] = made[key]
    return replace(formulation, problem=replace(problem, node_costs=tuple(costs)))


def move_to_fit(program: Program, choice: np.ndarray) -> np.ndarray | None:
    """The choice with its largest optimizer states moved to the host, as few as keep the timeline within the budget. None if
    moving all of them is not enough."""
    formulation = program.formulation
    sizes = _state_bytes(formulation, choice)
    order = sorted(sizes, key=lambda n: -sizes[n])

    def with_first(count: int) -> np.ndarray:
        out = np.array(choice)
        for n in order[:count]:
            out[n] = moved_to_host(formulation, n, int(choice[n]))
        return out

    if program.fits(choice):
        return choice
    low, high = 1, len(order)
    if not program.fits(with_first(high)):
        return None
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if program.fits(with_first(middle)) else (middle + 1, high)
    return with_first(high)


def moved_to_host(formulation: Formulation, node: int, strategy: int) -> int:
    """The strategy equal to `strategy` of a parameter's unit, but with the optimizer state on the host (`with_host`)."""
    unit = formulation.units.units[node]
    picked, half = unit.picked[0], len(formulation.table.strategies[unit.name]) // 2
    return int(np.flatnonzero(picked == picked[strategy] + half)[0])


def _state_bytes(formulation: Formulation, choice: np.ndarray) -> dict[int, int]:
    """Bytes of optimizer state on the device by node, of parameters whose state may lie on the host."""
    table, units, out = formulation.table, formulation.units, {}
    for n, unit in enumerate(units.units):
        found, s = table.strategies[unit.name], unit.picked[0][choice[n]]
        if found.on_host is not None and found.on_device[s]:
            specs, meta = units.outputs(Ref(unit.name)), table.graph.op(unit.name).outputs[0]
            out[n] = stored_parts(meta, specs.specs[specs.index[choice[n]]], table.mesh, table.training.optimizer)["optimizer"]
    return out
