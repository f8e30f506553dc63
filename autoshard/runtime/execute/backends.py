"""What runs a bound local graph: torch op by op ("eager"), or compiled by inductor."""
from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from autoshard import _torch
from autoshard.base.random import seeded, seeded_op
from autoshard.errors import UsageError
from autoshard.lower.lifetimes import Lifetimes
from autoshard.lower.passes.in_place import overwrite
from autoshard.lower.passes.linear import join_linears, join_sums
from autoshard.program.opaque.opaque import opaque_of
from autoshard.rules.ops import rms_norm
from autoshard.runtime.carriers.choose import carry
from autoshard.runtime.execute.compiler_ops import enclose
from autoshard.runtime.execute.eager import straight


def as_run(graph: torch.fx.Graph) -> torch.fx.Graph:
    """A local graph as the eager backend runs it, but for what carries its collectives, and op by op where that joins some: over memory
    that is free. `verify` runs this, and names the op that is wrong."""
    out = torch.fx.Graph()
    values: dict[torch.fx.Node, torch.fx.Node] = {}
    for node in graph.nodes:  # a copy with every node's name and meta, the output's too
        values[node] = out.node_copy(node, values.__getitem__)
    overwrite(out)
    return out


def eager(module: torch.fx.GraphModule, name: str) -> Callable[[list[Any]], Sequence[torch.Tensor]]:
    """Op by op, over memory that is free where possible. Values die at their last use, arguments too."""
    join_linears(module.graph)
    join_sums(module.graph)
    lifetimes = Lifetimes.of(module.graph)
    overwrite(module.graph, lifetimes)
    carry(module.graph, module.meta.get("carriers", {}))
    return straight(module.graph, name, lifetimes)


def inductor(module: torch.fx.GraphModule, name: str) -> Callable[[list[Any]], Sequence[torch.Tensor]]:
    """Forward and backward are compiled each on its own: inductor fuses, and cannot change what is saved.

    Random ops on several ranks stay as they are in the eager backend, with the same numbers."""
    for node in module.graph.nodes:
        if whole := opaque_of(node):
            raise UsageError(f"{whole.shared.label} runs whole, as the Python it is, which backend='inductor' cannot compile; use "
                             "backend='eager'")
    enclose(module.graph, module.meta.get("carriers", {}))
    seeds = _seeds_as_tensors(module.graph)
    module.recompile()
    compiled: list[Any] = []

    def call(arguments: list[Any]) -> Sequence[torch.Tensor]:
        for i in seeds:
            arguments[i] = torch.tensor(arguments[i])
        if not compiled:  # at the first call, when strides and devices are known
            compiled.append(_torch.compile_with_inductor(module, arguments, DECOMPOSED))
        return compiled[0](arguments)

    return call


def _scaled_before(x: Any, y: Any, *, alpha: Any = 1) -> Any:
    """`add(x, y, alpha=0.1)`. Of a product `x @ y` inductor of torch 2.13 makes `addmm`, and leaves the factor out, without an error."""
    return NotImplemented if alpha == 1 else x + y * alpha


DECOMPOSED = {**rms_norm.DECOMPOSED, torch.ops.aten.add.Tensor: _scaled_before}


def _seeds_as_tensors(graph: torch.fx.Graph) -> tuple[int, ...]:
    """Make random ops take their seed as a tensor; returns the positions of the arguments that are seeds."""
    seeds = set()
    for node in graph.nodes:
        if node.target is seeded:
            op, seed, *rest = node.args
            node.target, node.args = seeded_op(op), (seed, *rest)
            seeds.add(seed)
    return tuple(i for i, n in enumerate(n for n in graph.nodes if n.op == "placeholder") if n in seeds)


BACKENDS = {"eager": eager, "inductor": inductor}


def backend_of(name: str) -> Callable[[torch.fx.GraphModule, str], Callable[[list[Any]], Sequence[torch.Tensor]]]:
    if name not in BACKENDS:
        raise UsageError(f"backend={name!r} is not one of {', '.join(BACKENDS)}")
    return BACKENDS[name]
