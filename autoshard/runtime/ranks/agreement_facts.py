"""What ranks must agree on before they prepare a call together, in words: the first difference is the error message."""
from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch import nn

from autoshard.base.spec import Spec, format_spec
from autoshard.runtime.compile import Settings
from autoshard.runtime.ranks.agree import OUTSIDE

ALL = "all"


def call_facts(model: nn.Module, settings: Settings, key: Any, call: int, first: bool, which: str, outside: str) -> dict[str, str]:
    """`key` is that of `CompiledModule._key`. Of the `first` call also the model and the options; later they cannot differ. What the code reads from
    `outside` may, a rank's number is often there, but not `which` of the variants that are there it leads to."""
    (grad, autocast, training, trainable, plain, _), tree, leaves, given = key
    still = 0 if not any(training) else training.count(False)
    mode = f"{'training' if any(training) else 'evaluation'} mode" + (f" but for {still} of {len(training)} modules" if still else "")
    mode += f", gradients {'on' if grad else 'off'}"
    mode += f", autocast to {autocast}" if autocast else ""
    facts = {"mode": mode, "inputs": _inputs(leaves, given), "structure of the arguments": str(tree),
             "modes of the modules": _digest(training), "trainable parameters": _trainable(model, trainable),
             "attributes of the modules": _digest(plain), "number of calls": str(call), "variant": which, OUTSIDE: outside}
    if not first:
        return facts
    return {"model": type(model).__name__, "parameters": _tensors(model.named_parameters()),
            "buffers": _tensors(model.named_buffers()), **facts, "options": _options(settings)}


def in_words(facts: dict[str, str]) -> str:
    """What a call is, for messages."""
    trains = facts["trainable parameters"]
    outside = f", {facts[OUTSIDE]}" if facts[OUTSIDE] else ""
    return f"{facts['mode']}{'' if trains == ALL else f', trainable parameters {trains}'}{outside} with inputs {facts['inputs']}"


def _trainable(model: nn.Module, trainable: tuple[bool, ...]) -> str:
    frozen = [name for (name, _), trains in zip(model.named_parameters(), trainable, strict=False) if not trains]
    more = f" and {len(frozen) - 3} more ({_digest(frozen)})" if frozen[3:] else ""
    return f"all but {', '.join(frozen[:3])}{more}" if frozen else ALL


def inputs_in_words(key: Any) -> str:
    """Shapes and dtypes of a call, for the log."""
    return _inputs(key[2], key[3])


def _inputs(leaves: Any, given: Any) -> str:
    specs = iter(given)
    return ", ".join(_tensor(*leaf[:2], next(specs)) if isinstance(leaf[0], tuple) else ", ".join(map(repr, leaf[1:])) for leaf in leaves) or "none"


def _tensor(shape: tuple[int, ...], dtype: torch.dtype, spec: Spec | None) -> str:
    return f"{shape} {str(dtype).removeprefix('torch.')}" + (f" as {format_spec(spec)}" if spec is not None else "")


def _tensors(named: Any) -> str:
    return "\n".join(f"{name} {tuple(t.shape)} {t.dtype}{'' if t.requires_grad or not isinstance(t, nn.Parameter) else ' frozen'}"
                     for name, t in named)


def _options(settings: Settings) -> str:
    options, running = settings.options, settings.options.running
    given = None if settings.plan is None else f"plan {settings.plan.key}"
    loss = None if settings.loss_fn is None else getattr(settings.loss_fn, "__qualname__", type(settings.loss_fn).__qualname__)
    return "\n".join(map(str, (f"loss_fn {loss}", options.precision, options.passing, f"backend {running.backend}", given,
                               settings.key, f"checkpoint {running.checkpoint}", f"check_inputs {running.check_inputs}",
                               f"variants {running.variants}")))


def _digest(values: Any) -> str:
    return hashlib.sha256(repr(values).encode()).hexdigest()[:8]
