"""Whether a lowered program fits together at a size: every kind of call in it is made once more, on tensors without memory."""
from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from autoshard import _torch
from autoshard.base.random import seeded
from autoshard.lower.lower import Lowered
from autoshard.runtime.between.line import Line, NoLine


@dataclass(frozen=True)
class Laid:
    """How a tensor lies in memory."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype

    @staticmethod
    def of(value: Any) -> Any:
        """Of every tensor in a value; the rest is itself."""
        if isinstance(value, torch.Tensor):
            return Laid(tuple(value.shape), value.stride(), value.dtype)
        return tuple(map(Laid.of, value)) if isinstance(value, (tuple, list)) else value

    def empty(self, device: str) -> torch.Tensor:
        return torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device=device)


@dataclass(frozen=True)
class Made:
    """A call, and what it makes: `args` and `kwargs` with `Laid` for tensors."""

    target: Any
    args: Any
    kwargs: Any
    result: Any


@dataclass(frozen=True)
class Calls:
    """The calls of a program that depend on the size, each kind once, at two sizes. `quick`: those of which the meta device makes the
    tensors that are in the program; fake tensors, which cost five times as much, make all of them."""

    quick: tuple[tuple[Made, Made], ...]
    others: tuple[tuple[Made, Made], ...]

    @staticmethod
    def of(a: Lowered, b: Lowered) -> "Calls":
        """Raises NoLine for programs with other ops."""
        one, two = tuple(_calls(a)), tuple(_calls(b))
        if len(one) != len(two):
            raise NoLine("the programs have other ops")
        other = next(((a, b) for a, b in zip(one, two, strict=True) if a.target is not b.target), None)
        if other is not None:
            raise NoLine(f"{other[0].target} is {other[1].target} at the other size")
        pairs = tuple((a, b) for a, b in dict.fromkeys(zip(one, two, strict=True)) if a != b and b.target is not operator.getitem)
        with torch.no_grad():
            quick = tuple(pair for pair in pairs if _is_quick(pair[1]))
        return Calls(quick, tuple(pair for pair in pairs if pair not in quick))

    def check(self, line: Line) -> None:
        """Raises NoLine where a call does not make what is on the line, or cannot be made."""
        with torch.no_grad():
            for a, b in self.quick:
                _check(a, b, line, "meta")
            with _torch.fake_mode():
                for a, b in self.others:
                    _check(a, b, line, "cpu")


def _is_quick(made: Made) -> bool:
    if not _has_tensor(made.args):  # it would be made in memory
        return False
    try:
        return bool(Laid.of(_run(made.target, made.args, made.kwargs, "meta")) == made.result)
    except (RuntimeError, TypeError, ValueError, IndexError):
        return False


def _has_tensor(value: Any) -> bool:
    return isinstance(value, Laid) or isinstance(value, tuple) and any(map(_has_tensor, value))


def _check(a: Made, b: Made, line: Line, device: str) -> None:
    wanted = line(a.result, b.result)
    try:
        found = Laid.of(_run(b.target, line(a.args, b.args), line(a.kwargs, b.kwargs), device))
    except (RuntimeError, TypeError, ValueError, IndexError) as e:
        raise NoLine(f"{b.target} at size {line.size}: {e}") from e
    if found != wanted:
        raise NoLine(f"{b.target} makes {found} at size {line.size}, not {wanted}")


def _calls(program: Lowered) -> Iterator[Made]:
    for window in program.windows:
        for node in window.graph.nodes:
            if node.op == "placeholder":
                yield Made(_same, (Laid.of(node.meta["val"]),), (), Laid.of(node.meta["val"]))
            elif node.op == "call_function":
                yield Made(node.target, _frozen(node.args), tuple((k, _frozen(v)) for k, v in node.kwargs.items()), Laid.of(node.meta["val"]))


def _frozen(value: Any) -> Any:
    if isinstance(value, Node):
        return Laid.of(value.meta["val"])
    if isinstance(value, (tuple, list)):
        return tuple(map(_frozen, value))
    return value


def _same(x: Any) -> Any:
    return x


def _run(target: Any, args: Any, kwargs: Any, device: str) -> Any:
    if target is seeded:  # draws nothing here: (op, seed, salt, piece, the op's arguments)
        target, args = args[0], args[4:]
    return target(*(_made(v, device) for v in args), **{k: _made(v, device) for k, v in kwargs})


def _made(value: Any, device: str) -> Any:
    if isinstance(value, Laid):
        return value.empty(device)
    return [_made(v, device) for v in value] if isinstance(value, tuple) else value
