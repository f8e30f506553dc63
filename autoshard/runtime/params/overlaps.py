"""Parameters that share memory with other tensors of the model. A compiled model holds every tensor by itself."""
from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations

import torch
from torch import nn

from autoshard.errors import UsageError

PLAIN = (torch.Tensor, nn.Parameter)


def check_overlaps(model: nn.Module) -> None:
    """Raises UsageError where on one device the step of a parameter changes another tensor (`head.weight.data = words.weight.data`)."""
    for (a, p), (b, t) in _sharing(model):
        if p.requires_grad or t.requires_grad:
            raise UsageError(f"{a} and {b} are two tensors in the same memory, so training one changes the other, and the compiled model would hold "
                             f"each by itself; make them one parameter ({b} = {a}), or give one memory of its own (.clone())")


def _sharing(model: nn.Module) -> Iterator[tuple[tuple[str, torch.Tensor], tuple[str, torch.Tensor]]]:
    by_storage: dict[int, list[tuple[str, torch.Tensor]]] = {}
    for name, t in (*model.named_parameters(), *model.named_buffers()):
        if type(t) in PLAIN and t.layout is torch.strided and not t.is_meta and t.numel():
            by_storage.setdefault(t.untyped_storage().data_ptr(), []).append((name, t))
    for held in by_storage.values():
        yield from (pair for pair in combinations(held, 2) if _overlap(pair[0][1], pair[1][1]))


def _overlap(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Of one storage. Pieces of rows that lie between each other (columns of one matrix) are told apart by their beginning alone."""
    if a.data_ptr() == b.data_ptr():
        return True
    first, second = sorted((a, b), key=torch.Tensor.data_ptr)
    return first.is_contiguous() and first.data_ptr() + first.nbytes > second.data_ptr()
