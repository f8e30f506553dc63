"""By which names and keys the functions of a model read: those of its modules' classes, hooks, the loss, and the user's functions that these call."""
from __future__ import annotations

import dis
import inspect
import sys
from collections.abc import Iterator, Set
from contextlib import suppress
from dataclasses import dataclass, field, fields
from functools import cached_property, lru_cache, partial
from itertools import islice, pairwise
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any
from weakref import ref

import torch
from torch import nn

from autoshard.program.tracing.tape import is_user_file
from autoshard.runtime.params.module_shells import PLAIN

DEPTH = 3
"""Objects in objects whose methods are followed."""
IMPLIED = frozenset({"forward"}).union(f"__{name}__" for name in (
    "call get getattr getattribute getitem iter next len bool contains missing float int index enter exit eq lt le gt ge add radd sub rsub mul "
    "rmul truediv rtruediv pow rpow matmul rmatmul neg").split())
"""Methods that code calls without their name."""
MADE = frozenset({"__new__", "__init__", "__post_init__", "forward", "backward", "setup_context"})
"""Methods that run where an object of a class is made, or a function of autograd is applied."""
LONGEST = 128
"""Items of a list or table that are looked at."""


@dataclass(frozen=True)
class Named:
    """What the code of a function names, that of functions within it too (a lambda, up to Python 3.11 a list that is computed): globals, attributes,
    texts and whole numbers, which may be keys or, in `getattr`, attributes, and files that it imports, each with its number of dots.
    `gone_through`: names of tables of which all items are read."""

    globals: frozenset[str]
    attributes: frozenset[str]
    keys: frozenset[Any]
    imports: frozenset[tuple[int, str]] = frozenset()
    gone_through: frozenset[str] = frozenset()


NOTHING = Named(frozenset(), frozenset(), frozenset())


@lru_cache(maxsize=4096)
def named(code: CodeType) -> Named:
    steps = list(dis.get_instructions(code))
    inner = [named(c) for c in code.co_consts if isinstance(c, CodeType)]
    small = [one.argval for one in steps if one.opname == "LOAD_SMALL_INT"]  # no constants from Python 3.14 on
    flat = [k for c in (*code.co_consts, *small) for k in (c if isinstance(c, (tuple, frozenset)) else (c,))]
    keys = {k for k in flat if isinstance(k, (str, int)) and not isinstance(k, bool)}
    attributes = {one.argval for one in steps if "ATTR" in one.opname or "METHOD" in one.opname or one.opname == "IMPORT_FROM"}
    imports = {(before.argval, one.argval) for before, one in zip(steps, steps[2:], strict=False) if one.opname == "IMPORT_NAME"}
    attributes |= {k for k in keys if isinstance(k, str) and k.isidentifier()}
    through = {one.argval for one, after in pairwise(steps) if one.opname.startswith("LOAD_") and (
        after.argval in ("items", "values", "keys") or after.opname == "GET_ITER")}
    globals_ = {one.argval for one in steps if one.opname in ("LOAD_GLOBAL", "LOAD_NAME")}
    own = Named(*map(frozenset, (globals_, attributes, keys, imports, through)))
    return Named(*(frozenset().union(*(getattr(one, part.name) for one in (own, *inner))) for part in fields(Named)))


@lru_cache(maxsize=4096)
def of_self(code: CodeType) -> frozenset[str] | None:
    """Names that a method reads of its object: `loss.mean()` calls no method `mean` of it. None where its object is also given away."""
    me = code.co_varnames[0] if code.co_argcount else None
    out = set()
    for one, after in pairwise(step for step in dis.get_instructions(code) if step.opname != "COPY"):  # of `self.calls += 1`
        if me == one.argval or isinstance(one.argval, tuple) and me in one.argval:
            if not one.opname.startswith("LOAD_FAST") or me != one.argval or not ("ATTR" in after.opname or "METHOD" in after.opname):
                return None
            out.add(after.argval)
    return None if "super" in code.co_names else frozenset(out)


def imported(function: FunctionType) -> dict[str, ModuleType]:
    """Files that it imports where it runs, those that are there by now."""
    package = function.__globals__.get("__package__") or ""
    names = [".".join((*package.split(".")[:len(package.split(".")) + 1 - dots], name)).rstrip(".") if dots else name
             for dots, name in sorted(named(function.__code__).imports)]
    return {name: sys.modules[name] for name in names if name in sys.modules}


WRAPS = {property: "fget", cached_property: "func", staticmethod: "__func__", classmethod: "__func__"}


