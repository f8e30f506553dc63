"""What the code of a model and of its loss reads from outside of its arguments, besides the modules' own attributes (`module_shells.py`): globals,
variables around a function, attributes of classes and of objects that modules hold (a config), keys of tables, items of lists. A trace has them as
they were, so another value is another variant.

Functions say by which names and keys they read (`code_names.py`). A place is a table and one of these names. Numbers, texts and flags there are told
by their value, objects by which one it is. What no code names does not count, as a counter that lies beside it in a trainer."""
from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import suppress
from enum import Enum
from functools import partial
from itertools import islice
from operator import is_
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any
from weakref import ref

import numpy as np
import torch
from torch import nn

from autoshard.program.binding import leaf_key
from autoshard.runtime.code_names import LONGEST, Code, code_of, held_by_class, is_a, is_own_class, is_own_file, table_of
from autoshard.runtime.params.module_shells import ABSENT, OWN, PLAIN, plain_of

log = logging.getLogger("autoshard")
Get = Callable[[Any, Any], Any]
Place = tuple[Get, Any]
VALUES = (complex, bytes, range, frozenset, Enum, np.generic, torch.dtype, torch.device)
"""Told by what they say."""
FUNCTIONS = (FunctionType, BuiltinFunctionType, MethodType)
WITHIN = OWN - {"training"}
"""No attributes that a loss module reads."""
MANY = 8
"""Values of one place after which a warning says what that costs."""
DEPTH = 6
"""Objects in objects."""
MOST = 2048
"""Places: looking at so many takes 0.1 ms in every call."""
MANY_KEYS = 4096
"""Keys of a table that are looked for."""
MOST_TOLD = 3
"""Places that a message names."""


class Outside:
    """The places of a model and of its loss. A value counts as which of those that its place has had so far. `root` is what the user sees of the
    model, which `program` runs."""

    def __init__(self, root: nn.Module, program: nn.Module, loss_fn: Any) -> None:
        self._root, self._program, self._loss_fn = root, program, loss_fn
        self._places: dict[str, Place] = {}
        self._known: dict[str, list[Any]] = {}
        self._written: set[str] = set()
        self._values: list[Any] = []
        self._state: tuple[tuple[str, int], ...] = ()
        self._attributes: Any = None
        self._told_of_many = False  # places are looked for when `state` is asked first

    def traced(self) -> None:
        """What has changed since `state()` was asked the trace has written itself: no place any more."""
        self._written |= {path for path, old, new in zip(self._places, self._values, self._now(), strict=True) if old is not new}
        self._find()

    def _find(self) -> None:
        found = _Places(code_of(self._program, self._loss_fn)).of(self._root, self._loss_fn)
        self._places = {path: place for path, place in found.items() if path not in self._written}
        if len(found) >= MOST and not self._told_of_many:
            self._told_of_many = True
            log.warning("the code of the model may read from more than %d places outside of it, as %s, and changes are looked for in so many alone: "
                        "keep tables of data out of objects that the model holds", MOST, next(reversed(found)))
        self._values = self._now()
        for path, value in zip(self._places, self._values, strict=True):
            self._known.setdefault(path, [_told(value)])
        self._state = self._changed()

    def follow(self, other: Outside) -> None:
        """Number values as `other` does, of whose model this one's is a copy."""
        self._find()
        theirs = dict(zip(other._places, map(_told, other._now()), strict=True))
        mine = dict(zip(self._places, map(_told, self._values), strict=True))
        self._known |= {path: [mine[path] if path in mine and told == theirs.get(path) else told for told in known]
                        for path, known in other._known.items()}  # objects are copies
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
            if any(a is not b and not is_a(a, (*PLAIN, *VALUES)) for a, b in zip(now, self._values, strict=True)):
                self._find()  # places lie in the new object
            else:
                self._values = now
                self._state = self._changed()
        return self._state

    def in_words(self) -> str:
        """The changed places of the last `state`, with what is there."""
        now = dict(zip(self._places, self._values, strict=True))
        return ", ".join(f"{path} = {now[path]!r:.40}" if is_a(now[path], (*PLAIN, *VALUES)) else f"{path} (of {type(now[path]).__name__})"
                         for path, _ in self._state[:MOST_TOLD]) + (f" and {len(self._state) - MOST_TOLD} more" if self._state[MOST_TOLD:] else "")

    def _now(self) -> list[Any]:
        try:
            return [get(key, ABSENT) for get, key in self._places.values()]
        except Exception:  # of code of an object's own: a file that is closed
            return [_got(get, key) for get, key in self._places.values()]

    def _changed(self) -> tuple[tuple[str, int], ...]:
        numbers = ((path, self._number(path, _told(value))) for path, value in zip(self._places, self._values, strict=True))
        return tuple(sorted((path, n) for path, n in numbers if n))

    def _number(self, path: str, told: Any) -> int:
        known = self._known[path]
        if told not in known:
            known.append(told)
            if len(known) == MANY:
                log.warning("%s has had %d values in calls of the compiled model, and each is a program of its own, traced and planned anew: pass a "
                            "number that changes in every step to the model, as a tensor", path, MANY)
        return known.index(told)


