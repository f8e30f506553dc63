"""Checks the types of the arguments of `plan`, `compile` and `verify` first, so that errors name the argument and not an inner failure."""
from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from autoshard.base.plan import Plan
from autoshard.base.precision import Precision
from autoshard.decide.pipeline_options import Pipeline
from autoshard.errors import ModelError, UsageError
from autoshard.program.taken import Compiled

Check = tuple[Callable[[Any], bool], str]
OPTIONAL: dict[str, Check] = {
    "example_kwargs": (lambda v: isinstance(v, Mapping) and all(isinstance(k, str) for k in v),
                       "a mapping from argument names to values, {'mask': mask}"),
    "loss_fn": (callable, "a function of the model's output and the target, such as torch.nn.functional.cross_entropy"),
    "training": (lambda v: isinstance(v, bool), "True, False or None"),
    "precision": (lambda v: isinstance(v, Precision), "an autoshard.Precision, such as Precision('bf16') or Precision(param='bf16', master='fp32', "
                                                      "reduce='fp32')"),
    "pipeline": (lambda v: isinstance(v, Pipeline), "an autoshard.Pipeline, such as Pipeline(microbatches=4)"),
    "seeds": (lambda v: isinstance(v, Mapping) and all(isinstance(k, str) for k in v),
              "a mapping from names to layouts, {'layers.*.weight': 'tp,-'}"),
    "cluster": (lambda v: isinstance(v, (str, os.PathLike)), "the name of a profile or the path of a .toml file"),
    "memory_budget": (lambda v: isinstance(v, (str, int, float)) and not isinstance(v, bool), "bytes, or text such as '70GiB'"),
    "progress": (callable, "a function of (phase, detail)"),
    "plan": (lambda v: isinstance(v, (str, os.PathLike, Plan)), "an autoshard.Plan or the path of a plan file"),
}
REQUIRED: dict[str, Check] = {
    "thorough": (lambda v: isinstance(v, bool), "True or False"),
    "time_limit": (lambda v: isinstance(v, (int, float)) and not isinstance(v, bool), "a positive number of seconds"),
}


def check_arguments(given: Mapping[str, Any]) -> None:
    """Checks those of `given` that have a row above. Raises ModelError where `model` is no module, UsageError for what else is not of the kind
    its name asks for."""
    _check_model(given["model"])
    _check_inputs(given["example_inputs"])
    for name, value in given.items():
        fits, wanted = REQUIRED.get(name) or OPTIONAL.get(name) or (None, "")
        if fits is not None and not (value is None and name in OPTIONAL) and not fits(value):
            raise UsageError(f"{name} is {_what(value)}; give {wanted}")


def loaded(plan: Plan | str | os.PathLike[str] | None) -> Plan | None:
    """The plan, from its file where that is given. Raises PlanError."""
    return Plan.load(plan) if isinstance(plan, (str, os.PathLike)) else plan


def check_called(model: nn.Module, example_inputs: Sequence[Any], example_kwargs: Mapping[str, Any] | None) -> None:
    """Raises UsageError where nothing is given to a model that needs something, naming what."""
    if example_inputs or example_kwargs:
        return
    try:
        parameters = inspect.signature(model.forward).parameters.values()
    except (TypeError, ValueError):  # a forward made in C says nothing: tracing will
        return
    named = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    needed = [p.name for p in parameters if p.default is p.empty and p.kind in named]
    if needed:
        raise UsageError(f"there are no example inputs, and {type(model).__name__}.forward needs {', '.join(needed)}; "
                         f"give example_inputs=({needed[0]}, ...), tensors of the shapes and dtypes "
                         "that a step has (on the meta device where they need no memory)")


def _check_model(model: Any) -> None:
    if isinstance(model, nn.Module):
        if (path := next((name for name, part in model.named_modules() if isinstance(part, Compiled)), None)) is not None:
            raise ModelError(f"{path or 'the model'} is compiled already (autoshard.compile); plan, compile or verify the whole model once, made "
                             "of modules that are not compiled")
        return
    if inspect.isclass(model):
        raise ModelError(f"the model is the class {model.__name__}; give an instance of it, {model.__name__}(...)")
    if isinstance(model, str):
        raise ModelError(f"the model is the text {model!r:.60}; give a torch.nn.Module (names such as gpt:tiny are for the command line)")
    way = "; put it into the forward of a torch.nn.Module, whose parameters can then be sharded" if callable(model) else "; give a torch.nn.Module"
    raise ModelError(f"the model is {_what(model)}{way}")


def _check_inputs(inputs: Any) -> None:
    if isinstance(inputs, torch.Tensor):
        raise UsageError(f"example_inputs is one tensor of shape {tuple(inputs.shape)}; give a tuple of the positional inputs, (x,)")
    if isinstance(inputs, Mapping):
        raise UsageError("example_inputs is a mapping; give it as example_kwargs, and the positional inputs as a tuple")
    if inputs is not None and (isinstance(inputs, str) or not isinstance(inputs, Sequence)):
        raise UsageError(f"example_inputs is {_what(inputs)}; give a tuple of the positional inputs, (x,)")


def _what(value: Any) -> str:
    """A value for a message."""
    if value is None:
        return "None"
    name = getattr(value, "__name__", "")
    return f"the {type(value).__name__} {name}" if name and callable(value) else f"the {type(value).__name__} {value!r:.60}"