@lru_cache(maxsize=4096)
def methods_of(kind: type) -> dict[str, tuple[FunctionType, ...]]:
    """By their name, those that `super()` calls too, with what computes its properties. Those of torch's modules and of Python are left out."""
    out: dict[str, tuple[FunctionType, ...]] = {}
    for base in bases_of(kind):
        for name, value in vars(base).items():
            own = getattr(value, WRAPS[type(value)]) if type(value) in WRAPS else value
            function = own if isinstance(own, FunctionType) else inspect.getattr_static(type(value), "__get__", None)
            if isinstance(function, FunctionType):
                out[name] = (*out.get(name, ()), function)
    return out


def _called_of(kind: type, names: Set[str]) -> Iterator[FunctionType]:
    methods = methods_of(kind)
    return (method for name in sorted(methods.keys() & names) for method in methods[name])


def bases_of(kind: type) -> list[type]:
    """Those that may tell of a model."""
    return [base for base in kind.__mro__ if base not in (object, nn.Module, type, ModuleType)]


def held_by_class(kind: type, names: Set[str]) -> dict[str, Any]:
    """Attributes of a class that are no methods and no properties."""
    found = {name: vars(base)[name] for base in reversed(bases_of(kind)) for name in names & vars(base).keys()}
    return {name: found[name] for name in sorted(found) if isinstance(found[name], PLAIN) or (
        is_own_class(kind) and name not in MADE and not hasattr(type(found[name]), "__get__"))}


@lru_cache(maxsize=4096)
def is_own_class(kind: type) -> bool:
    """Whether it is the user's, of no installed package."""
    return kind.__module__ == "__main__" or is_own_file(sys.modules.get(kind.__module__))


@dataclass
class Code:
    """`functions` by their id; `owners`: objects whose methods are among them, no modules of the model, each with the attributes that these name.
    What lies around the functions of installed packages is not looked at, but for what modules of the model hold."""

    packages: frozenset[str]
    functions: dict[int, FunctionType] = field(default_factory=dict)
    owners: dict[int, tuple[Any, set[str]]] = field(default_factory=dict)
    passed: dict[int, FunctionType] = field(default_factory=dict)
    names: set[str] = field(default_factory=set)
    keys: set[Any] = field(default_factory=set)
    gone_through: set[str] = field(default_factory=set)

    def around(self) -> Iterator[tuple[Any, Any, str]]:
        """What lies around the functions: tables, names in them, and these in words."""
        for function in filter(_is_own, self.functions.values()):
            code, around, own = function.__code__, function.__globals__, defaults_of(function)
            yield from ((sys.modules, name, name) for name in imported(function))
            yield from ((own, name, f"{name} of {function.__qualname__}") for name in own)
            yield from ((vars(function), name, f"{function.__qualname__}.{name}") for name in sorted(vars(function).keys() & named(code).attributes))
            yield from ((around, name, f"{function.__module__}.{name}") for name in sorted(named(code).globals & around.keys()))
            yield from ((Cells(function), name, f"{name} around {function.__qualname__}") for name in Cells(function).names)

    def follow(self, call: Any) -> None:
        """Take in a function, a method or an object that is called, and the user's functions that it calls by name."""
        if is_a(call, partial):
            return self._follow_in(call, self.names, DEPTH, set())
        if not is_a(call, (FunctionType, MethodType)) and is_a(inspect.getattr_static(type(call), "__call__", None), FunctionType):
            call = MethodType(type(call).__call__, call)
        function, owner = (call.__func__, call.__self__) if is_a(call, MethodType) else (call, None)
        if not is_a(function, FunctionType) or id(function) in self.functions or id(function) in self.passed:
            return
        is_followed = self._is_followed(function)
        here = named(function.__code__) if is_followed else NOTHING
        if is_followed:
            self.functions[id(function)] = function
            self.names |= here.attributes
            self.keys |= here.keys
            self.gone_through |= here.gone_through
        else:  # a decorator's: what it calls is around it
            self.passed[id(function)] = function
        if is_followed and owner is not None and not is_a(owner, nn.Module) and _is_own(function):
            self.owners.setdefault(id(owner), (owner, set()))[1].update(here.attributes)
        seen = {id(child) for child in owner._modules.values()} if is_a(owner, nn.Module) else set[int]()  # these come by themselves
        beside = [function.__globals__[name] for name in sorted(here.globals & function.__globals__.keys())]
        beside += imported(function).values() if is_followed else ()
        cells = Cells(function)
        for value in (*beside, *map(cells.get, cells.names), *defaults_of(function).values()):
            self._follow_in(value, here.attributes, DEPTH, seen)
        self._follow_in(owner, here.attributes, DEPTH, seen, of_self(function.__code__))

    def _follow_in(self, value: Any, names: Set[str], depth: int, seen: set[int], called: Set[str] | None = None) -> None:
        """Functions that `value` is, or has by one of `names`: those of a file, the methods of an object or a class, those of what it holds.
        `called`: names of its methods, where they are known."""
        kind = type(value)
        if kind in (FunctionType, MethodType):
            self.follow(value)
        elif kind is str:  # it may be the name of an attribute, or a key
            if value.isidentifier():
                self.names.add(value)
                self.keys.add(value)
        elif not issubclass(kind, (torch.Tensor, *PLAIN)) and depth and id(value) not in seen:
            seen.add(id(value))
            for child in value._modules.values() if is_a(value, nn.Module) else ():
                self._follow_in(child, names, depth, seen)
            all_held: list[Any] = []
            with suppress(Exception):  # of code of its own
                all_held = _held(value, names)
            for held in all_held:
                self._follow_in(held, names, depth - 1, seen)
            called = {*(names if called is None else called), *(MADE if is_a(value, type) and is_own_class(value) else ()), *IMPLIED}
            for method in _called_of(kind, called):  # of a class those of its metaclass
                self.follow(MethodType(method, value))
            for method in _called_of(value, called) if is_a(value, type) else ():
                self.follow(method)

    def follow_all(self, modules: list[nn.Module]) -> None:
        """Methods of modules, and of what these hold, may be called by functions that are given the module."""
        before = (-1, -1)
        while before != (before := (len(self.functions), len(self.names))):
            seen = set[int]()
            for m in modules:
                self._follow_in(m, self.names, DEPTH, seen)

    def _is_followed(self, function: FunctionType) -> bool:
        """Whether it is the user's, or of a package that modules of the model are of."""
        return is_user_file(function.__code__.co_filename) and (_is_own(function) or (function.__module__ or "").split(".")[0] in self.packages)


