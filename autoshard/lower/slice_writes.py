"""Writes over a part of a tensor where it is, for functional ops that torch has no in-place form of."""
from __future__ import annotations

from typing import Any

import torch

aten = torch.ops.aten


class Write:
    """Copies its second argument over the part of the first that a view of it looks at, and returns the first. `writes_first`: what it
    does, for whoever runs graphs in which values are shared."""

    writes_first = True

    def __init__(self, view: Any) -> None:
        self.view = view
        self.__name__ = self.__qualname__ = f"write_{view._schema.name.removeprefix('aten::')}"

    def __call__(self, x: torch.Tensor, rows: torch.Tensor, *where: Any, **named: Any) -> torch.Tensor:
        self.view(x, *where, **named).copy_(rows)
        return x


WRITE_SLICE, WRITE_SELECT = Write(aten.slice.Tensor), Write(aten.select.int)
