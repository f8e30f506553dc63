"""`PipelineModule`: the stages that this rank has of the user's model, as an ordinary nn.Module."""
from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NoReturn

import torch
from torch import nn

from autoshard.base.plan import Plan
from autoshard.errors import UsageError
from autoshard.program.calling import Traced
from autoshard.program.tracing.twin import copy_tree, kept_results
from autoshard.runtime.compile import Settings, Variant
from autoshard.runtime.module import CompiledModule
from autoshard.runtime.outside import is_data
from autoshard.runtime.params.clip import pipelines
from autoshard.runtime.params.module_shells import OWN, PLAIN
from autoshard.runtime.pipeline.empty_groups import load_empty_groups, make_empty_optimizers
from autoshard.runtime.pipeline.stage_place import stage_place, stage_spec
from autoshard.runtime.pipeline.variant import PipelineVariant, Settled
from autoshard.runtime.ranks.place import Place


class PipelineModule(CompiledModule):
    """Parameters and buffers are those of this rank's stages, under the names they have in the model, on the mesh of the stages
    (`stage_place`). Which, the plan of the first variant says."""

    def __init__(self, model: nn.Module, place: Place, stage_place: Place, settings: Settings) -> None:
        self.__dict__["_stage_place"] = stage_place
        super().__init__(model, place, settings)
        pipelines().add(self)
        load_empty_groups()
        make_empty_optimizers()
        self.__dict__["_skeleton"] = _without_memory(model, self._stored.module)
        self.__dict__["_settled"] = Settled()
        self.__dict__["_trains"] = {name: p.requires_grad for name, p in model.named_parameters()}
        self._names = frozenset(self.state_dict())
        self._trainable = ()  # they differ between ranks, and may not change

    @property
    def _stores_at(self) -> Place:
        return self._stage_place

    @property
    def _program(self) -> nn.Module:
        return self._skeleton

    @property
    def trains(self) -> bool:
        """Whether it ran, and any stage has a parameter to train."""
        return bool(self._settled.placements) and any(self._trains.values())

    def is_first_holder(self, name: str) -> bool:
        """Of a parameter that several stages have, the first one's rank counts it."""
        return self._settled.first_rank.get(name) == self.place.coordinates[0]

    def _variant(self, traced: Traced, fixed: Mapping[str, Any], replan: bool) -> Variant:
        here = {name: stage_spec(spec, self._stage_place) for name, spec in fixed.items()}
        return PipelineVariant(traced, self.place, self._stored, self.settings, here, self._seed, replan, (), self._stage_place, self._settled)

    def _key(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[tuple[Any, ...], list[Any], list[torch.Tensor]]:
        if torch.is_grad_enabled():
            self._check_trainable()
        return super()._key(args, kwargs)

    def _check_trainable(self) -> None:
        """Raises UsageError: ranks of other stages do not see what is frozen here, and all have parts of one program."""
        for name, p in self._stored.params.items():
            if p.requires_grad != self._trains[name]:
                raise UsageError(f"{name}.requires_grad became {p.requires_grad} behind autoshard.compile, which pipelines do not follow; set it on "
                                 "the model before, and to change it save a checkpoint and compile again")

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Gradients are complete after every backward, also inside: a step adds up its micro-batches itself."""
        yield

    def replan(self, optimizer: torch.optim.Optimizer | None = None) -> Plan:
        raise UsageError("replan() would move parameters between the ranks of a pipeline; save a checkpoint, compile again and load it")

    def __deepcopy__(self, memo: Any) -> NoReturn:
        raise UsageError("a pipeline cannot be deep-copied; keep a dict of averaged parameters (docs/training-loop.md), or compile another copy of "
                         "the model and load this one's state_dict()")

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """As usual; tensors of other stages may be in it, and are left out. Their shapes are looked at, so that all ranks raise where one does."""
        own = self.state_dict()
        for name, t in (*self._skeleton.named_parameters(remove_duplicate=False), *self._skeleton.named_buffers(remove_duplicate=False)):
            if name not in own and (given := state_dict.get(name, t)).shape != t.shape:
                raise RuntimeError(f"load_state_dict: size mismatch for {name}, which another stage has: {tuple(given.shape)} where the model has "
                                   f"{tuple(t.shape)}")
        kept = {k: v for k, v in state_dict.items() if k in own or k not in self._names}
        own.clear()  # it says the versions of modules; batch norms without one are loaded by a buffer that another stage may have
        own.update(kept)
        return super().load_state_dict(own, strict, assign)


def pipeline_module(model: nn.Module, place: Place, settings: Settings, has_inputs: bool) -> PipelineModule:
    """Raises UsageError where the model could not be cut at once, and for local inputs without an axis to split them over."""
    axis, passing = settings.options.pipeline.axis, settings.options.passing
    if not has_inputs:
        raise UsageError("a pipeline decides which parameters this rank has when it cuts the model: pass example_inputs to compile")
    if place.device_mesh is None:
        raise UsageError(f"the mesh {place.mesh} has a pipeline, and there is no process group; start the script with torchrun")
    if passing.inputs == "local" and not passing.batch_axes:
        if place.mesh.ndim == 1:
            raise UsageError(f'inputs="local": the mesh {place.mesh} has no axis to split a batch over, all ranks of a pipeline pass the same; '
                             'leave it out')
        passing = replace(passing, batch_axes=place.mesh.names[1:2])
        settings = replace(settings, options=replace(settings.options, passing=passing))
    return PipelineModule(model, place, stage_place(place, axis), settings)


def _without_memory(model: nn.Module, stored: nn.Module) -> nn.Module:
    """A copy on the meta device, to trace other variants with. Configs and the like it shares with `stored`, whose the user sees and may change."""
    memo: dict[int, Any] = dict(kept_results(model))
    for t in model.parameters():
        memo[id(t)] = nn.Parameter(torch.empty(t.shape, dtype=t.dtype, device="meta"), requires_grad=t.requires_grad)
    for t in model.buffers():
        memo[id(t)] = torch.empty(t.shape, dtype=t.dtype, device="meta")
    for mine, theirs in zip(model.modules(), stored.modules(), strict=True):
        memo |= {id(value): vars(theirs)[name] for name, value in vars(mine).items()
                 if name not in OWN and name in vars(theirs) and not isinstance(value, PLAIN) and is_data(value, set())}
    return copy_tree(model, memo)
