"""The texts of two bound programs that differ in numbers, as one text that takes these numbers."""
from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from autoshard.runtime.between.line import Line, NoLine
from autoshard.runtime.execute.eager import Straight

WORD = re.compile(r"""('(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*"|\b[cf]\d+_|(?<![\w.])\d+(?![\w.]))""")
"""Texts, names of constants and functions, and numbers."""


@dataclass(frozen=True)
class Open:
    """`pairs`: of every number that the text takes, what it is at the two ends."""

    text: Straight
    pairs: tuple[tuple[Any, Any], ...]

    def at(self, line: Line) -> Callable[[list[Any]], Sequence[Any]]:
        """The program with the numbers on a line. Raises NoLine."""
        return partial(self.text.run, n=tuple(line(a, b) for a, b in self.pairs))


def opened(a: Straight, b: Straight) -> Open:
    """The program that is `a` with its numbers, and `b` with its. Raises NoLine where they differ otherwise."""
    pairs: list[tuple[Any, Any]] = []
    source = "".join(_words(a, b, pairs)).replace("def run(values):", "def run(values, n):", 1)
    return Open(Straight(f"{b.name} of open size", source, dict(b.scope)), tuple(pairs))


def _words(a: Straight, b: Straight, pairs: list[tuple[Any, Any]]) -> Iterator[str]:
    known: dict[str, str] = {}
    mine, theirs = (WORD.split(x.source) for x in (a, b))
    if len(mine) != len(theirs):
        raise NoLine("the programs have other ops")
    for i, (x, y) in enumerate(zip(mine, theirs, strict=True)):
        if i % 2 == 0 or not y[0].isdigit() and y not in b.scope:
            if x != y:
                raise NoLine(f"the programs have other ops: {x!r:.80} is {y!r:.80} at the other size")
            yield y
            continue
        key = f"{x} {y}"
        if key not in known:
            known[key] = _word(x, y, a, b, pairs)
        yield known[key]


def _word(x: str, y: str, a: Straight, b: Straight, pairs: list[tuple[Any, Any]]) -> str:
    """`y`, or the number that it is of those the text takes."""
    one, two = (int(w) if w[0].isdigit() else straight.scope.get(w) for w, straight in ((x, a), (y, b)))
    if one is two or type(one) is type(two) and one == two:
        return y
    Line(0, 1, 1)(one, two)  # raises where it is no number
    pairs.append((one, two))
    return f"n[{len(pairs) - 1}]"
