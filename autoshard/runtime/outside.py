"""What the code of a model and of its loss reads from outside of its arguments, besides the modules' own attributes (`module_shells.py`): globals,
variables around a function, attributes of classes and of objects that modules hold (a config), keys of tables, items of lists. A trace has them as
they were, so another value is another variant.

Functions say by which names and keys they read (`code_names.py`). A place is a table and one of these names, where there is a number, a text, a flag
or None. What no code names does not count, as a counter that lies beside it in a trainer."""
from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from operator import is_
from typing import Any

import torch
from torch import nn

from autoshard.program.binding import leaf_key
from autoshard.runtime.code_names import LONGEST, Code, code_of
from autoshard.runtime.params.module_shells import ABSENT, INTERNAL, PLAIN, defaults_of, plain_of

log = logging.getLogger("autoshard")
Get = Callable[[Any, Any], Any]
MANY = 8
"""Values of one place after which a warning says what that costs."""
DEPTH = 4
"""Objects in objects."""


class Outside:
    """The places of a model and of its loss. A value counts as which of those that its place has had so far. `root` is what the user sees of the
    model, which `program` runs."""

    def __init__(self, root: nn.Module, program: nn.Module, loss_fn: Any) -> None:
        self._root, self._program, self._loss_fn = root, program, loss_fn
        self._places: dict[str, tuple[Get, Any]] = {}
        self._known: dict[str, list[Any]] = {}
        self._written: set[str] = set()
        self._values: list[Any] = []
        self._state: tuple[tuple[str, int], ...] = ()
        self._attributes: Any = None
        self._find()

    def traced(self) -> None:
        """What has changed since `state()` was asked the trace has written itself: no place any more."""
        self._written |= {path for path, old, new in zip(self._places, self._values, self._now(), strict=True) if old is not new}
        self._find()

    def _find(self) -> None:
        found = _Places(code_of(self._program, self._loss_fn)).of(self._root, self._loss_fn)
        self._places = {path: place for path, place in found.items() if path not in self._written}
        self._values = self._now()
        for path, value in zip(self._places, self._values, strict=True):
            self._known.setdefault(path, [_told(value)])
        self._state = self._changed()

    def follow(self, other: Outside) -> None:
        """Number values as `other` does, of whose model this one's is a copy."""
        self._known = {path: list(known) for path, known in other._known.items()} | {p: k for p, k in self._known.items() if p not in other._known}
        self._written |= other._written
        self._state = self._changed()

    def state(self, attributes: Any) -> tuple[tuple[str, int], ...]:
        """Places that have not the value that they had first, each with which one it has. Looked at in every call. `attributes`: the state of those
        of the modules; where others are assigned, the places lie in other objects."""
        if attributes is not self._attributes:
            self._attributes = attributes
            self._find()
        now = self._now()
        if not all(map(is_, now, self._values)):
            self._values = now
            self._state = self._changed()
        return self._state

    def _now(self) -> list[Any]:
        return [get(key, ABSENT) for get, key in self._places.values()]

    def _changed(self) -> tuple[tuple[str, int], ...]:
        numbers = ((path, self._number(path, _told(value))) for path, value in zip(self._places, self._values, strict=True))
        return tuple((path, n) for path, n in numbers if n)

    def _number(self, path: str, told: Any) -> int:
        known = self._known[path]
        if told not in known:
            known.append(told)
            if len(known) == MANY:
                log.warning("%s has had %d values in calls of the compiled model, and each is a program of its own, traced and planned anew: pass a "
                            "number that changes in every step to the model, as a tensor", path, MANY)
        return known.index(told)


def _told(value: Any) -> Any:
    return leaf_key(value) if isinstance(value, PLAIN) else type(value).__qualname__


