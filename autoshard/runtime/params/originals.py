"""Parameters of models that were compiled. `compile` copies, so what goes on with the originals reaches no compiled model: an optimizer that was made
before, or a second compiled model that has some of them too."""
from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import cache
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import nn, optim
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.weak import WeakTensorKeyDictionary

from autoshard.errors import UsageError

log = logging.getLogger("autoshard")


class Copied(NamedTuple):
    """What became of an original: its name, its parameter in the compiled model that was made last, and all originals of that model by id."""

    name: str
    parameter: ref[nn.Parameter]
    beside: frozenset[int]


COPIED = WeakTensorKeyDictionary()


def remember(originals: Mapping[str, nn.Parameter], copies: Mapping[int, Any]) -> None:
    """`copies`: of the originals by their id. Warns where another compiled model has copies of some of them, which train apart from these."""
    watch_steps()
    beside = frozenset(map(id, originals.values()))
    shared = [name for name, p in originals.items() if p.requires_grad and p in COPIED and _is_of_others(COPIED[p], beside)]
    if shared:
        log.warning("%s %s also in a model that was compiled before, and each compiled model has a copy of its own: what one of them learns the "
                    "other does not see. To train them as one, compile one module that has both models, and let an argument of its forward say "
                    "which one runs", ", ".join(shared[:3]) + (f" and {len(shared) - 3} more parameters" if shared[3:] else ""),
                    "is" if len(shared) == 1 else "are")
    for name, p in originals.items():
        COPIED[p] = Copied(name, ref(copies[id(p)]), beside)


def _is_of_others(copied: Copied, beside: frozenset[int]) -> bool:
    """Whether it is still there, and of another model: a model may be compiled twice, to compare plans."""
    return copied.parameter() is not None and copied.beside != beside


Then = tuple[tuple[str, ref[torch.Tensor], int], ...]
"""Originals by name, and how often each had been written when it was copied."""


def as_copied(model: nn.Module) -> Then:
    named = (*model.named_parameters(), *model.named_buffers())
    return tuple((name, ref(t), t._version) for name, t in named if not t.is_inference())


def warn_of_changes(then: Then) -> None:
    """At the first call: who loads weights into the original behind `compile` means the compiled model."""
    changed = [name for name, original, version in then if (t := original()) is not None and t._version != version]
    if changed:
        log.warning("%s of the original model changed between autoshard.compile and the first call, and the compiled model, which is a copy, has the "
                    "numbers from before: change the compiled model (its load_state_dict takes whole tensors), or the original before compile",
                    ", ".join(changed[:3]) + (f" and {len(changed) - 3} more" if changed[3:] else ""))


@cache
def watch_steps() -> None:
    """Once per process: an optimizer of originals does not step over gradients that only their copies have."""
    register_optimizer_step_pre_hook(_refuse_originals)


def _refuse_originals(optimizer: optim.Optimizer, args: Any, kwargs: Any) -> None:
    if any(value is not None for value in (*args[1:], *kwargs.values())):  # torch passes the optimizer first; a closure computes gradients
        return
    originals = [p for group in optimizer.param_groups for p in group["params"] if p in COPIED]
    if not originals or any(p.grad is not None for p in originals):
        return
    for copied in (COPIED[p] for p in originals):
        if (p := copied.parameter()) is not None and p.grad is not None:
            raise UsageError(f"this {type(optimizer).__name__} was made of the parameters that the model had before autoshard.compile, which copies "
                             f"them: {copied.name} of the compiled model has a gradient, and its original has none, so the step would update "
                             "nothing. Make the optimizer behind compile, of the parameters of what it returned")
