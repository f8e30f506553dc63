"""The copy of a model that is traced: its modules are the user's, its tensors stand-ins; the path of the module that runs is kept."""
from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from autoshard._torch import pytree
from autoshard.errors import TraceError
from autoshard.program.tracing.survey import short


def copy_tree(model: nn.Module, memo: dict[int, Any]) -> nn.Module:
    """Deep copy given what to put for some objects. Attributes that cannot be copied (locks, process groups) are shared."""
    try:
        return copy.deepcopy(model, dict(memo))
    except Exception:
        shared = {id(v): v for m in model.modules() for k, v in vars(m).items()
                  if k not in ("_parameters", "_buffers", "_modules") and not _copies(v, memo)}
    try:
        return copy.deepcopy(model, memo | shared)
    except Exception as e:
        raise TraceError(f"the module tree of {type(model).__name__} cannot be copied ({short(e)}); "
                         "keep objects that cannot be copied out of module attributes") from None


def kept_results(model: nn.Module) -> dict[int, torch.Tensor]:
    """What modules keep of an earlier call, as numbers, by id: there is no way back through that call, and torch copies no such tensor."""
    return {id(t): t.detach() for m in model.modules() for t in pytree.tree_leaves(list(vars(m).values()))
            if isinstance(t, torch.Tensor) and t.grad_fn is not None}


def _copies(value: Any, memo: dict[int, Any]) -> bool:
    try:
        copy.deepcopy(value, dict(memo))
    except Exception:
        return False
    return True


def track(module: nn.Module, name: str, stack: list[str]) -> None:
    """Keep the path of the running module on `stack`."""
    def leave(*_: Any) -> None:
        stack.pop()

    module.register_forward_pre_hook(lambda *_: stack.append(name), prepend=True)
    module.register_forward_hook(leave, always_call=True)