def _got(get: Get, key: Any) -> Any:
    try:
        return get(key, ABSENT)
    except Exception:
        return ABSENT


class _Same:
    """An object, equal to itself alone."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.value is other.value


def _told(value: Any) -> Any:
    if is_a(value, PLAIN):
        return leaf_key(value)
    if is_a(value, VALUES):
        return type(value), repr(value)
    return (type(value), *map(_told, value)) if is_a(value, tuple) else _Same(value)


def is_data(value: Any, seen: set[int]) -> bool:
    """Whether an object holds numbers, texts and the like alone: no tensors, no modules, nothing that is not looked into."""
    if is_a(value, (*PLAIN, *VALUES, FunctionType, BuiltinFunctionType, type)) or id(value) in seen:
        return True
    seen.add(id(value))
    if is_a(value, (torch.Tensor, nn.Module, MethodType)):
        return False
    if is_a(value, (list, tuple, set)):
        return all(is_data(item, seen) for item in value)
    table = value if is_a(value, dict) else table_of(value)
    return (is_a(value, dict) or bool(table)) and all(is_data(item, seen) for item in table.values())


class _Places:
    """Collects the places that `code` names, by a path in words."""

    def __init__(self, code: Code) -> None:
        self.code = code
        self.found: dict[str, Place] = {}
        self.seen: set[int] = set()
        self.next: deque[tuple[Any, ...]] = deque()

    def of(self, root: nn.Module, loss_fn: Any) -> dict[str, Place]:
        modules = list(root.named_modules())
        self.seen |= {id(m) for _, m in modules}
        for path, module in modules:
            for name in sorted(self.code.names & vars(module).keys() - OWN):  # modules tell of objects that are assigned themselves
                self._value(vars(module)[name], f"{path or type(module).__name__}.{name}", DEPTH, self.code.names, name)
            self._of_class(type(module))
        if is_a(loss_fn, nn.Module):
            self._value(loss_fn, "loss_fn", DEPTH, self.code.names)
        for table, name, path in self.code.around():
            self._at(table.get, name, path, DEPTH, self.code.names)
        self._look_into_next()
        for owner, names in self.code.owners.values():  # a trainer whose method is the loss: only by what its methods name
            self._value(owner, f"an object of {type(owner).__qualname__}", DEPTH, names)
        self._look_into_next()
        return self.found

    def _look_into_next(self) -> None:
        """What is near comes first."""
        while self.next and len(self.found) < MOST:
            self._value(*self.next.popleft())

    def _at(self, get: Get, key: Any, path: str, depth: int, names: Set[str]) -> None:
        value = get(key, ABSENT)
        if not is_a(value, (type, ModuleType)) and not (is_a(value, nn.Module) and id(value) in self.seen):
            while self.found.setdefault(path, (get, key)) != (get, key):  # two functions that one function makes
                path += "'"
        if depth:
            self.next.append((value, path, depth - 1, names, key))

    def _of_class(self, kind: type) -> None:
        if id(kind) not in self.seen:
            self.seen.add(id(kind))
            for name in held_by_class(kind, self.code.names - OWN if issubclass(kind, nn.Module) else self.code.names):
                self._at(partial(getattr, kind), name, f"{kind.__module__}.{kind.__qualname__}.{name}", DEPTH, self.code.names)

    def _value(self, value: Any, path: str, depth: int, names: Set[str], called: Any = None) -> None:
        """`called`: the name of its place."""
        if id(value) in self.seen or is_a(value, (torch.Tensor, *PLAIN, *VALUES, *FUNCTIONS)):
            return
        if is_a(value, type):
            return self._of_class(value)
        self.seen.add(id(value))
        with suppress(Exception):  # of code of its own: a proxy, a table that reads a file
            for get, key, name in self._inside(value, names, called):
                self._at(get, key, f"{path}{name}", depth, names)
        self._of_class(type(value))

    def _inside(self, value: Any, names: Set[str], called: Any) -> Iterator[tuple[Get, Any, str]]:
        """What a value holds that the code names: how it is got, by which key, and how that is written."""
        if is_a(value, partial):
            yield from self._inside(value.args, names, None)
            yield from ((value.keywords.get, name, f"({name})") for name in value.keywords)
        elif is_a(value, ref):
            yield partial(_is_gone, value), None, " (whether it is gone)"  # a place of the object itself would keep it
            if id(value()) not in self.seen:
                self.seen.add(id(value()))
                self._of_class(type(value()))
                yield from ((get, key, f"(){name}") for get, key, name in self._inside(value(), names, called))
        elif is_a(value, tuple):  # it may hold what changes
            yield from ((partial(_item, value), i, f"[{i}]") for i, item in enumerate(value[:LONGEST]) if not is_a(item, PLAIN))
        elif is_a(value, (list, deque)):
            yield partial(_length, value), None, " (its length)"
            yield from ((partial(_item, value), i, f"[{i}]") for i in range(min(len(value), LONGEST)))
        elif is_a(value, set):
            yield partial(_length, value), None, " (its length)"
            yield from ((partial(_has, value), item, f" (has {item!r})") for item in islice(value, LONGEST) if is_a(item, PLAIN))
        elif is_a(value, Mapping):
            yield from self._keys(value, names, called)
        elif is_a(value, nn.Module):
            for path, m in value.named_modules():
                found = sorted(names & vars(m).keys() - WITHIN if is_own_class(type(m)) else dict(plain_of(m)))
                yield from ((vars(m).get, name, f".{path}.{name}".replace("..", ".")) for name in found)
                yield from self._defaults(vars(m), type(m), names - WITHIN, f".{path}" if path else "")
        elif is_a(value, ModuleType):
            table = vars(value) if is_own_file(value) else {}
            yield from ((table.get, name, f".{name}") for name in sorted(names & table.keys()))
        else:
            table = table_of(value)
            slots = {name for base in type(value).__mro__ for name in getattr(base, "__slots__", ())}
            yield from ((table.get, name, f".{name}") for name in sorted(names & table.keys()))
            yield from self._defaults(table, type(value), names, "")
            yield from ((partial(getattr, value), name, f".{name}") for name in sorted(names & slots))

    @staticmethod
    def _defaults(table: Mapping[str, Any], kind: type, names: Set[str], path: str) -> Iterator[tuple[Get, Any, str]]:
        """What an object has of its class until one of its own is assigned."""
        found = held_by_class(kind, names - table.keys())
        return ((partial(_own_or_of_class, table, kind), name, f"{path}.{name}") for name in found)

    def _keys(self, table: Mapping[Any, Any], names: Set[str], called: Any) -> Iterator[tuple[Get, Any, str]]:
        """Those that code names; where there is none, where it goes through the table, and where keys are no texts and numbers, all of them."""
        there = list(islice(table, MANY_KEYS))
        keys = [] if called in self.code.gone_through else [k for k in there if k in self.code.keys or k in names]
        if not keys:
            yield partial(_length, table), None, " (its length)"
        keys = [*keys, *(k for k in there[:LONGEST] if type(k) not in (str, int))] if keys else there[:LONGEST]
        yield from ((partial(_of_key, table), key, f"[{key!r}]") for key in keys
                    if is_a(table, dict) or is_a(table[key], PLAIN))  # others may make an object when they are asked


def _is_gone(weak: ref[Any], _: None, default: Any) -> bool:
    return weak() is None


def _own_or_of_class(table: Mapping[str, Any], kind: type, name: str, default: Any) -> Any:
    return table[name] if name in table else getattr(kind, name, default)


def _length(value: Any, _: None, default: Any) -> int:
    return len(value)


def _has(items: Set[Any], item: Any, _: Any) -> bool:
    return item in items


def _of_key(table: Mapping[Any, Any], key: Any, default: Any) -> Any:
    return table[key] if key in table else default


def _item(items: Sequence[Any], at: int, default: Any) -> Any:
    return items[at] if at < len(items) else default
