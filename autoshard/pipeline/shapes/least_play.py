"""What a step takes at least when its schedule is played, for any cuts: a linear program.

How long a stage is, is open: blocks of a kind may be in parts, and in any order, but for the first and the last one. Every action then lasts at least
the floors of its stage's blocks, and begins after the ones that it waits for. So no way through the schedule is longer than the step, and of all
lengths of stages the program has those in which the longest way is the shortest. Floors of a step, and the memory of a rank, are rows of it too:

    M (F + I + W) + once >= floors of a step                        of all stages of a rank
    M (F + I + W) + once + price x limit >= floors at that price    of what the rank holds at some moment

Bounds of a partition (`search/partition/bound.py`) look at one stage at a time and say little where ranks have several; this one sees all of them.
"""
from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from ortools.math_opt.python import mathopt

from autoshard.pipeline.action_lists.network import NOTHING, Network
from autoshard.pipeline.shapes.floors import Floor
from autoshard.pipeline.shapes.partitions import uncovered
from autoshard.search.partition import Course

MOST_EVENTS = 12_000
"""A program of so many takes a second."""
SCALE, PRECISION = 1e3, 1e-7
"""Of the step in the program, whose tolerances are absolute; relative, of what it says."""
SENDS = ("SEND_F", "SEND_B")
Sum = mathopt.LinearSum
Variable = mathopt.Variable


def least_played(network: Network, course: Course, floor: Floor) -> float:
    """Seconds; 0 where the program is too large. `network`: of the computations of a step, and what crosses ranks."""
    if len(network.events) > MOST_EVENTS:
        return 0.0
    return _Program(network, course, floor).least()


class _Program:
    def __init__(self, network: Network, course: Course, floor: Floor) -> None:
        self.network, self.course, self.floor, self.model = network, course, floor, mathopt.Model()
        self.m, self.split = course.microbatches, network.table.split_backward
        self.unit = SCALE * len(course.of_rank) / max(float((self.m * floor.whole + floor.once).sum()), 1e-30)
        priced = [floor.priced.empty, floor.priced.full] if floor.priced is not None else []
        rows = np.stack([floor.forward, floor.whole, floor.once, floor.input, *floor.steps, *priced])
        _, self.first, self.kind = np.unique(rows, axis=1, return_index=True, return_inverse=True)
        self.lengths = self._lengths()
        self.stages = [self._stage(s) for s in range(course.stages)]

    def least(self) -> float:
        for rank, loads in enumerate(self.course.loads):
            self._rank(rank, loads)
        self.model.minimize(self._played() + self._once())
        found = mathopt.solve(self.model, mathopt.SolverType.GLOP)
        if found.termination.reason is not mathopt.TerminationReason.OPTIMAL:
            return 0.0
        return max(0.0, (1.0 - PRECISION) * found.termination.objective_bounds.dual_bound / self.unit)

    def _new(self, least: float = 0.0, most: float = np.inf) -> Variable:
        return self.model.add_variable(lb=least, ub=most)

    def _lengths(self) -> list[list[Variable]]:
        """[stage][kind]: how many blocks of the kind are in the stage. Every stage has a block, the first one the first."""
        counts, last = np.bincount(self.kind.ravel()), self.course.stages - 1
        lengths = [[self._new(most=float(n)) for n in counts] for _ in range(self.course.stages)]
        for kind, count in enumerate(counts.tolist()):
            self.model.add_linear_constraint(mathopt.fast_sum([of[kind] for of in lengths]) == float(count))
        for of in lengths:
            self.model.add_linear_constraint(mathopt.fast_sum(of) >= 1.0)
        for stage, block in ((0, 0), (last, -1)):
            self.model.add_linear_constraint(lengths[stage][int(self.kind.ravel()[block])] >= 1.0)
        return lengths

    def _of(self, values: np.ndarray, stage: int) -> Sum:
        """The sum of a floor over the blocks of a stage."""
        each = self.unit * values[self.first]
        return mathopt.fast_sum([float(v) * x for v, x in zip(each, self.lengths[stage]) if v])

    def _stage(self, s: int) -> _Stage:
        """Where no gradient goes on, all of a backward in two parts is in the second."""
        made = _Stage(*(self._new() for _ in range(4)))
        self.model.add_linear_constraint(made.forward >= self._of(self.floor.forward, s))
        self.model.add_linear_constraint(made.microbatch >= self._of(self.floor.whole, s))
        self.model.add_linear_constraint(made.once >= self._of(self.floor.once, s))
        if s and self.split:
            self.model.add_linear_constraint(made.input >= self._of(self.floor.input, s))
        return made

    def _rank(self, rank: int, loads: np.ndarray) -> None:
        stages = self.course.of_rank[rank].tolist()
        worked = mathopt.fast_sum([self.m * self.stages[s].microbatch + self.stages[s].once for s in stages])
        for step in self.floor.steps:
            self.model.add_linear_constraint(worked >= mathopt.fast_sum([self._of(step, s) for s in stages]))
        if (priced := self.floor.priced) is None:
            return
        paid = self.unit * priced.price * priced.limit
        for held in uncovered(loads[:, 0]):
            counted = mathopt.fast_sum([self._of(priced.at(float(n)), s) for s, n in zip(stages, held)])
            self.model.add_linear_constraint(worked + paid >= counted)

    def _once(self) -> Variable:
        """The step's end comes after it: that of the rank that takes longest."""
        end = self._new()
        for stages in self.course.of_rank:
            self.model.add_linear_constraint(end >= mathopt.fast_sum([self.stages[s].once for s in stages.tolist()]))
        return end

    def _played(self) -> Variable:
        """Transfers begin as soon as what they send is there, whatever else is on the wire."""
        network, step = self.network, self._new()
        ends = [None if action.kind in SENDS else self._new() for action in network.events]
        for event, action in enumerate(network.events):
            if (end := ends[event]) is None:
                continue
            lasts, first = self._lasts(action.kind, action.stage), True
            for before in {int(network.before[event]), int(network.source[event])} - {NOTHING}:
                hop, sent = 0.0, network.events[before].kind
                if sent in SENDS:
                    hop, before = self.unit * self.floor.hops[SENDS.index(sent)], int(network.source[before])
                self.model.add_linear_constraint(end - ends[before] - lasts >= hop)
                first = False
            if first:
                self.model.add_linear_constraint(end - lasts >= 0.0)
        last = {int(place): event for event, place in enumerate(network.place) if place != NOTHING}  # each comes after all before it on its rank
        for event in last.values():
            self.model.add_linear_constraint(step - ends[event] >= 0.0)
        return step

    def _lasts(self, kind: str, stage: int) -> Sum | Variable:
        made = self.stages[stage]
        return {"F": made.forward, "I": made.input, "W": made.weight, "B": made.input + made.weight}[kind]


@dataclass(frozen=True)
class _Stage:
    """Seconds of its windows, and of what it does once a step."""

    forward: Variable
    input: Variable
    weight: Variable
    once: Variable

    @property
    def microbatch(self) -> Sum:
        return self.forward + self.input + self.weight
