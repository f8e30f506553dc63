"""One size of a trace left open: which other values of it give the same program.

Dims of inputs that have the size are symbols of torch's `ShapeEnv` while the model runs. What Python or torch asks about the symbol is written
down there as a condition on it (a branch, an `int()`, a table that must be long enough). The ops are recorded at the size they are traced
with, and every number in them must be a + b n. So for every n that meets the conditions the model records the same ops, with these numbers.
"""
from __future__ import annotations

from collections.abc import Collection
from functools import lru_cache
from typing import Any

import sympy
import torch
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from autoshard.errors import TraceError


class AnySize:
    """`size`: what a trace is made with; `dims`: (tensor input, dim) of those that have it. `holds` is for after the trace."""

    def __init__(self, size: int, dims: Collection[tuple[int, int]]) -> None:
        self.size, self.dims = size, frozenset(dims)
        self._conditions: tuple[Any, ...] = ()

    def begin(self) -> ShapeEnv:
        """Where the next trace writes its conditions."""
        self._env = ShapeEnv(allow_scalar_outputs=False, allow_dynamic_output_shape_ops=False)
        return self._env

    def make_symbol(self, mode: Any) -> None:
        """With the fake tensors of the trace, outside of its modes."""
        stand_in = torch.empty(self.size, device="meta")
        context: Any = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC])
        self._open = mode.from_tensor(stand_in, static_shapes=False, symbolic_context=context).shape[0]

    def shape(self, index: int, shape: Collection[int]) -> tuple[Any, ...]:
        """Of a tensor input, with the symbol."""
        return tuple(self._open if (index, d) in self.dims else n for d, n in enumerate(shape))

    def end(self) -> None:
        """The trace is through: keep its conditions."""
        (symbol,) = self._open.node.expr.free_symbols or (None,)
        if symbol is None or any(self._env.deferred_runtime_asserts.values()):
            raise TraceError("the model computes with this size what a trace cannot know")
        bounds = self._env.var_to_range[symbol]
        self._symbol = symbol
        self._conditions = (*(guard.expr for guard in self._env.guards), symbol >= bounds.lower, symbol <= bounds.upper)

    def holds(self, n: int) -> bool:
        """Whether the program at size `n` is that of the trace."""
        return bool(self._conditions) and all(c.xreplace({self._symbol: sympy.Integer(n)}) == sympy.true for c in self._conditions)


def plain(n: Any) -> Any:
    """A size as the number it has in this trace. Raises TraceError where it is not a + b n of an open size."""
    if not isinstance(n, torch.SymInt):
        return n
    if n.node.hint is None or not _is_line(n.node.expr):
        raise TraceError(f"a symbolic size is used ({n.node.expr}); shapes must be fixed")
    return int(n.node.hint)


@lru_cache(maxsize=1024)
def _is_line(expr: Any) -> bool:
    symbols = tuple(expr.free_symbols)
    if len(symbols) > 1:
        return False
    return not symbols or bool(expr.is_polynomial(*symbols)) and sympy.degree(expr, *symbols) <= 1
