"""Run a local graph for all ranks in one process: node by node, a list with the value of every rank.

Ranks whose arguments are the same objects share the result, so what a plan replicates is computed once. That
is no loss: an op is a function of its arguments, and random ops take their seed as one.
"""
from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from autoshard import _torch
from autoshard.base.mesh import Mesh
from autoshard.collectives import KIND_OF
from autoshard.lower.lifetimes import Lifetimes
from autoshard.lower.lower import LocalGraph, Port, makes_tensor_from_nothing
from autoshard.rules.device_kernels import on_device
from autoshard.verification.one_process.collectives import Ranked, run_collective


class OpFailed(Exception):
    """A node raised on some rank."""

    def __init__(self, node: torch.fx.Node, error: Exception) -> None:
        super().__init__(str(error))
        self.node = node


Watch = Callable[[torch.fx.Node, Ranked], None]


def run_ranks(local: LocalGraph, mesh: Mesh, given: Mapping[Port, Ranked], device: torch.device,
              watch: Watch = lambda node, value: None) -> dict[Port, Ranked]:
    """What the graph gives, by port. `given` has the local tensors of every port it takes but coordinates;
    `watch` sees every node with its values. Values are dropped after their last use. Raises OpFailed."""
    values: dict[torch.fx.Node, Ranked] = {}
    dead_after = Lifetimes.of(local.graph).dead_after
    ports = iter(local.takes)
    with torch.no_grad():
        for node in local.graph.nodes:
            if node.op == "output":
                return dict(zip(local.gives, (values[n] for n in node.args[0]), strict=True))
            values[node] = _placeholder(next(ports), given, mesh) if node.op == "placeholder" else _run(node, values, mesh, device)
            watch(node, values[node])
            for dead in dead_after.get(node, ()):
                del values[dead]
    raise AssertionError("an FX graph ends with its output node")


def _placeholder(port: Port, given: Mapping[Port, Ranked], mesh: Mesh) -> Ranked:
    if port.kind == "coord":
        axis = mesh.index(port.name)
        return [mesh.coordinates(r)[axis] for r in range(mesh.size)]
    return given[port]


def _run(node: torch.fx.Node, values: Mapping[torch.fx.Node, Ranked], mesh: Mesh, device: torch.device) -> Ranked:
    try:
        return _call(node, values, mesh, device)
    except (RuntimeError, TypeError, ValueError, IndexError) as e:
        raise OpFailed(node, e) from e


def _call(node: torch.fx.Node, values: Mapping[torch.fx.Node, Ranked], mesh: Mesh, device: torch.device) -> Ranked:
    if node.target is _torch.WAIT or node.target in KIND_OF:
        rest = [torch.fx.node.map_arg(node.args[1:], lambda n: values[n][rank]) for rank in range(mesh.size)]  # noqa: B023
        return run_collective(node.target, values[node.args[0]], rest, mesh)
    target, extra = on_device(node.target, device), {"device": device} if makes_tensor_from_nothing(node) else {}
    ranks = {tuple(_identity(values[n][rank]) for n in node.all_input_nodes): rank for rank in reversed(range(mesh.size))}
    found = {key: torch.fx.node.map_arg((node.args, node.kwargs), lambda n: values[n][rank]) for key, rank in ranks.items()}  # noqa: B023
    if _writes(node.target):
        found = _apart(found)
    done = {key: target(*args, **kwargs, **extra) for key, (args, kwargs) in found.items()}
    return [done[tuple(_identity(values[n][rank]) for n in node.all_input_nodes)] for rank in range(mesh.size)]


def _writes(target: Any) -> bool:
    """Whether an op writes its result over its first argument."""
    return isinstance(target, torch._ops.OpOverload) and target._schema.is_mutable or getattr(target, "writes_first", False)


def _apart(found: Mapping[tuple[Any, ...], Any]) -> dict[tuple[Any, ...], Any]:
    """Arguments for an op that writes over the first: ranks that share that tensor, and not the others, get one each."""
    seen: set[int] = set()
    out = {}
    for key, ((first, *rest), kwargs) in found.items():
        out[key] = ((first.clone() if id(first) in seen else first, *rest), kwargs)
        seen.add(id(first))
    return out


def _identity(value: Any) -> Any:
    return value if isinstance(value, int) else id(value)
