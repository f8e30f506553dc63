"""Checks the field values of a dataclass against their declared types, for data read from files."""
from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from functools import cache
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints


def check_types(value: Any) -> None:
    """Check the fields of a dataclass instance, nested values included. Raises ValueError that names the field. NaN is refused."""
    hints = _hints(type(value))
    for f in fields(value):
        _check(getattr(value, f.name), hints[f.name], f.name)


_hints: Callable[[Any], dict[str, Any]] = cache(get_type_hints)


def _check(value: Any, hint: Any, where: str) -> None:
    origin, args = get_origin(hint), get_args(hint)
    if hint is Any:
        return
    if origin in (Union, UnionType):
        if not any(_fits(value, a, where) for a in args):
            raise ValueError(f"{where} is {value!r:.60}")
    elif origin is Literal:
        if not any(value == a and type(value) is type(a) for a in args):
            raise ValueError(f"{where} is {value!r:.60}, not one of {', '.join(map(repr, args))}")
    elif origin is tuple:
        _check_instance(value, tuple, where)
        for i, v in enumerate(value):
            _check(v, args[0], f"{where}[{i}]")
    elif origin is not None and issubclass(origin, Mapping):
        _check_instance(value, Mapping, where)
        for k, v in value.items():
            _check(k, args[0], where)
            _check(v, args[1], f"{where}[{k!r:.60}]")
    elif is_dataclass(hint):
        _check_instance(value, hint, where)
        for f in fields(value):
            _check(getattr(value, f.name), _hints(hint)[f.name], f"{where}.{f.name}")
    else:
        _check_plain(value, hint, where)


def _fits(value: Any, hint: Any, where: str) -> bool:
    try:
        _check(value, hint, where)
    except ValueError:
        return False
    return True


def _check_instance(value: Any, wanted: Any, where: str) -> None:
    if not isinstance(value, wanted):
        raise ValueError(f"{where} is {value!r:.60}, not a {getattr(wanted, '__name__', wanted)}")


def _check_plain(value: Any, hint: Any, where: str) -> None:
    if hint in (NoneType, None):
        good = value is None
    elif hint is float:
        good = isinstance(value, (int, float)) and not isinstance(value, bool) and value == value
    elif hint is int:
        good = isinstance(value, int) and not isinstance(value, bool)
    else:
        good = isinstance(value, hint)
    if not good:
        raise ValueError(f"{where} is {value!r:.60}, not {'nothing' if hint is NoneType else 'a ' + hint.__name__}")
