"""Finds, for the inputs of a call, two variants to be between, and proves that the model has the same program there."""
from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count, product
from math import prod
from typing import Any

import torch

from autoshard.base.plan import Plan
from autoshard.decide.kept import Known, excess
from autoshard.program.calling import Traced
from autoshard.program.tracing.any_size import AnySize
from autoshard.recompute.rewrite import with_recompute
from autoshard.runtime.between.code import opened
from autoshard.runtime.between.line import Line, NoLine
from autoshard.runtime.between.shapes import Calls
from autoshard.runtime.between.step import Between, open_programs
from autoshard.runtime.compile import Settings
from autoshard.runtime.execute.eager import Straight
from autoshard.runtime.ranks.agree import alike, alone
from autoshard.runtime.ranks.place import Place
from autoshard.runtime.step import Step

log = logging.getLogger("autoshard")
MOST_ENDS, MOST_KINDS = 8, 16
"""Variants of one kind of call that others may be between, the least and the largest among them; and kinds of calls, those used last."""
Trace = Callable[..., Traced]
"""Traces the model again, for the structure and the leaves of a call, `any_size` left open."""
Dims = frozenset[tuple[int, int]]
"""(tensor input, dim)."""
Good = Callable[[bool, int, float], bool]
"""Whether a step (training or not) whose inputs have so many elements may take so many seconds."""


@dataclass(frozen=True, eq=False)
class Asked:
    """The leaves of a call."""

    leaves: tuple[Any, ...]

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        return tuple(tuple(t.shape) for t in self.leaves if isinstance(t, torch.Tensor))

    @property
    def elements(self) -> int:
        return sum(map(prod, self.shapes))


@dataclass(frozen=True, eq=False)
class End(Asked):
    """A variant that was traced and lowered. `number`: how many were before, on every rank the same."""

    step: Step
    number: int


class Pair:
    """Two ends that differ in one size of their inputs, `size` that with its conditions. Raises NoLine where they differ otherwise."""

    def __init__(self, a: End, b: End, size: AnySize) -> None:
        self.ends, self.size = (a.step, b.step), size
        self.sizes, _ = _one_size(a.shapes, b.shapes)
        if not _alike(a.step.plan, b.step.plan):
            raise NoLine("their plans differ")
        if list(a.step.calling.constants) != list(b.step.calling.constants):
            raise NoLine("their constants differ")
        for name, value in b.step.calling.constants.items():
            Line(0, 1, 1)(a.step.calling.constants[name], value)
        Line(*self.sizes, self.sizes[1])(a.step.graph.ops, b.step.graph.ops)  # raises for other ops
        self.programs = {name: opened(_text(one.call), _text(two.call)) for name, (one, two) in open_programs(*self.ends).items()}
        self.calls = Calls.of(a.step.lowered, b.step.lowered)
        if not all(map(size.holds, self.sizes)):
            raise NoLine("the model branches on the size")

    def at(self, line: Line) -> Between:
        """Raises NoLine."""
        if not self.size.holds(line.size):
            raise NoLine(f"the model may branch on size {line.size}")
        self.calls.check(line)
        return Between(self.ends, line, self.programs)


