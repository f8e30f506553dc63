"""The phases that make one variant of a pipelined model run on this rank: the agreed plan, its stages, lowered and bound."""
from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

import torch
import torch.distributed as dist

from autoshard.base.plan import Plan
from autoshard.base.roles import Role
from autoshard.base.spec import Spec
from autoshard.decide.pipeline_options import Pipeline
from autoshard.errors import PlanError, UsageError
from autoshard.lower.lower import lower
from autoshard.lower.schedule import schedule
from autoshard.pipeline.pipelined import Pipelined, pipelined_as, stage_plan
from autoshard.pipeline.turns import turns_of
from autoshard.recompute.rewrite import with_recompute
from autoshard.runtime.compile import Planner, Variant
from autoshard.runtime.execute.backends import backend_of
from autoshard.runtime.params.host_state import keep_on_host
from autoshard.runtime.pipeline.check_stages import check_stages
from autoshard.runtime.pipeline.runner import Runner
from autoshard.runtime.pipeline.stage_program import StageProgram
from autoshard.runtime.pipeline.step import PipelineStep
from autoshard.runtime.pipeline.wires import ORDERED, STEP, Wires, directed_pairs
from autoshard.runtime.ranks.agree import alone, share
from autoshard.runtime.ranks.conditions import warn_of_other_conditions
from autoshard.runtime.ranks.place import Place
from autoshard.runtime.route import route_of


@dataclass(eq=False)
class Settled:
    """Placements of parameters and buffers, the rank of the first stage that has each, what no stage reads, and where stages begin; empty before the
    first variant."""

    placements: dict[str, Spec] = field(default_factory=dict)
    first_rank: dict[str, int] = field(default_factory=dict)
    unread: frozenset[str] = frozenset()
    options: Pipeline | None = None


