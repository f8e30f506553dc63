"""A bound local graph as straight-line Python: one line per op, each value dropped after its last reader.

What FX generates looks every op up by four attributes and calls it through a Python method; here a line calls
the op's C++ entry, with arguments that equal the schema's defaults left out. On a small model that is a third of the
time a step spends outside kernels.
"""
from __future__ import annotations

import linecache
import operator
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from traceback import walk_tb
from typing import Any

import torch
from torch.fx import Graph, Node

from autoshard import _torch
from autoshard.errors import AutoshardError
from autoshard.lower.lifetimes import Lifetimes


@dataclass(frozen=True, eq=False)
class Straight:
    """Text of a function `run` and what it names. Called as that function. `places`: by name of a value, the op that makes it, for messages."""

    name: str
    source: str
    scope: dict[str, Any]
    places: Mapping[str, str] = field(default_factory=dict)

    @cached_property
    def run(self) -> Callable[..., Sequence[Any]]:
        file = f"<autoshard {self.name} {id(self):x}>"
        linecache.cache[file] = (len(self.source), None, self.source.splitlines(True), file)  # tracebacks show the line
        weakref.finalize(self, linecache.cache.pop, file, None)
        exec(compile(self.source, file, "exec"), self.scope)
        run: Callable[..., Sequence[Any]] = self.scope["run"]
        return run

    def __call__(self, values: list[Any]) -> Sequence[Any]:
        try:
            return self.run(values)
        except Exception as e:
            if not isinstance(e, AutoshardError) and (place := self._place(e)):
                e.add_note(f"raised by {place} of the model that autoshard compiled; the tensors that it gets are this rank's pieces")
            raise

    def _place(self, error: Exception) -> str:
        """The op that raised, "" where that is no op of the model's."""
        lines = self.source.splitlines()
        at = next((n for frame, n in walk_tb(error.__traceback__) if frame.f_code is self.run.__code__), 0)
        return self.places.get(lines[at - 1].partition(" = ")[0].strip(), "")


def straight(graph: Graph, name: str, lifetimes: Lifetimes | None = None) -> Straight:
    """A function of one list (placeholders in order), which it empties so that arguments die at their last use."""
    writer = Writer(graph, lifetimes or Lifetimes.of(graph))
    places = {n.name: part.where for n in graph.nodes if (part := n.meta.get("part"))}
    return Straight(name, "\n".join(writer.lines()) + "\n", writer.scope, places)


class Writer:
    """`scope` is filled with what the lines name: ops and constants."""

    def __init__(self, graph: Graph, lifetimes: Lifetimes) -> None:
        self.scope: dict[str, Any] = {}
        self._graph = graph
        self._known: dict[int, str] = {}
        self._lifetimes = lifetimes

    def lines(self) -> Iterator[str]:
        takes = [n.name for n in self._graph.nodes if n.op == "placeholder"]
        yield "def run(values):"
        yield f"    {', '.join(takes)}{',' * bool(takes)} = values" if takes else "    pass"
        yield "    values.clear()"
        unread = [n.name for n in self._lifetimes.unread]
        if unread:
            yield f"    del {', '.join(unread)}"
        for node in self._graph.nodes:
            if node.op == "output":
                yield f"    return {self._value(tuple(node.args[0]))}"
            elif node.op == "call_function":
                dead = [n.name for n in self._lifetimes.dead_after.get(node, ())]
                yield f"    {node.name} = {self._call(node)}" + (f"; del {', '.join(dead)}" if dead else "")

    def _call(self, node: Node) -> str:
        if node.target is operator.getitem:
            return f"{self._value(node.args[0])}[{self._value(node.args[1])}]"
        args, kwargs = _short(node)
        words = [*map(self._value, args), *(f"{k}={self._value(v)}" for k, v in kwargs.items())]
        target = _torch.kernel(node.target) if isinstance(node.target, torch._ops.OpOverload) else node.target
        return f"{self._constant(target, 'f')}({', '.join(words)})"

    def _value(self, value: Any) -> str:
        if isinstance(value, Node):
            return value.name
        if isinstance(value, (tuple, list)) and any(isinstance(v, (Node, tuple, list)) for v in value):
            words = ", ".join(map(self._value, value))
            return f"[{words}]" if isinstance(value, list) else f"({words}{',' * (len(value) == 1)})"
        if value is None or type(value) in (bool, int, str):
            return repr(value)
        return self._constant(value, "c")

    def _constant(self, value: Any, letter: str) -> str:
        """The name of an object that is made once, not at every call."""
        if id(value) not in self._known:
            self._known[id(value)] = f"{letter}{len(self._known)}_"
            self.scope[self._known[id(value)]] = value  # held here, so its id stays its own
        return self._known[id(value)]


def _short(node: Node) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments without those that equal the op's defaults."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return node.args, node.kwargs
    schema = node.target._schema.arguments
    args = list(node.args)
    while args and schema[len(args) - 1].has_default_value() and _same(args[-1], schema[len(args) - 1].default_value):
        args.pop()
    defaults = {a.name: a.default_value for a in schema if a.has_default_value()}
    return tuple(args), {k: v for k, v in node.kwargs.items() if k not in defaults or not _same(v, defaults[k])}


def _same(a: Any, b: Any) -> bool:
    return type(a) is type(b) and not isinstance(a, (Node, torch.Tensor)) and a == b

