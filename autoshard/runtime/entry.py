"""Arguments of `autoshard.compile` -> a `CompiledModule`."""
from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from autoshard import _torch
from autoshard.base.plan import Plan
from autoshard.base.precision import Precision
from autoshard.errors import UsageError
from autoshard.runtime.cache import cache_folder
from autoshard.runtime.compile import Planner, Settings
from autoshard.runtime.execute.backends import backend_of
from autoshard.runtime.inputs import Passing
from autoshard.runtime.module import CompiledModule
from autoshard.runtime.ranks.heartbeat import JOIN
from autoshard.runtime.ranks.place import locate
from autoshard.runtime.ranks.same_inputs import CHECKS


def compile_model(model: nn.Module, mesh: Any, planner: Planner, *, example_inputs: Sequence[Any] | None = None,
                  example_kwargs: Mapping[str, Any] | None = None, loss_fn: Callable[..., Any] | None = None,
                  training: bool | None = None, precision: Precision | None = None, inputs: str = "global",
                  outputs: str = "replicate", batch_axes: Sequence[str] = (), plan: Plan | str | os.PathLike[str] | None = None,
                  backend: str = "eager", cache: bool | str | os.PathLike[str] = True, key: str = "",
                  checkpoint: str | None = None, device: Any = None, timeout: float = 3600.0, join_timeout: float = JOIN,
                  marks: Mapping[str, str] | None = None, fallback: str = "error", check_inputs: str = CHECKS[0]) -> CompiledModule:
    """The model as a sharded module. Without `example_inputs` it is planned at its first call.

    planner       searches a plan for a traced variant; runs on the leading rank only
    training      for example_inputs: whether to prepare the training variant (default: as `model.training` and
                  grad mode say)
    batch_axes    with inputs="local": mesh axes that split dim 0 of every input (default: the first)
    plan          a Plan or its file, replayed for the variant it was made for
    key           text of everything the planner was set to, part of the cache key
    checkpoint    folder of a torch.distributed.checkpoint to fill a meta model from
    timeout       seconds to wait for the leading rank
    join_timeout  seconds to wait for ranks that have not called this
    marks         seeds on what leaves modules, as `trace` wants them; those of the given plan where there are none
    check_inputs  when ranks compare the numbers of their inputs: "first" calls of a variant, "always", "never"
    fallback      as `trace` wants it; that of the given plan where it is "error"

    Raises MeshError, UsageError, PlanError; with example_inputs also what tracing and planning raise."""
    backend_of(backend)
    _refuse_hooks(model)
    place = locate(mesh, device, join_timeout)
    for axis in batch_axes:
        place.mesh.index(axis)
    loaded = plan if plan is None or isinstance(plan, Plan) else Plan.load(plan)
    settings = Settings(planner, loss_fn, precision, Passing(inputs, outputs, tuple(batch_axes)), backend, loaded,
                        cache_folder(cache), key, timeout, checkpoint,
                        dict(marks or (loaded.seeds if loaded else {})),
                        loaded.settings.get("fallback", fallback) if loaded and fallback == "error" else fallback,
                        check_inputs)
    compiled = CompiledModule(model, place, settings)
    if example_inputs is not None:
        wanted = torch.is_grad_enabled() and model.training if training is None else training
        with torch.set_grad_enabled(wanted):
            compiled.prepare(*example_inputs, **dict(example_kwargs or {}))
    return compiled


def _refuse_hooks(model: nn.Module) -> None:
    """Compiling copies the model, and a copy of a parameter has no hooks: they would be lost without a word."""
    for name, p in model.named_parameters():
        if p.requires_grad and _torch.has_gradient_hook(p):
            raise UsageError(f"parameter {name!r} has a gradient hook (register_hook or register_post_accumulate_grad_hook), and the compiled model "
                             "has parameters of its own; register it on those, after compile()")
