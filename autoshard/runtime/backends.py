"""What runs a bound local graph: torch op by op ("eager"), or compiled by inductor."""
from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from autoshard import _torch
from autoshard.errors import UsageError
from autoshard.seeded import seeded


def eager(module: torch.fx.GraphModule, name: str) -> Callable[[list[Any]], Sequence[torch.Tensor]]:
    """The graph's generated Python. Values die at their last use, arguments too."""
    _torch.boxed(module.graph)
    module.recompile()
    return module.forward


def inductor(module: torch.fx.GraphModule, name: str) -> Callable[[list[Any]], Sequence[torch.Tensor]]:
    """Forward and backward are compiled each on its own: inductor fuses, and cannot change what is saved.

    Raises UsageError for a graph with random ops, whose numbers must not depend on the compiler."""
    random = [str(n.args[0]) for n in module.graph.nodes if n.target is seeded]
    if random:
        raise UsageError(f"backend=\"inductor\" cannot run {random[0]} on several ranks yet; use backend=\"eager\"")
    compiled: list[Any] = []

    def call(arguments: list[Any]) -> Sequence[torch.Tensor]:
        if not compiled:  # at the first call, when strides and devices are known
            compiled.append(_torch.compile_with_inductor(module, arguments))
        return compiled[0](arguments)

    return call


BACKENDS = {"eager": eager, "inductor": inductor}


def backend_of(name: str) -> Callable[[torch.fx.GraphModule, str], Callable[[list[Any]], Sequence[torch.Tensor]]]:
    if name not in BACKENDS:
        raise UsageError(f"backend={name!r} is not one of {', '.join(BACKENDS)}")
    return BACKENDS[name]
