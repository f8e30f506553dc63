"""Indexing by a mask whose values are known while a model is traced (`similarity[~torch.eye(n, dtype=torch.bool)]`, LoRA's enabled rows): by the
places of the mask, whose number is then no data."""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from autoshard import _torch
from autoshard.program.tracing.known_values import Constants

INDEXED = (Tensor.__getitem__, Tensor.__setitem__)
PUTS = (Tensor.index_put, Tensor.index_put_, torch.index_put, torch.index_put_)
SELECTS = (Tensor.masked_select, torch.masked_select)
PLACES = (Tensor.nonzero, torch.nonzero, Tensor.argwhere, torch.argwhere)


class KnownMasks(TorchFunctionMode):
    """Calls the same with places. `constants`: what is known."""

    def __init__(self, constants: Constants) -> None:
        super().__init__()
        self.constants = constants

    def __torch_function__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if func in INDEXED and (index := self._by_places(args[1])) is not None:
            return func(args[0], index, *args[2:])
        if func in PUTS and len(args) > 2 and (index := self._by_places(tuple(args[1]))) is not None:
            return func(args[0], index, *args[2:], **kwargs)
        if func in SELECTS and len(args) == 2 and args[0].shape == args[1].shape and (index := self._by_places(args[1])) is not None:
            return args[0][index]
        if (func in PLACES or func is torch.where) and len(args) == 1 and (places := self._places(args[0])) is not None:
            as_tuple = kwargs.get("as_tuple", func is torch.where)
            with _torch.no_modes():
                return places if as_tuple else torch.stack(places, -1)
        return func(*args, **kwargs)

    def _by_places(self, index: Any) -> tuple[Any, ...] | None:
        """The index with the places of its masks; None where it has none, or one that is not known."""
        given = index if isinstance(index, tuple) else (index,)
        found = {i: self._places(part) for i, part in enumerate(given) if _is_mask(part)}
        if not found or None in found.values():
            return None
        return tuple(one for i, part in enumerate(given) for one in (found.get(i) or (part,)))

    def _places(self, mask: Any) -> tuple[Tensor, ...] | None:
        value = self.constants.value_of(mask) if isinstance(mask, Tensor) and mask.ndim else None
        if value is None:
            return None
        with _torch.no_modes():
            return value.nonzero(as_tuple=True)


def _is_mask(part: Any) -> bool:
    return isinstance(part, Tensor) and part.dtype in (torch.bool, torch.uint8)
