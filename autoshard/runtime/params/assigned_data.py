"""`p.data = value` of DTensors. torch takes it without an error and without an effect: the local tensor stays. Where only the value is a DTensor (`p`
is an average of the weights, in a plain model), `p` has no memory afterwards, and the process crashes when it is read: here it gets the whole.

Loops put weights in place like this: old ones behind a step of SAM, averages for an evaluation, `vector_to_parameters`. As of plain tensors
the two share memory afterwards, where both are placed alike."""
from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate

from autoshard import _torch
from autoshard.errors import UsageError
from autoshard.runtime.params.strided import cut
from autoshard.runtime.params.told import told_if_alone


def take_assigned_data() -> None:
    """From now on, for all DTensors of this process."""
    theirs = torch.Tensor.data
    if "data" not in vars(DTensor):
        DTensor.data = property(theirs.__get__, _assign)  # type: ignore[assignment,method-assign]
    if "data" not in vars(torch.Tensor):
        torch.Tensor.data = property(theirs.__get__, partial(_assign_plain, theirs))  # type: ignore[assignment,method-assign]


def _assign_plain(theirs: Any, x: torch.Tensor, value: Any) -> None:
    """All ranks assign, where the value is a DTensor."""
    if isinstance(value, DTensor):
        with told_if_alone("gather a DTensor"):
            value = value.detach().full_tensor()
    theirs.__set__(x, value)


@torch.no_grad()
def _assign(x: DTensor, value: Any) -> None:
    """Raises UsageError for another shape or dtype. All ranks assign where `value` is placed otherwise than `x`, which is then gathered."""
    if not isinstance(value, torch.Tensor) or (value.shape, value.dtype) != (x.shape, x.dtype):
        what = f"{tuple(value.shape)} {value.dtype}" if isinstance(value, torch.Tensor) else type(value).__name__
        raise UsageError(f"the .data of a DTensor of {tuple(x.shape)} {x.dtype} cannot become {what}: its shape and dtype stay as they are; "
                         "give a DTensor like it, or a whole tensor of that shape and dtype")
    if isinstance(value, DTensor) and (value.device_mesh, value.placements) == (x.device_mesh, x.placements):
        x._local_tensor = value._local_tensor
        return
    whole = value.full_tensor() if isinstance(value, DTensor) else value.detach()
    placed = [Replicate() if p.is_partial() else p for p in x.placements]
    piece = cut(whole.to(x.device), placed, x.device_mesh.shape, x.device_mesh.get_coordinate())
    _torch.swap(x, piece.contiguous(), placed)
