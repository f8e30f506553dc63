"""Data of files as dataclasses. msgspec reads it by the types of the fields; what it refuses is named here by its place."""
from __future__ import annotations

import sys
from abc import ABCMeta
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from difflib import get_close_matches
from functools import cache, partial
from types import UnionType
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias, TypeVar, Union, get_args, get_origin, get_type_hints

import msgspec

from autoshard.base.mesh import Mesh, parse_mesh
from autoshard.base.spec import Spec, format_spec, parse_spec
from autoshard.errors import AutoshardError

MAX = sys.float_info.max
Number = Annotated[float, msgspec.Meta(ge=-MAX, le=MAX, description="a finite number")]
Positive = Annotated[float, msgspec.Meta(gt=0, le=MAX, description="a positive number")]
Share = Annotated[float, msgspec.Meta(gt=0, le=1, description="a fraction between 0 and 1")]
Fraction = Annotated[float, msgspec.Meta(ge=0, le=1, description="a fraction between 0 and 1")]
WORDS = {str: "text", bool: "true or false", int: "a whole number", float: "a number", tuple: "a list"}
T = TypeVar("T")

# A spec and a mesh, which files have as text: "S0,R" and "dp=2,tp=4".
if TYPE_CHECKING:
    SpecText: TypeAlias = Spec
    MeshText: TypeAlias = Mesh
else:  # types that msgspec does not know, so that it asks `_parse`; a tuple and a Mesh are instances of them
    SpecText, MeshText = ABCMeta("SpecText", (), {}), ABCMeta("MeshText", (), {})
    SpecText.register(tuple)
    MeshText.register(Mesh)

PARSE: dict[Any, Callable[[str], Any]] = {SpecText: parse_spec, MeshText: parse_mesh}
FORMAT: dict[Any, Callable[[Any], str]] = {SpecText: format_spec, MeshText: str}


def as_data(value: Any, kind: Any, *, sparse: bool = False) -> Any:
    """A dataclass as JSON and TOML have it: the inverse of `read_as`. `sparse`: without fields at their default."""
    kind = _bare(kind)
    if value is None:
        return None
    if kind in FORMAT:
        return FORMAT[kind](value)
    if is_dataclass(kind):
        skipped = {f.name for f in fields(value) if getattr(value, f.name) == _default(f)} if sparse else ()
        return {name: as_data(getattr(value, name), hint, sparse=sparse) for name, hint in _hints(type(value)).items() if name not in skipped}
    if _is_mapping(kind):
        return {key: as_data(v, get_args(kind)[1], sparse=sparse) for key, v in value.items()}
    return [as_data(v, get_args(kind)[0], sparse=sparse) for v in value] if get_origin(kind) is tuple else value


def _default(f: Field[Any]) -> Any:
    return f.default if f.default_factory is MISSING else f.default_factory()


def read_as(kind: type[T], data: Any) -> T:
    """`data`, as JSON or TOML has it, as a dataclass. Raises ValueError for the first place that does not fit, and for a key
    that is not a field: at "links[0].bandwidth", say."""
    try:
        found = msgspec.convert(data, kind, dec_hook=_parse)
    except msgspec.ValidationError:
        raise ValueError(_wrong(data, kind, "")) from None
    _check_keys(data, kind, "")
    return found


def _parse(kind: Any, text: Any) -> Any:
    if not isinstance(text, str):
        raise ValueError("text is needed")
    try:
        return PARSE[kind](text)
    except AutoshardError as e:
        raise ValueError(str(e)) from None


def _wrong(data: Any, hint: Any, where: str) -> str:
    """What does not fit, in words: the innermost place."""
    for value, inner, place in _inside(data, hint, where):
        try:
            msgspec.convert(value, inner, dec_hook=_parse)
        except msgspec.ValidationError:
            return _wrong(value, inner, place)
    kind = _bare(hint)
    missing = [f.name for f in fields(kind) if f.name not in data and f.default is f.default_factory is MISSING] if _is_table(data, kind) else []
    if missing:
        return f"{f'{where}.{missing[0]}'.lstrip('.')} is missing"
    return f"{where or 'the file'} is {data!r:.60}; {_wanted(data, hint)}"


def _wanted(data: Any, hint: Any) -> str:
    """What should stand there instead."""
    kind, about = _bare(hint), [m.description for m in getattr(_present(hint), "__metadata__", ())]
    if get_origin(kind) is tuple and get_args(kind)[-1] is not ...:
        return f"a list of {len(get_args(kind))} is needed"
    if about or (get_origin(kind) or kind) in WORDS:
        return f"{about[0] if about else WORDS[get_origin(kind) or kind]} is needed"
    if is_dataclass(kind) or _is_mapping(kind):
        return "a table is needed"
    if get_origin(kind) is Literal:
        return f"{' or '.join(map(repr, get_args(kind)))} is needed"
    try:
        msgspec.convert(data, hint, dec_hook=_parse)
    except msgspec.ValidationError as e:
        return str(e)
    return "another value is needed"


def _check_keys(data: Any, hint: Any, where: str) -> None:
    """Raises ValueError for a key that is no field, with the nearest field."""
    kind = _bare(hint)
    for key in data if _is_table(data, kind) else ():
        if key not in _hints(kind):
            raise ValueError(not_a_key(f"{where}.{key}".lstrip("."), _hints(kind)))
    for value, inner, place in _inside(data, hint, where) if _has_fields(hint) else ():
        _check_keys(value, inner, place)


def not_a_key(where: str, known: Iterable[str]) -> str:
    """What to say of a key that is unknown, by its place."""
    near = get_close_matches(where.rpartition(".")[2], tuple(known), n=1)
    return f"{where} is not a key; {f'did you mean {near[0]}?' if near else 'remove it'}"


def _inside(data: Any, hint: Any, where: str) -> Iterator[tuple[Any, Any, str]]:
    """(value, type, place) of what `data`, read as `hint`, consists of."""
    kind = _bare(hint)
    if _is_table(data, kind):
        hints = _hints(kind)
        yield from ((data[k], hints[k], f"{where}.{k}".lstrip(".")) for k in hints if k in data)
    elif _is_mapping(kind) and isinstance(data, dict):
        for key, value in data.items():
            yield value, get_args(kind)[1], f"{where}.{key}" if str(key).isidentifier() else f"{where}[{key!r:.60}]"
    elif get_origin(kind) is tuple and isinstance(data, (list, tuple)):
        yield from ((v, get_args(kind)[0], f"{where}[{i}]") for i, v in enumerate(data))


def _is_table(data: Any, kind: Any) -> bool:
    return is_dataclass(kind) and isinstance(data, dict)


def _is_mapping(kind: Any) -> bool:
    return isinstance(get_origin(kind), type) and issubclass(get_origin(kind), Mapping)


def _present(hint: Any) -> Any:
    """Without None."""
    return next(a for a in get_args(hint) if a is not type(None)) if get_origin(hint) in (Union, UnionType) else hint


@cache
def _has_fields(hint: Any) -> bool:
    """Whether a dataclass is or may be inside it."""
    return is_dataclass(_bare(hint)) or any(map(_has_fields, get_args(_bare(hint))))


@cache
def _bare(hint: Any) -> Any:
    """Without None and without constraints."""
    present = _present(hint)
    return get_args(present)[0] if get_origin(present) is Annotated else present


_hints: Callable[[Any], dict[str, Any]] = cache(partial(get_type_hints, include_extras=True))
