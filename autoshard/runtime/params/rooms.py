"""Pieces of padded parameters: programs want them all of one length, and DTensor's last ones are shorter, or empty.

A piece whose first dim is padded lies at the front of memory that has room for the pad, so it is read with its pad without a copy; nothing
ever writes there, so the pad stays zero whatever an optimizer does to the piece. A piece in other memory (a user put it there, another dim is
padded) is copied when it is read."""
from __future__ import annotations

from collections.abc import Sequence

import torch

from autoshard import _torch
from autoshard.base.pads import longer, shorter


class Rooms:
    """Memory of pieces by the parameter's name."""

    def __init__(self) -> None:
        self._rooms: dict[str, torch.Tensor] = {}

    def lay(self, name: str, piece: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
        """The piece with room up to `shape` behind it, where its first dim alone is shorter; else the piece."""
        if tuple(piece.shape[1:]) != tuple(shape[1:]) or tuple(piece.shape) == tuple(shape):
            self._rooms.pop(name, None)
            return piece
        self._rooms[name] = longer(piece, shape)
        return shorter(self._rooms[name], piece.shape)

    def padded(self, name: str, piece: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
        """The piece with its pad: its room, else a copy."""
        room = self._rooms.get(name)
        if room is not None and tuple(room.shape) == tuple(shape) and piece.is_contiguous() and piece.storage_offset() == 0 and (
                piece.untyped_storage().data_ptr() == room.untyped_storage().data_ptr()):
            return room
        return longer(piece, shape)


def is_all_of_its_memory(t: torch.Tensor) -> bool:
    """Whether no more is kept with it than its numbers. A piece in the midst of other memory cannot be staged by `dcp.async_save`: a DTensor
    hands the place on to its views, which have no memory."""
    return t.is_contiguous() and t.storage_offset() == 0 and t.untyped_storage().nbytes() == t.nbytes


def apart(t: torch.Tensor) -> torch.Tensor | None:
    """The same numbers, which stay as they are when `t` is written, and the other way round: memory is copied at that moment. None for memory that
    torch does not have for itself (of numpy, of a file)."""
    try:
        return _torch.lazy_copy(t)
    except (RuntimeError, TypeError):
        return None
