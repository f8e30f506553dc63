"""One batch of a model, planned more than once: with other budgets, seeds, meshes or clusters. What one plan finds out and another one needs is kept.

| asked anew | kept |
| --- | --- |
| budget, time limit | trace, strategies, prices, problem, starting plans, memory of plans played; the search with ample memory, where it ended |
| numbers of the cluster | trace, strategies, what decides together; where the problem has the same nodes: starting plans, prices of rows |
| mesh, seeds, optimizer | trace |
| batch (another workbench) | where the problem has the same nodes: starting plans, prices of rows |
"""
from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from autoshard.base.fine_mesh import NEVER
from autoshard.base.mesh import AnyMesh, Mesh, mesh_of
from autoshard.base.plan import Plan
from autoshard.cost.cluster import Cluster, load_cluster
from autoshard.decide.memory.memory_problems import possible
from autoshard.decide.options import Options
from autoshard.decide.phase_timer import PhaseTimer
from autoshard.decide.program import Learned, Program, formulate_within, with_starts
from autoshard.formulate.problem_of import Formulation
from autoshard.pipeline.microbatches.batch import Batch
from autoshard.planner.one_stage import decide, prices, program_of
from autoshard.planner.open_mesh import is_open, plan_batch
from autoshard.program.calling import Traced
from autoshard.search.problem import Solution
from autoshard.space.cost_table import CostTable

MOST_PROGRAMS = 3
"""Programs that are kept."""


@dataclass(eq=False)
class Workbench:
    """`batch` and what is known about it. `has_loss`, `model_info`: what its plans say about the model. `others`: workbenches with other batches
    of the same model, the one used last comes last."""

    batch: Batch
    has_loss: bool = False
    model_info: Mapping[str, Any] = field(default_factory=dict)
    others: "Collection[Workbench]" = ()
    _traced: dict[str, Traced] = field(default_factory=dict)
    _programs: dict[str, Program] = field(default_factory=dict)
    _known: dict[str, Solution] = field(default_factory=dict)

    def plan(self, mesh: Mesh | AnyMesh, options: Options, *, profile: Cluster | None = None, clock: PhaseTimer | None = None) -> Plan:
        """As `plan_batch`, with all that is kept. `profile`: instead of `options.cluster`. Of a mesh that is open, of one with pipeline
        stages, and where axes may be taken in parts, traces alone are kept. Raises what `autoshard.plan` raises."""
        profile, clock = profile or load_cluster(options.cluster), clock or PhaseTimer()
        how: dict[str, Any] = {"has_loss": self.has_loss, "model_info": self.model_info}
        if is_open(mesh, options) or options.pipeline.stages(mesh_of(mesh)) > 1 or options.refine_axes != NEVER:
            return plan_batch(self.batch, mesh, options, clock=clock, profile=profile, **how)
        mesh = mesh_of(mesh)
        program = self.program(mesh, options, profile, clock)
        return decide(program.formulation.table, options, clock=clock, known=self._known, program=program, **how)

    def traced(self, mesh: Mesh, options: Options, clock: PhaseTimer) -> Traced:
        """The program of the batch on a mesh, cut into micro-batches as the options say."""
        key = f"{mesh} {options.pipeline}"
        if key not in self._traced:
            with clock("trace"):
                self._traced[key] = self.batch.on(mesh, options.pipeline)
        return self._traced[key]

    def table(self, mesh: Mesh, options: Options, *, profile: Cluster | None = None, clock: PhaseTimer | None = None) -> CostTable:
        """What everything costs."""
        return self.program(mesh, options, profile or load_cluster(options.cluster), clock or PhaseTimer()).formulation.table

    def program(self, mesh: Mesh, options: Options, profile: Cluster, clock: PhaseTimer) -> Program:
        """What there is to decide, within the budget of the options."""
        traced = self.traced(mesh, options, clock)
        options.check_offload(profile, traced.graph.training)
        limit, same = options.memory_limit(profile), _same(mesh, options)
        key = f"{same} {profile!r}"
        if key not in self._programs:
            like = next((p for k, p in reversed(self._programs.items()) if k.startswith(same)), None)
            table = prices(traced, mesh, options, clock=clock, profile=profile, like=like and like.formulation.table)
            like = like or self._elsewhere(key)
            with clock("formulate"):
                made = program_of(table, options, has_loss=self.has_loss) if like is None else program_like(like, table, limit)
            self._programs[key] = made
        self._programs[key] = self._programs.pop(key)  # the one used last comes last
        for oldest in list(self._programs)[:-MOST_PROGRAMS]:
            del self._programs[oldest]
        return self._programs[key].within(limit)

    def _elsewhere(self, key: str) -> Program | None:
        """The program of another batch that was asked the same."""
        return next((bench._programs[key] for bench in reversed(list(self.others)) if key in bench._programs), None)


def _same(mesh: Mesh, options: Options) -> str:
    """Text that is equal where strategies are: all but budget, time and cluster."""
    return f"{mesh} {replace(options, memory_budget=None, time_limit=Options.time_limit, search=Options.search).text}"


def program_like(like: Program, table: CostTable, limit: float) -> Program:
    """The program of `table`, whose strategies are those of `like`: its plans are starting plans, where they are plans here."""
    old = like.formulation
    same = table.strategies is old.table.strategies and (table.cluster.overlap.eta > 0) == (old.table.cluster.overlap.eta > 0)
    formulation = formulate_within(table, limit, replace(old.units, table=table) if same else None)  # `find_units` asks whether anything overlaps
    choices = (*like.starts, *like.learned.choices) if _alike(old, formulation) else ()
    starts = tuple(possible(formulation.problem, choices))
    if len(starts) < len(like.starts):
        return with_starts(formulation, like.settings)
    near = tuple(possible(formulation.problem, like.learned.near))
    return replace(with_starts(formulation, like.settings, starts), learned=Learned(near=near))


def _alike(ours: Formulation, theirs: Formulation) -> bool:
    """Whether a choice means the same in both: the same strategies of the same ops, and the same states of the same copies."""
    if ours.units is not theirs.units and [u.members for u in ours.units.units] != [u.members for u in theirs.units.units]:
        return False
    if [(c.value, c.spec) for c in ours.copies] != [(c.value, c.spec) for c in theirs.copies]:
        return False
    states = {(id(c.states), id(d.states)): (c.states, d.states) for c, d in zip(ours.copies, theirs.copies, strict=True)}  # equal layers share them
    if any([(s.name, s.serves, s.times) for s in a] != [(s.name, s.serves, s.times) for s in b] for a, b in states.values()):
        return False
    mine, others = ours.table.strategies, theirs.table.strategies
    if mine is others:
        return True
    pairs = {}
    for u, v in zip(ours.units.units, theirs.units.units, strict=True):
        for name, p, q in zip(u.members, u.picked, v.picked, strict=True):
            pairs[id(mine[name]), id(others[name]), id(p), id(q)] = mine[name], p, others[name], q
    return all(np.array_equal(a.inputs[p], b.inputs[q]) and np.array_equal(a.outputs[p], b.outputs[q]) for a, p, b, q in pairs.values())