class Variants:
    """Those of a compiled model that were traced and lowered."""

    def __init__(self, place: Place, settings: Settings) -> None:
        self.place, self.settings = place, settings
        self._ends: dict[Any, list[End]] = {}
        self._pairs: dict[tuple[End, End], Pair | None] = {}
        self._sizes: dict[Any, AnySize | None] = {}
        self._numbers = count()

    def add(self, key: Any, leaves: Sequence[Any], step: Step) -> None:
        """A variant that was lowered, by all that its call depends on (`CompiledModule._key`), and the leaves of the call."""
        same = without_sizes(key)
        if type(step) is not Step or not isinstance(step.forward.call, Straight) or any(end.step is step for end in self._ends.get(same, ())):
            return
        new = End(tuple(leaves), step, next(self._numbers))
        ends = sorted([*(end for end in self._ends.get(same, ()) if end.shapes != new.shapes), new], key=lambda end: end.elements)
        if len(ends) > MOST_ENDS:
            del ends[MOST_ENDS // 2]
        self._ends.pop(same, None)
        self._ends[same] = ends
        for oldest in list(self._ends)[:-MOST_KINDS]:
            del self._ends[oldest]
        self._sizes = {at: size for at, size in self._sizes.items() if at[0] in self._ends}
        there = {end for its in self._ends.values() for end in its}
        self._pairs = {pair: made for pair, made in self._pairs.items() if there.issuperset(pair)}

    def between(self, key: Any, leaves: Sequence[Any], searched: Sequence[Known], trace: Trace) -> Step | None:
        """The variant of a call that is one of them or lies between two, on all ranks or none; None where there are no two, where it may be another
        program, or where a search may find a plan that is too much cheaper."""
        ends = self._ends.get(without_sizes(key), [])
        if self.settings.keep is None or len(ends) < 2:
            return None
        running = self.settings.options.running

        def good(training: bool, n: int, seconds: float) -> bool:
            return excess(searched, training, n, seconds) <= running.keep_within

        open_at = partial(self._open, without_sizes(key), partial(trace, key[1]))
        step, ends_at = alone(self.place, lambda: self._between(ends, Asked(tuple(leaves)), good, open_at))
        return step if alike(self.place, ends_at, running.timeout) else None

    def _between(self, ends: Sequence[End], new: Asked, good: Good, open_at: Callable[[End, Dims], AnySize]) -> tuple[Step | None, str]:
        """A variant, and in words what it is made of: between other ends the collectives may be others."""
        if same := [end.step for end in ends if end.shapes == new.shapes]:
            return same[0], "one that is there"
        below, above = ([end for end in ends if sign * end.elements > sign * new.elements] for sign in (-1, 1))
        for a, b in product(reversed(below), above):  # the nearest first
            try:
                line = _line(a, b, new)
                seconds = line.fraction(a.step.plan.objective_s, b.step.plan.objective_s)
                if good(b.step.graph.training, new.elements, seconds) and (pair := self._pair(a, b, open_at)):
                    return pair.at(line), f"between {a.number} and {b.number}"
            except Exception as e:  # as in `_pair`: then the shape is traced
                log.info("no variant between two others: %s", e)
        return None, ""

    def _open(self, key: Any, trace: Trace, end: End, dims: Dims) -> AnySize:
        """The size in these dims, and its conditions; traced once per kind of call and its other sizes. Raises NoLine."""
        others = tuple(tuple(None if (i, d) in dims else n for d, n in enumerate(shape)) for i, shape in enumerate(end.shapes))
        at = key, dims, others
        if at not in self._sizes:
            self._sizes[at] = None  # tried once
            i, d = min(dims)
            size = AnySize(end.shapes[i][d], dims)
            graph = with_recompute(trace(end.leaves, any_size=size).graph, end.step.plan.recompute)
            if graph.hash != end.step.graph.hash:
                raise NoLine("with an open size the model has another program")
            self._sizes[at] = size
        found = self._sizes[at]
        if found is None:
            raise NoLine("the model looks at the size")
        return found

    def _pair(self, a: End, b: End, open_at: Callable[[End, Dims], AnySize]) -> Pair | None:
        if (a, b) not in self._pairs:
            self._pairs[a, b] = None
            try:
                self._pairs[a, b] = Pair(a, b, open_at(b, _one_size(a.shapes, b.shapes)[1]))
            except Exception as e:  # of code that meets a symbol for the first time anything may come: then shapes are traced
                log.info("sizes between %s and %s are traced, each by itself: %s", a.shapes, b.shapes, e)
        return self._pairs[a, b]


def without_sizes(key: Any) -> Any:
    """What a variant depends on (`CompiledModule._key`), but for shapes."""
    modes, tree, leaves, given = key
    return modes, tree, tuple((len(leaf[0]), *leaf[1:]) if isinstance(leaf[0], tuple) else leaf for leaf in leaves), given


def _alike(a: Plan, b: Plan) -> bool:
    return (a.ops, a.copies, a.placements, a.recompute, a.offload) == (b.ops, b.copies, b.placements, b.recompute, b.offload)


def _text(call: Any) -> Straight:
    if not isinstance(call, Straight):
        raise NoLine("it is run by another backend")
    return call


def _line(a: End, b: End, new: Asked) -> Line:
    """From one end to the other, at the size of a call. Raises NoLine where it differs otherwise."""
    (first, second), dims = _one_size(a.shapes, b.shapes)
    (_, size), others = _one_size(a.shapes, new.shapes)
    if dims != others:
        raise NoLine("the inputs differ in another size")
    return Line(first, second, size)


def _one_size(a: Sequence[tuple[int, ...]], b: Sequence[tuple[int, ...]]) -> tuple[tuple[int, int], Dims]:
    """The one size that the shapes of two calls differ in, at both, and the (input, dim)s that have it. Raises NoLine."""
    found = {(i, d): (m, n) for i, (x, y) in enumerate(zip(a, b, strict=True)) for d, (m, n) in enumerate(zip(x, y, strict=True)) if m != n}
    if len(set(found.values())) != 1:
        raise NoLine("the inputs differ in more than one size")
    return next(iter(found.values())), frozenset(found)