class _Places:
    """Collects the places that `code` names, by a path in words."""

    def __init__(self, code: Code) -> None:
        self.code = code
        self.found: dict[str, tuple[Get, Any]] = {}
        self.seen: set[int] = set()

    def of(self, root: nn.Module, loss_fn: Any) -> dict[str, tuple[Get, Any]]:
        modules = list(root.named_modules())
        self.seen |= {id(m) for _, m in modules}
        for path, module in modules:
            self._attributes(module, path or type(module).__name__)
        if isinstance(loss_fn, nn.Module):
            self._value(loss_fn, "loss_fn", DEPTH)
        for owner in self.code.owners:
            self._value(owner, f"an object of {type(owner).__qualname__}", DEPTH)
        for table, name, path in self.code.globals_and_cells():
            self._at(table.get, name, path, DEPTH)
        return self.found

    def _at(self, get: Get, key: Any, path: str, depth: int) -> None:
        value = get(key, ABSENT)
        if isinstance(value, PLAIN):
            while self.found.setdefault(path, (get, key)) != (get, key):  # two functions that one function makes
                path += "'"
        elif depth:
            self._value(value, path, depth - 1)

    def _attributes(self, module: nn.Module, path: str) -> None:
        """Objects that a module of the model has, and what its class has: its own numbers count whether code names them or not."""
        table = vars(module)
        for name in sorted(self.code.names & table.keys() - INTERNAL):
            if not isinstance(table[name], PLAIN):
                self._at(table.get, name, f"{path}.{name}", DEPTH)
        self._of_class(type(module))

    def _of_class(self, kind: type) -> None:
        if id(kind) not in self.seen:
            self.seen.add(id(kind))
            for name in sorted(self.code.names & defaults_of(kind)):
                self._at(partial(getattr, kind), name, f"{kind.__module__}.{kind.__qualname__}.{name}", 0)

    def _value(self, value: Any, path: str, depth: int) -> None:
        if id(value) in self.seen or isinstance(value, torch.Tensor):
            return
        if isinstance(value, type):
            return self._of_class(value)
        self.seen.add(id(value))
        for get, key, name in self._inside(value):
            self._at(get, key, f"{path}{name}", depth)
        if not isinstance(value, (list, tuple, Mapping, nn.Module)):
            self._of_class(type(value))

    def _inside(self, value: Any) -> Iterator[tuple[Get, Any, str]]:
        """What a value holds that the code names: how it is got, by which key, and how that is written."""
        if isinstance(value, tuple):  # it may hold what changes
            yield from ((partial(_item, value), i, f"[{i}]") for i, item in enumerate(value[:LONGEST]) if not isinstance(item, PLAIN))
        elif isinstance(value, list):
            yield partial(_length, value), None, " (its length)"
            yield from ((partial(_item, value), i, f"[{i}]") for i in range(min(len(value), LONGEST)))
        elif isinstance(value, Mapping):
            named = [key for key in dict.fromkeys([*self.code.keys, *sorted(self.code.names)]) if key in value]
            if not named:
                yield partial(_length, value), None, " (its length)"
            yield from ((partial(_of_key, value), key, f"[{key!r}]") for key in named or list(value)[:LONGEST])
        elif isinstance(value, nn.Module):
            yield from ((vars(m).get, name, f".{path}.{name}".replace("..", ".")) for path, m in value.named_modules() for name, _ in plain_of(m))
        else:
            table = getattr(value, "__dict__", {})
            yield from ((table.get, name, f".{name}") for name in sorted(self.code.names & table.keys()))
            slots = {name for base in type(value).__mro__ for name in getattr(base, "__slots__", ())}
            yield from ((partial(getattr, value), name, f".{name}") for name in sorted(self.code.names & slots))


def _length(value: Any, _: None, default: Any) -> int:
    return len(value)


def _of_key(table: Mapping[Any, Any], key: Any, default: Any) -> Any:
    return table[key] if key in table else default


def _item(items: Sequence[Any], at: int, default: Any) -> Any:
    return items[at] if at < len(items) else default