@dataclass(frozen=True, eq=False)
class PipelineVariant(Variant):
    """`first`: what the first variant settled, for all stages; `stored` holds the parameters of this rank's stages."""

    stage_place: Place | None = None
    first: Settled = field(default_factory=Settled)

    @property
    def settled(self) -> Mapping[str, Spec]:
        return self.first.placements

    @property
    def pipeline(self) -> Pipeline | None:
        return self.first.options

    def _plan(self, planner: Planner) -> Plan:
        try:
            return super()._plan(planner)
        except UsageError as e:
            if self.first.options is None:
                raise
            raise UsageError(f"{e}. Stages of this call begin where those of the first one do, which it may have left out (a layer that is dropped): "
                             "let stages begin at modules that run in every call, with Pipeline(cuts=...)") from e

    def check(self, plan: Plan) -> None:
        """Raises PlanError."""
        check_stages(plan, self.traced.graph, self.place.mesh)

    def assemble(self, plan: Plan) -> PipelineStep:
        """Cut, lower and bind this rank's stages; the parameters of other stages are let go. What no stage reads stays on every rank, whole:
        another variant may read it, in any stage."""
        running, place = self.settings.options.running, self.stage_place
        assert place is not None, "a variant of a pipeline has a place in its stage"
        made = alone(self.place, lambda: pipelined_as(self.traced.graph, plan))
        mine = made.stages_of(self.place.coordinates[0])
        plans = {s: alone(self.place, lambda s=s: stage_plan(plan, made, s)) for s in mine}
        lowered = {s: alone(self.place, lambda s=s: self._lowered(made, plans[s], s)) for s in mine}
        if not self.first.placements:
            alone(self.place, lambda: self.stored.check_checkpoint(running.checkpoint))
        share(self.place, "lowered", lambda: "", running.timeout)  # from here on ranks may meet in collectives
        if not self.first.placements:
            self._settle(plan, made, mine)
        elif lost := sorted(_names(made, mine) - {*self.stored.params, *self.stored.buffers, *self.traced.calling.constants}):
            raise PlanError(f"{lost[0]} is in another stage than where this rank's parameters are; plan this variant again")
        else:
            self._check_changed()
        wires = self._wires(made)
        if self.traced.graph.training:
            keep_on_host(self.stored.params, plan.offload, afresh=False)
        programs = {s: StageProgram.of(made.cut.stages[s], plans[s], lowered[s], place, self.stored, self.traced.calling, backend_of(running.backend))
                    for s in mine}
        turns = turns_of(made.table, made.cut.stages, wires.me)
        step = PipelineStep(made, self.traced.calling, plan, Runner(programs, made.table, turns, wires, self.stored), place, self.stored,
                            self.settings.options.passing.outputs)
        if self.traced.graph.training:
            step.tied.make_equal()
        return step

    def _settle(self, plan: Plan, made: Pipelined, mine: tuple[int, ...]) -> None:
        unread = frozenset({*self.stored.params, *self.stored.buffers} - _names(made, range(len(made.cut.stages))))
        self.stored.keep_only(_names(made, mine) | unread)
        self.stored.settle({n: p for n, p in plan.placements.items() if n in self.stored.params or n in self.stored.buffers}, self.seed,
                           self.settings.options.running.checkpoint, graph=self.traced.graph)
        self._make_equal(unread)
        warn_of_other_conditions(plan.cluster, self.place)
        whole = {n: self.stored.specs[n] for n in unread}
        stored = {n: p for n, p in plan.placements.items() if n not in self.traced.calling.constants}  # another variant has its own
        self.first.placements, self.first.options, self.first.unread = {**stored, **whole}, made.options, unread
        self.first.first_rank = {**dict.fromkeys(unread, made.table.rank_of[0]), **_first_ranks(made)}

    def _make_equal(self, names: frozenset[str]) -> None:
        """Give all stages the numbers of the first rank: ranks may have initialised the model differently."""
        assert self.place.device_mesh is not None, "a pipeline has a mesh of processes"
        group = self.place.device_mesh.get_group(self.place.mesh.names[0])
        for local in (self.stored.local(n).detach() for n in sorted(names)):
            if local.numel():
                sent = local.contiguous()
                dist.broadcast(sent.view(-1).view(torch.uint8), group=group, group_src=0)
                local.copy_(sent)

    def _check_changed(self) -> None:
        """Raises PlanError where this program changes what every rank has: those whose stages do not compute it would keep what it was."""
        outputs = {*self.traced.graph.outputs(Role.GRADIENT), *self.traced.graph.outputs(Role.MUTATION)}
        if changed := sorted(outputs & self.first.unread):
            raise PlanError(f"this call changes {changed[0]}, which the program of the first call did not read, so that every rank of the pipeline "
                            "has it whole; make the first call (that with the example inputs of compile) one that changes it, as training does")

    def _lowered(self, made: Pipelined, plan: Plan, s: int):
        graph = with_recompute(made.cut.stages[s].graph, plan.recompute)
        return lower(graph, plan, made.submesh, schedule(graph, plan, made.submesh, route_of(plan)))

    @cached_property
    def _ranks(self) -> list[int]:
        """Global ranks along the pipeline's axis, at this rank's place in the stages."""
        assert self.place.device_mesh is not None, "a pipeline has a mesh of processes"
        mesh = self.place.device_mesh.mesh
        return [int(mesh[(r, *self.place.coordinates[1:])]) for r in range(mesh.shape[0])]

    def _wires(self, made: Pipelined) -> Wires:
        rank_of, place, ranks = made.table.rank_of, self.place, self._ranks
        wanted = {(rank_of[h.source], rank_of[h.target], h.channel) for h in made.cut.hops if rank_of[h.source] != rank_of[h.target]}
        wanted |= {(a, b, STEP) for a in range(len(ranks)) for b in range(len(ranks)) if a != b}
        pairs = directed_pairs(ranks, wanted, place.device)
        group = place.device_mesh.get_group(place.mesh.names[0])

        def trouble(coordinate: int) -> str:
            return place.pulse.trouble(ranks[coordinate], 0.0) or f"global rank {ranks[coordinate]}; see its output"

        skips = sorted({h.channel for h in made.cut.hops if h.skips})
        return Wires(group, place.coordinates[0], place.device, trouble, (*ORDERED, *skips), pairs)


def _first_ranks(made: Pipelined) -> dict[str, int]:
    """Of every parameter, the rank of the first stage that has it."""
    return {n: made.table.rank_of[s.index] for s in reversed(made.cut.stages) for n in _names(made, (s.index,))}


def _names(made: Pipelined, mine: Iterable[int]) -> frozenset[str]:
    """Parameters and buffers that these stages read or write."""
    stages = [made.cut.stages[s] for s in mine]
    read = {n for stage in stages for kind in ("param", "buffer") for n in stage.names(kind)}
    return frozenset(read | {n for stage in stages for n in stage.graph.outputs(Role.MUTATION)})
