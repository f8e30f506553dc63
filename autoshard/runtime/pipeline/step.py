"""One variant of a pipelined model on this rank: runs the schedule when the model is called, and hands out gradients in `backward()`."""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from autoshard import _torch
from autoshard.base.graph import TensorMeta
from autoshard.base.plan import Plan
from autoshard.base.random import of_microbatch
from autoshard.base.roles import Role
from autoshard.base.spec import Spec, local_tensor_shape
from autoshard.base.windows import WEIGHTS
from autoshard.errors import AutoshardError
from autoshard.pipeline.microbatches.results import Results, joined_meta, piece, weight_dtype
from autoshard.pipeline.pipelined import Pipelined
from autoshard.program.calling import Calling
from autoshard.program.output_modes import AUTO, DTENSOR, REPLICATE, modes_of
from autoshard.runtime.hand_out import hand_out, multiply
from autoshard.runtime.inputs import localize
from autoshard.runtime.microbatches import Micro
from autoshard.runtime.own_memory import apart
from autoshard.runtime.params.stored import Stored
from autoshard.runtime.pipeline.runner import Run, Runner
from autoshard.runtime.pipeline.stage_place import stage_spec
from autoshard.runtime.pipeline.tied import Tied
from autoshard.runtime.pipeline.wires import ONCE, STEP, Message
from autoshard.runtime.ranks.place import Place


@dataclass(frozen=True)
class Shown:
    """A user output of the batch: its index in the graph, how it is put together, and how it lies on the last stage."""

    index: int
    meta: TensorMeta
    spec: Spec


