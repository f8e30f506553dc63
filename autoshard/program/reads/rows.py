"""Rows that a mask selects, held as what is computed for all of them."""
from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from autoshard import _torch
from autoshard.base.graph import Ref


def named(names: str, *owners: Any) -> frozenset[Any]:
    return frozenset(getattr(owner, name) for name in names.split() for owner in owners or (Tensor, torch, F) if hasattr(owner, name))


class Selection(Tensor):
    """The rows of `everywhere` that `left_out`, a mask of its first dims, is False for.

    everywhere   has ones in the other rows (zeros of integers), so that no op makes numbers there that are not finite
    key          which mask it is
    line         of the user's code, that selects
    is_new       whether nothing has read it, but for updates in place
    found        of what says where the rows are, as `torch.where(mask)` and `mask.nonzero()` do: in which dims of the mask"""

    everywhere: Tensor
    left_out: Tensor
    key: Ref
    line: str
    is_new: bool
    found: tuple[int, ...]

    @staticmethod
    def of(everywhere: Tensor, left_out: Tensor, key: Ref, line: str, is_new: bool = False) -> Selection:
        with _torch.no_modes():
            made = torch.empty(0, dtype=everywhere.dtype).as_subclass(Selection)
        made.left_out, made.key, made.line, made.is_new, made.found = left_out, key, line, is_new, ()
        made.everywhere = made.filled(everywhere, int(everywhere.is_floating_point() or everywhere.is_complex()))
        return made

    def of_same(self, everywhere: Tensor) -> Selection:
        return Selection.of(everywhere, self.left_out, self.key, self.line)

    def where(self, dim: int) -> Selection:
        """Where the rows are in one dim of the mask."""
        made = self.of_same(self.places_in(dim))
        made.found = (dim,)
        return made

    def places_in(self, dim: int) -> Tensor:
        """Of all places of the mask."""
        shape = self.left_out.shape
        return torch.arange(shape[dim], device=self.left_out.device).view(-1, *(1,) * (len(shape) - 1 - dim)).expand(shape)

    def filled(self, everywhere: Tensor, value: int) -> Tensor:
        return everywhere.masked_fill(self.places(everywhere), value)

    def places(self, everywhere: Tensor) -> Tensor:
        return self.left_out.reshape(*self.left_out.shape, *(1,) * (everywhere.ndim - self.left_out.ndim))

    def dims_of(self) -> int:
        """Dims of a row."""
        return self.everywhere.ndim - self.left_out.ndim

    def rows(self) -> Tensor:
        """The rows themselves, which a trace refuses."""
        return self.everywhere[tuple(torch.argwhere(~self.left_out).unbind(1))]  # not what finds rows in a trace


def everywhere_of(values: Iterable[Any]) -> tuple[Any, ...]:
    return tuple(v.everywhere if isinstance(v, Selection) else v for v in values)


def selections_in(args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Selection]:
    parts = [p for v in (*args, *kwargs.values()) for p in (v if isinstance(v, (tuple, list)) else (v,))]
    return [p for p in parts if isinstance(p, Selection)]