def _held(value: Any, names: Set[str]) -> list[Any]:
    """What is in a list or table, what an object or a class has by one of the names; of a file only its functions and classes."""
    if is_a(value, partial):
        return [value.func, *value.args, *value.keywords.values()]
    if is_a(value, ref):
        return [value()]
    if is_a(value, (list, tuple, dict)):
        return list(islice(value.values() if is_a(value, dict) else value, LONGEST))
    table = table_of(value)
    held = [*map(table.get, sorted(names & table.keys())), inspect.getattr_static(value, "__wrapped__", None)]
    if is_a(value, ModuleType):
        return [h for h in held if is_a(h, (FunctionType, type)) or is_a(h, ModuleType) and is_own_file(h)]
    return [*held, *held_by_class(value if is_a(value, type) else type(value), names).values()]


def is_a(value: Any, kinds: type | tuple[type, ...]) -> bool:
    """`isinstance`, but for what only says that it is one: proxies and mocks."""
    return issubclass(type(value), kinds)


def table_of(value: Any) -> dict[str, Any]:
    """Attributes of an object."""
    try:
        table = value.__dict__
    except Exception:  # code of its own
        return {}
    return table if type(table) is dict else {}


def defaults_of(function: FunctionType) -> dict[str, Any]:
    """Objects that arguments have where none is given."""
    code, values = function.__code__, function.__defaults__ or ()
    named_values = {**dict(zip(code.co_varnames[code.co_argcount - len(values):], values, strict=False)), **(function.__kwdefaults__ or {})}
    return {name: value for name, value in named_values.items() if not isinstance(value, PLAIN)}


class Cells:
    """The variables around a function, as a table."""

    def __init__(self, function: FunctionType) -> None:
        self.cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
        self.names = [name for name in self.cells if name != "__class__"]  # that of `super()`

    def get(self, name: str, default: Any = None) -> Any:
        try:
            return self.cells[name].cell_contents
        except ValueError:  # a variable that is not assigned yet
            return default


def _is_own(function: FunctionType) -> bool:
    return "-packages" not in function.__code__.co_filename


def is_own_file(module: ModuleType | None) -> bool:
    file = getattr(module, "__file__", None) or "<"
    return is_user_file(file) and "-packages" not in file


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
    code.follow_all([*modules, *(loss_fn.modules() if isinstance(loss_fn, nn.Module) else ())])
    return code
