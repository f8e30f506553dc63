"""The copy of a model that is traced: its modules are the user's, its tensors stand-ins; the path of the module that runs is kept."""
from __future__ import annotations

import copy
import functools
import types
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from autoshard._torch import pytree
from autoshard.errors import TraceError
from autoshard.program.tracing.survey import short


def copy_tree(model: nn.Module, memo: dict[int, Any]) -> nn.Module:
    """Deep copy given what to put for some objects. Attributes that cannot be copied (locks, process groups) are shared."""
    try:
        return own_functions(copy.deepcopy(model, known := dict(memo)), known)
    except Exception:
        shared = {id(v): v for m in model.modules() for k, v in vars(m).items()
                  if k not in ("_parameters", "_buffers", "_modules") and not _copies(v, memo)}
    try:
        return own_functions(copy.deepcopy(model, known := memo | shared), known)
    except Exception as e:
        raise TraceError(f"the module tree of {type(model).__name__} cannot be copied ({short(e)}); "
                         "keep objects that cannot be copied out of module attributes") from None


def own_functions(twin: nn.Module, memo: dict[int, Any]) -> nn.Module:
    """`copy.deepcopy` keeps functions as they are. Those in attributes and hooks of the copy `twin` (`self.f = lambda x: m.up(x)`) are made to
    hold the copies of the modules and tensors that they held: `memo` is that of the copying."""
    done: dict[int, Any] = {}
    for module in twin.modules():
        for name, value in list(vars(module).items()):
            if name not in ("_parameters", "_buffers", "_modules") and (own := _own(value, memo, done)) is not value:
                vars(module)[name] = own
    return twin


def _own(value: Any, memo: dict[int, Any], done: dict[int, Any]) -> Any:
    """`value` about the copies, or itself where it holds none of what was copied. `done`: functions by id, those that are being made too."""
    def all_of(values: Any) -> list[Any]:
        return [_own(v, memo, done) for v in values]

    def changed(new: Any, old: Any) -> bool:
        return any(a is not b for a, b in zip(new, old, strict=True))

    if isinstance(value, (nn.Module, torch.Tensor)):
        return memo.get(id(value), value)
    if isinstance(value, types.FunctionType):
        if id(value) not in done:
            done[id(value)] = value
            done[id(value)] = _own_function(value, all_of)
        return done[id(value)]
    if isinstance(value, types.MethodType):
        new = all_of((value.__func__, value.__self__))
        return types.MethodType(*new) if changed(new, (value.__func__, value.__self__)) else value
    if type(value) is functools.partial:
        new, keywords = all_of((value.func, *value.args)), all_of(value.keywords.values())
        same = not changed(new, (value.func, *value.args)) and not changed(keywords, value.keywords.values())
        return value if same else functools.partial(*new, **dict(zip(value.keywords, keywords, strict=True)))
    if isinstance(value, dict) and type(value) in (dict, OrderedDict):
        new = all_of(value.values())
        return type(value)(zip(value, new, strict=True)) if changed(new, value.values()) else value
    if type(value) in (list, tuple):
        new = all_of(value)
        return type(value)(new) if changed(new, value) else value
    return value


def _own_function(function: types.FunctionType, all_of: Callable[[Any], list[Any]]) -> types.FunctionType:
    """The function with other cells and defaults; cells of what was not copied stay shared with the functions that write them."""
    filled = [cell for cell in function.__closure__ or () if cell != types.CellType()]  # an empty cell has no contents to ask for
    held = [cell.cell_contents for cell in filled]
    cells = {id(cell): types.CellType(new) for cell, old, new in zip(filled, held, all_of(held), strict=True) if new is not old}
    defaults, keywords = tuple(function.__defaults__ or ()), dict(function.__kwdefaults__ or {})
    new_defaults, new_keywords = tuple(all_of(defaults)), dict(zip(keywords, all_of(keywords.values()), strict=True))
    if not cells and all(a is b for a, b in zip((*new_defaults, *new_keywords.values()), (*defaults, *keywords.values()), strict=True)):
        return function
    closure = tuple(cells.get(id(cell), cell) for cell in function.__closure__ or ()) or None
    own = types.FunctionType(function.__code__, function.__globals__, function.__name__, new_defaults or None, closure)
    own.__kwdefaults__, own.__qualname__ = new_keywords or None, function.__qualname__
    own.__dict__.update(function.__dict__)
    return own


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
