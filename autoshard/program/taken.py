"""What a model may be made of: modules whose Python runs, and tensors that lie in memory element by element."""
from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn
from torch.nn.parameter import UninitializedTensorMixin

from autoshard.errors import UsageError

DENSE = "make it dense (.to_dense()), or do before the call what needs it"


class Compiled:
    """What compiled models inherit, so that they are not taken again."""


def check_taken(model: nn.Module) -> None:
    """Raises UsageError for modules and stored tensors that can be neither copied nor traced."""
    for path, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise UsageError(f"{path or 'the model'} is a scripted module (torch.jit), whose Python is gone; use the module that it was made of")
        if isinstance(module, nn.SyncBatchNorm):
            raise UsageError(f"{path or 'the model'} is a SyncBatchNorm, which talks to other processes by itself; leave out convert_sync_batchnorm: "
                             "a BatchNorm of a compiled model is over the whole batch of all ranks")
    for name, t in (*model.named_parameters(), *model.named_buffers()):
        if isinstance(t, UninitializedTensorMixin):
            raise UsageError(f"{name} has no shape yet (a lazy module of torch); call the model once with a small batch before")
        if t.layout is not torch.strided and isinstance(t, nn.Parameter):
            raise UsageError(f"{name} is no dense tensor ({t.layout}); {DENSE}")


def dense_buffers(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Named buffers without those that are sparse or nested. A model may hold these for other methods (Whisper: which heads to align by), so they
    stay as they are, each rank's own; a forward pass that uses one is refused by its trace, with the line."""
    return ((name, b) for name, b in model.named_buffers() if b.layout is torch.strided)


def check_dense(t: torch.Tensor) -> None:
    """Raises UsageError for an input that is sparse or nested."""
    if t.layout is not torch.strided:
        raise UsageError(f"an input is no dense tensor ({t.layout}); {DENSE}")
