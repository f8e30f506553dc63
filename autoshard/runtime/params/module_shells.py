"""The module tree a user sees: same names, same tensors, but only the root can be called."""
from __future__ import annotations

import inspect
from itertools import chain, repeat
from operator import is_
from typing import Any, NoReturn

from torch import nn

from autoshard._torch import COMPOSABLE_STATE
from autoshard.errors import UsageError

HOOKS = ("register_forward_hook", "register_forward_pre_hook", "register_full_backward_hook",
         "register_full_backward_pre_hook")


class Refusal:
    """Stands for something that a part of a compiled model does not do."""

    def __init__(self, message: str) -> None:
        self.message = message

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise UsageError(self.message)


def shell(module: nn.Module, path: str = "", seen: dict[int, nn.Module] | None = None) -> nn.Module:
    """A twin of `module` that shares its parameter and buffer tables and refuses to run. Modules that occur
    twice have one twin."""
    seen = {} if seen is None else seen
    if id(module) in seen:
        return seen[id(module)]
    twin = object.__new__(type(module))
    seen[id(module)] = twin
    twin.__dict__.update(module.__dict__)
    twin.__dict__["_modules"] = {name: None if child is None else shell(child, f"{path}.{name}".lstrip("."), seen)
                                 for name, child in module._modules.items()}
    twin.__dict__["forward"] = Refusal(
        f"submodule {path!r} of a compiled model cannot be called: its ops are part of one graph. Call the whole model, or "
        "keep the original model for that")
    for hook in HOOKS:
        twin.__dict__[hook] = Refusal(f"{hook} on {path!r}: submodules of a compiled model are never called, so the hook would "
                                      "never run. Register it on the compiled model or before compile()")
    return twin


PLAIN = (bool, int, float, str, type(None))
OWN = frozenset({*vars(nn.Module()), "forward", *HOOKS, COMPOSABLE_STATE})
"""Names that the table of every module has, or gets here."""
INTERNAL = OWN | vars(nn.Module).keys()
"""Names that every module has. A model may use those of methods for attributes (`self.type = "relu"`)."""
ABSENT = inspect.Parameter.empty


def plain_of(module: nn.Module) -> list[tuple[str, Any]]:
    """Names and values of its attributes that are numbers, texts or None."""
    return [(name, value) for name, value in vars(module).items() if isinstance(value, PLAIN) and not name.startswith("_")]


def has_attribute(module: nn.Module, name: str) -> bool:
    """Whether the module, or its class, has an attribute of this name, be it a property; no tensors and no modules."""
    return name not in INTERNAL and (name in vars(module) or inspect.getattr_static(type(module), name, ABSENT) is not ABSENT)


def has_own(module: nn.Module, name: str) -> bool:
    """Whether a model has given itself an attribute of this public name, be it that of a method (`self.type = "relu"`)."""
    return not name.startswith("_") and name not in OWN and (name in vars(module) or name in _defaults(type(module)))


def _defaults(kind: type) -> set[str]:
    """Attributes of the class that are numbers, texts or None: `module.scale = 2.0` gives one module another."""
    return {name for base in kind.__mro__ if base is not nn.Module for name, value in vars(base).items()
            if isinstance(value, PLAIN) and name not in OWN and not name.startswith("__")}


