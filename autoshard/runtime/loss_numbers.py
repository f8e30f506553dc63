"""Numbers that a loss function reads from outside of its arguments: a trace has them as they were, so other ones are another variant.

What counts is what the code of the function, and of functions beside it that it calls, names: globals and variables around it, attributes and
keys of objects there, and all plain attributes of loss modules. A counter that lies beside them, as in a trainer's `self`, is none of these."""
from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

from torch import nn

from autoshard.program.binding import leaf_key
from autoshard.runtime.params.module_shells import PLAIN, plain_of


def numbers_read(loss_fn: Callable[..., Any] | None) -> tuple[Any, ...]:
    """Their values by now, in an order that is the same in every call."""
    return () if loss_fn is None else tuple(_of_call(loss_fn, set()))


def _of_call(call: Any, seen: set[int]) -> Iterator[Any]:
    if isinstance(call, partial):
        call = call.func
    if isinstance(call, nn.Module):
        call = call.forward
    function = call.__func__ if isinstance(call, MethodType) else call
    if not isinstance(function, FunctionType) or id(function) in seen:
        return
    seen.add(id(function))
    code, around = function.__code__, function.__globals__
    if isinstance(call, MethodType):
        yield from _of_value(call.__self__, code, seen)
    if function.__module__.split(".")[0] == "torch":
        return
    there = [around[name] for name in code.co_names if name in around]
    for value in (*there, *(cell.cell_contents for cell in function.__closure__ or () if _is_filled(cell))):
        if isinstance(value, FunctionType):
            if value.__globals__ is around:
                yield from _of_call(value, seen)
        else:
            yield from _of_value(value, code, seen)


def _of_value(value: Any, code: CodeType, seen: set[int]) -> Iterator[Any]:
    """`code`: what reads it; a loss module is taken as a whole."""
    if isinstance(value, PLAIN):
        yield leaf_key(value)
    elif id(value) in seen or isinstance(value, (type, FunctionType)):
        return
    elif isinstance(value, nn.Module) and next(value.parameters(), None) is None:
        seen.add(id(value))
        for module in value.modules():
            yield from (leaf_key(v) for _, v in plain_of(module))
    elif isinstance(value, ModuleType):
        yield from (leaf_key(v) for name in code.co_names if isinstance(v := vars(value).get(name, value), PLAIN))
    else:
        seen.add(id(value))
        keys = code.co_consts if isinstance(value, Mapping) else code.co_names
        table = value if isinstance(value, Mapping) else getattr(value, "__dict__", {})
        for key in keys:
            if isinstance(key, (str, int)) and key in table:
                yield from _of_value(table[key], code, seen)


def _is_filled(cell: Any) -> bool:
    try:
        return cell.cell_contents is not cell
    except ValueError:  # a variable that is not assigned yet
        return False