class PipelineStep:
    """`place`: of this rank on the stage's submesh. `leaves` of autograd are the parameters of this rank's stages."""

    def __init__(self, made: Pipelined, calling: Calling, plan: Plan, runner: Runner, place: Place, stored: Stored,
                 outputs: str = REPLICATE) -> None:
        self.made, self.calling, self.plan, self.runner, self.place, self.stored = made, calling, plan, runner, place, stored
        self.graph, self.calls, self.tied = made.cut.graph, 0, Tied(made, runner.wires, stored)
        self.training = self.graph.training
        results = list(self.graph.outputs(Role.USER).values())
        many = self.graph.microbatches > 1
        before = Results(self.graph) if many else None
        self.ways = before.ways if before else [("", 0)] * len(results)
        self.shown = tuple(Shown(i, joined_meta(self.graph.meta(op.refs[0]), *way, self.graph.microbatches), plan.ops[op.name].inputs[0])
                           for i, (op, way) in enumerate(zip(results, self.ways, strict=True)) if way[0] != WEIGHTS)
        self.user_specs, self.user_metas = tuple(s.spec for s in self.shown), tuple(s.meta for s in self.shown)
        modes = list(modes_of(self.graph, outputs.replace(AUTO, REPLICATE)).values())
        self.modes = tuple(modes[s.index] for s in self.shown)
        self.wraps = DTENSOR in self.modes
        self.loss = next((op.target for op in self.graph.of_kind("tangent")), None)
        self.weighted = before is not None and before.loss_has_weights
        self.factor = before.factor if before else None
        own = (n for program in runner.programs.values() for n in program.grad_names)
        self.grad_names = tuple(dict.fromkeys((*own, *self.tied.names)))

    @property
    def status(self) -> str:
        """Of the plan."""
        return self.plan.status

    @property
    def owner(self) -> int:
        """Coordinate of the rank that has the last stage, where results are made."""
        return self.made.table.rank_of[-1]

    @property
    def is_owner(self) -> bool:
        return self.runner.wires.me == self.owner

    @cached_property
    def others(self) -> tuple[int, ...]:
        return tuple(r for r in range(len(self.made.table.ranks)) if r != self.owner)

    def run(self, tensors: Sequence[torch.Tensor], given: Sequence[Spec | None], seed: int, model: Any) -> tuple[torch.Tensor, ...]:
        """User outputs of one call, on every rank."""
        training = self.training and torch.is_grad_enabled()
        try:
            with torch.no_grad():
                outs, grads = self._step(tensors, given, seed, training)
        except (AutoshardError, RuntimeError) as e:
            model.name_who_left(e)
            raise
        if not training:
            return tuple(outs)
        leaves = [self.stored.params[n] for n in self.grad_names] or [torch.zeros((), requires_grad=True)]
        at = next(i for i, s in enumerate(self.shown) if s.index == self.loss)
        return hand_out(outs, at, grads, leaves, self._finished, [i for i, s in enumerate(self.shown) if s.index in self.calling.left_out])

    def _finished(self, grads: list[torch.Tensor]) -> list[torch.Tensor | None]:
        return [self.as_gradient(n, g) for n, g in zip(self.grad_names, grads, strict=True)] or [None]

    def _step(self, tensors: Sequence[torch.Tensor], given: Sequence[Spec | None], seed: int,
              training: bool) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Results of the batch, and local gradients in the order of `grad_names`."""
        found = _Found(self)
        run = Run(lambda stage, m: self._micro(stage, m, tensors, given, seed), found.add)
        self.runner.run(run, training)
        outs, factor = self._shared(found)
        grads = self.tied.summed(run.grads) if training else {}
        own = apart([grads[name] for name in self.grad_names]) if training else []
        if factor is not None:
            multiply(own, factor)
        return outs, own

    def _micro(self, stage: int, m: int, tensors: Sequence[torch.Tensor], given: Sequence[Spec | None], seed: int) -> Micro:
        """Local inputs of a micro-batch, as the stage reads them."""
        out = {}
        for i, name, dim, spec in self.runner.programs[stage].reads:
            out[name] = localize(piece(tensors[i], dim, m, self.graph.microbatches), stage_spec(given[i], self.place), spec, self.place)
        return Micro(out, of_microbatch(seed, m) if self.graph.microbatches > 1 else seed)

    # --- results on all ranks ---

    def _shared(self, found: _Found) -> tuple[list[torch.Tensor], torch.Tensor | None]:
        """Results, and what gradients must be multiplied by, from the rank that has them to those that do not."""
        wires = self.runner.wires
        if self.is_owner:
            outs, factor = found.finished()
            for other in self.others:
                for name, value in self._messages(outs, factor):
                    wires.send(Message(name, ONCE, self.owner, other, STEP), value)
            wires.flush()
            return outs, factor
        got = []
        for name, shape, dtype in self._expected():
            message = Message(name, ONCE, self.owner, wires.me, STEP)
            wires.post(message, shape, dtype)
            got.append(message)
        values = [wires.take(message) for message in got]
        return values[:len(self.shown)], values[len(self.shown)] if self.weighted else self.factor

    def _messages(self, outs: Sequence[torch.Tensor], factor: torch.Tensor | None) -> list[tuple[str, torch.Tensor]]:
        named = [(f"user:{s.index}", value) for s, value in zip(self.shown, outs, strict=True)]
        return [*named, ("factor", factor)] if self.weighted and factor is not None else named

    def _expected(self) -> list[tuple[str, tuple[int, ...], torch.dtype]]:
        named = [(f"user:{s.index}", local_tensor_shape(s.meta, s.spec, self.place.mesh), s.meta.dtype) for s in self.shown]
        if not self.weighted:
            return named
        (weight,) = (i for i, (how, _) in enumerate(self.ways) if how == WEIGHTS)
        meta = self.graph.meta(self.graph.outputs(Role.USER)[weight].refs[0])
        return [*named, ("factor", meta.shape, weight_dtype(meta.dtype))]

    # --- gradients ---

    def as_gradient(self, name: str, local: torch.Tensor) -> torch.Tensor:
        """A local gradient in the form that its parameter has."""
        return local if self.place.device_mesh is None else _torch.dtensor_like(local, self.stored.params[name])


class _Found:
    """Results of micro-batches on the rank that has the last stage."""

    def __init__(self, step: PipelineStep) -> None:
        self.step, self.joined = step, Results(step.graph) if step.graph.microbatches > 1 else None
        self.outs: list[torch.Tensor] = []

    def add(self, m: int, users: dict[Any, torch.Tensor]) -> dict[Any, torch.Tensor] | None:
        """The tangents of a micro-batch's outputs; None for one that counts nothing."""
        loss, outs = self.step.loss, [users[i] for i in range(len(users))]
        if self.joined is None:
            self.outs = outs
            return {} if loss is None else {loss: torch.ones_like(outs[loss])}
        self.joined.add(m, list(outs))
        return {loss: self.joined.tangent(loss).to(self.step.place.device)} if self.joined.counts else None

    def finished(self) -> tuple[list[torch.Tensor], torch.Tensor | None]:
        if self.joined is None:
            return self.outs, None
        return self.joined.finished(), self.joined.factor