class Seen:
    """What a user may change of the modules that they see, `root` and those in it. Attributes, which a trace may depend on: those that a module has
    from the start, and defaults of its class; objects count as another value where another one is assigned. The modules themselves must stay."""

    def __init__(self, root: nn.Module) -> None:
        modules = tuple(root.modules())
        found = [(vars(m), name, i) for i, m in enumerate(modules) for name in sorted({*vars(m), *_defaults(type(m))} - OWN)]
        self._tables, self._names, self._places = zip(*found, strict=True) if found else ((), (), ())
        self._values = self._now()
        self._objects: list[list[Any]] = [[v] for v in self._values]
        self._state = self._all_told()
        self._before: dict[int, Any] = {}
        self._trees = tuple(m._modules for m in modules)
        held = [(m._modules, name, child) for m in modules for name, child in m._modules.items()]
        self._count = len(held)
        held += [(vars(m), "forward", vars(m)["forward"]) for m in modules]
        self._holders, self._keys, self._held = zip(*held, strict=True)
        self._paths = {id(table): path for path, m in root.named_modules() for table in (m._modules, vars(m))}

    def follow(self, other: Seen) -> None:
        """Tell objects apart as `other` does, of whose modules these are copies: variants of both go by the same numbers."""
        self._objects = [[mine if known is theirs else known for known in objects]
                         for objects, mine, theirs in zip(other._objects, self._values, other._now(), strict=True)]
        self._state, self._before = self._all_told(), dict(other._before)

    def state(self) -> tuple[Any, ...]:
        """What a trace depends on, equal on ranks that assigned alike. Looked at in every call, so without a loop where nothing changed."""
        if not all(map(is_, self._now(), self._values)) or not self._lists_stay():
            self._values = self._now()
            self._state = self._all_told()
        return self._state

    def _lists_stay(self) -> bool:
        return self._lengths == list(map(len, self._lists)) and all(map(is_, self._items, chain.from_iterable(self._lists)))

    def _now(self) -> list[Any]:
        return list(map(dict.get, self._tables, self._names, repeat(ABSENT)))

    def _all_told(self) -> tuple[Any, ...]:
        self._lists = [value for value in self._values if type(value) is list]
        self._lengths, self._items = list(map(len, self._lists)), list(chain.from_iterable(self._lists))
        return tuple(map(self._told, range(len(self._values)), self._values))

    def _told(self, slot: int, value: Any) -> Any:
        """A value as it is, names in a list too (adapters that are merged), an object as which of those that were there so far. Lists of other
        things do not count: a program would be traced for every loss that a loop appends."""
        if isinstance(value, PLAIN) or isinstance(value, tuple) and all(isinstance(item, PLAIN) for item in value):
            return value
        if type(value) is list and value and all(isinstance(item, str) for item in value):
            return "names", *value
        known = self._objects[slot]
        at = next((n for n, other in enumerate(known) if other is value), len(known))
        self._objects[slot] = known if at < len(known) else [*known, value]
        return "object", at

    def hand_on(self, program: nn.Module) -> None:
        """Give the modules of `program`, which is traced, the attributes that the user's have by now. Those that are the first objects of their name
        are the program's own ones: what they refer to is in the program."""
        modules = list(program.modules())
        for slot, (value, name, place) in enumerate(zip(self._now(), self._names, self._places, strict=True)):
            table = modules[place].__dict__
            own = not isinstance(value, PLAIN) and value is self._objects[slot][0]
            if not own:
                self._before.setdefault(slot, table.get(name, ABSENT))
            new = self._before.get(slot, table.get(name, ABSENT)) if own else value
            if new is ABSENT:
                table.pop(name, None)
            else:
                table[name] = new

    def check_modules(self) -> None:
        """Raises UsageError where a module was replaced, added or taken out, or has another `forward`: programs run those that were there."""
        stays = list(map(is_, map(dict.get, self._holders, self._keys), self._held))
        if all(stays) and self._count == sum(map(len, self._trees)):
            return
        if not all(stays):
            at = stays.index(False)
            name, what = f"{self._paths[id(self._holders[at])]}.{self._keys[at]}".lstrip("."), "was replaced or taken out"
        else:
            there = {(id(table), key) for table, key in zip(self._holders, self._keys, strict=True)}
            table, key = next((t, key) for t in self._trees for key in t if (id(t), key) not in there)
            name, what = f"{self._paths[id(table)]}.{key}".lstrip("."), "was added"
        raise UsageError(f"{name} of the compiled model {what}, and its programs run the modules that were there when it was compiled: change the "
                         "model before compile(), or compile the changed model")
