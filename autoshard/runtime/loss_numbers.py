"""Numbers that a loss function reads from outside of its arguments: a trace has them as they were, so other ones are another variant.

What counts is what the code of the function, and of functions beside it that it calls, names: globals and variables around it, attributes and
keys of objects there, and all plain attributes of loss modules. A counter that lies beside them, as in a trainer's `self`, is none of these."""
from __future__ import annotations

import dis
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

from torch import nn

from autoshard.program.binding import leaf_key
from autoshard.runtime.params.module_shells import PLAIN, plain_of


@dataclass(frozen=True)
class Named:
    """What the code of a function names, that of functions within it too (a lambda, up to Python 3.11 a list that is computed)."""

    names: tuple[str, ...]
    keys: tuple[Any, ...]


@lru_cache(maxsize=64)
def _named(code: CodeType) -> Named:
    inner = [_named(c) for c in code.co_consts if isinstance(c, CodeType)]
    small = [one.argval for one in dis.get_instructions(code) if one.opname == "LOAD_SMALL_INT"]  # no constants from Python 3.14 on
    return Named(tuple(dict.fromkeys([*code.co_names, *(n for i in inner for n in i.names)])),
                 (*code.co_consts, *small, *(k for i in inner for k in i.keys)))


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
    named, around = _named(function.__code__), function.__globals__
    if isinstance(call, MethodType):
        yield from _of_value(call.__self__, named, seen)
    if function.__module__.split(".")[0] == "torch":
        return
    there = [around[name] for name in named.names if name in around]
    for value in (*there, *(cell.cell_contents for cell in function.__closure__ or () if _is_filled(cell))):
        if isinstance(value, FunctionType):
            if value.__globals__ is around:
                yield from _of_call(value, seen)
        else:
            yield from _of_value(value, named, seen)


def _of_value(value: Any, named: Named, seen: set[int]) -> Iterator[Any]:
    """`named`: by what reads it; a loss module is taken as a whole."""
    if isinstance(value, PLAIN):
        yield leaf_key(value)
    elif id(value) in seen or isinstance(value, (type, FunctionType)):
        return
    elif isinstance(value, nn.Module) and next(value.parameters(), None) is None:
        seen.add(id(value))
        for module in value.modules():
            yield from (leaf_key(v) for _, v in plain_of(module))
    elif isinstance(value, ModuleType):
        yield from (leaf_key(v) for name in named.names if isinstance(v := vars(value).get(name, value), PLAIN))
    else:
        seen.add(id(value))
        keys = named.keys if isinstance(value, Mapping) else named.names
        table = value if isinstance(value, Mapping) else getattr(value, "__dict__", {})
        for key in keys:
            if isinstance(key, (str, int)) and key in table:
                yield from _of_value(table[key], named, seen)


def _is_filled(cell: Any) -> bool:
    try:
        return cell.cell_contents is not cell
    except ValueError:  # a variable that is not assigned yet
        return False
