"""By which names and keys the functions of a model read: those of its modules' classes, hooks, the loss, and the user's functions that these call."""
from __future__ import annotations

import dis
import inspect
from collections.abc import Iterator, Set
from dataclasses import dataclass, field
from functools import lru_cache, partial
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn

from autoshard.program.tracing.tape import is_user_file
from autoshard.runtime.params.module_shells import PLAIN

DEPTH = 3
"""Objects in objects whose methods are followed."""
LONGEST = 64
"""Items of a list or table that are looked at."""


@dataclass(frozen=True)
class Named:
    """What the code of a function names, that of functions within it too (a lambda, up to Python 3.11 a list that is computed): globals, attributes,
    and texts and whole numbers, which may be keys or, in `getattr`, attributes."""

    globals: frozenset[str]
    attributes: frozenset[str]
    keys: frozenset[Any]


@lru_cache(maxsize=4096)
def named(code: CodeType) -> Named:
    steps = list(dis.get_instructions(code))
    inner = [named(c) for c in code.co_consts if isinstance(c, CodeType)]
    small = [one.argval for one in steps if one.opname == "LOAD_SMALL_INT"]  # no constants from Python 3.14 on
    flat = [k for c in (*code.co_consts, *small) for k in (c if isinstance(c, (tuple, frozenset)) else (c,))]
    keys = {k for k in flat if isinstance(k, (str, int)) and not isinstance(k, bool)}
    attributes = {one.argval for one in steps if "ATTR" in one.opname or "METHOD" in one.opname}
    attributes |= {k for k in keys if isinstance(k, str) and k.isidentifier()}
    return Named(frozenset({one.argval for one in steps if one.opname in ("LOAD_GLOBAL", "LOAD_NAME")}.union(*(i.globals for i in inner))),
                 frozenset(attributes.union(*(i.attributes for i in inner))), frozenset(keys.union(*(i.keys for i in inner))))


@lru_cache(maxsize=4096)
def methods_of(kind: type) -> dict[str, FunctionType]:
    """With what computes its properties; those of torch's classes and of Python's are left out."""
    out: dict[str, FunctionType] = {}
    for base in kind.__mro__:
        for name, value in vars(base).items() if base not in (object, nn.Module, type, ModuleType) else ():
            held = [getattr(value, at, None) for at in ("fget", "func", "__func__")]  # of properties, cached ones, static and class methods
            function = next((f for f in (value, *held) if isinstance(f, FunctionType)), None)
            if function is not None:
                out.setdefault(name, function)
    return out


@dataclass
class Code:
    """`functions` by their id; `owners`: objects whose methods are among them, no modules of the model, each with the attributes that these name.
    What lies around the functions of installed packages is not looked at, but for what modules of the model hold."""

    packages: frozenset[str]
    functions: dict[int, FunctionType] = field(default_factory=dict)
    owners: dict[int, tuple[Any, set[str]]] = field(default_factory=dict)
    names: set[str] = field(default_factory=set)
    keys: set[Any] = field(default_factory=set)

    def globals_and_cells(self) -> Iterator[tuple[Any, str, str]]:
        """Tables, names in them, and these in words."""
        for function in filter(_is_own, self.functions.values()):
            code, around = function.__code__, function.__globals__
            yield from ((around, name, f"{function.__module__}.{name}") for name in sorted(named(code).globals & around.keys()))
            yield from ((Cells(function), name, f"{name} around {function.__qualname__}") for name in code.co_freevars)

    def follow(self, call: Any) -> None:
        """Take in a function, a method or an object that is called, and the user's functions that it calls by name."""
        call = call.func if isinstance(call, partial) else call
        if not isinstance(call, (FunctionType, MethodType)) and isinstance(inspect.getattr_static(type(call), "__call__", None), FunctionType):
            call = MethodType(type(call).__call__, call)
        function, owner = (call.__func__, call.__self__) if isinstance(call, MethodType) else (call, None)
        if not isinstance(function, FunctionType) or id(function) in self.functions or not self._is_followed(function):
            return
        self.functions[id(function)] = function
        here = named(function.__code__)
        self.names |= here.attributes
        self.keys |= here.keys
        if owner is not None and not isinstance(owner, nn.Module) and _is_own(function):
            self.owners.setdefault(id(owner), (owner, set()))[1].update(here.attributes)
        seen: set[int] = set()
        beside = [function.__globals__[name] for name in sorted(here.globals & function.__globals__.keys())]
        for value in (*beside, *map(Cells(function).get, function.__code__.co_freevars), owner):
            self._follow_in(value, here.attributes, DEPTH, seen)

    def _follow_in(self, value: Any, names: Set[str], depth: int, seen: set[int]) -> None:
        """Functions that `value` is, or has by one of `names`: those of a file, the methods of an object, those of what it holds."""
        if isinstance(value, (FunctionType, partial, MethodType)):
            self.follow(value)
        elif not isinstance(value, (torch.Tensor, *PLAIN)) and depth and id(value) not in seen:
            seen.add(id(value))
            for held in _held(value, names):
                self._follow_in(held, names, depth - 1, seen)
            for name in sorted(methods_of(type(value)).keys() & {*names, "__call__"}):
                self.follow(MethodType(methods_of(type(value))[name], value))

    def follow_all(self, modules: list[nn.Module]) -> None:
        """Methods of modules, and of what these hold, may be called by functions that are given the module."""
        before = -1
        while before < len(self.functions):
            before, seen = len(self.functions), set[int]()
            for m in modules:
                self._follow_in(m, self.names, DEPTH, seen)

    def _is_followed(self, function: FunctionType) -> bool:
        """Whether it is the user's, or of a package that modules of the model are of."""
        return is_user_file(function.__code__.co_filename) and (_is_own(function) or (function.__module__ or "").split(".")[0] in self.packages)


def _held(value: Any, names: Set[str]) -> list[Any]:
    """What is in a list or table, what an object has by one of the names; of a file only its functions."""
    if isinstance(value, (list, tuple, dict)):
        return list(value.values() if isinstance(value, dict) else value)[:LONGEST]
    table = getattr(value, "__dict__", {})
    held = [table[name] for name in sorted(names & table.keys())]
    return [h for h in held if isinstance(h, FunctionType)] if isinstance(value, ModuleType) else held


class Cells:
    """The variables around a function, as a table."""

    def __init__(self, function: FunctionType) -> None:
        self.cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))

    def get(self, name: str, default: Any = None) -> Any:
        try:
            return self.cells[name].cell_contents
        except ValueError:  # a variable that is not assigned yet
            return default


def _is_own(function: FunctionType) -> bool:
    return "-packages" not in function.__code__.co_filename


def code_of(model: nn.Module, loss_fn: Any) -> Code:
    """What runs when the model is called."""
    modules = list(model.modules())
    code = Code(frozenset(type(m).__module__.split(".")[0] for m in modules) - {"torch"})
    for m in modules:
        code.follow(m.forward)
        for hook in (*m._forward_hooks.values(), *m._forward_pre_hooks.values()):
            code.follow(hook)
    if loss_fn is not None:
        code.follow(loss_fn.forward if isinstance(loss_fn, nn.Module) else loss_fn)
    code.follow_all(modules)
    return code
