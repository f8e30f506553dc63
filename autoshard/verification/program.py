"""A plan's lowered program with the weights of all ranks: one training step at a time, and the optimizer's update."""
from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from autoshard.base.plan import Plan
from autoshard.base.roles import Role
from autoshard.errors import LoweringError
from autoshard.lower.lower import LocalGraph, Port, lower
from autoshard.lower.schedule import schedule
from autoshard.program.calling import Traced
from autoshard.recompute.rewrite import with_recompute
from autoshard.runtime.execute.backends import as_run
from autoshard.runtime.route import route_of
from autoshard.verification.collectives import Ranked
from autoshard.verification.pieces import Joined, cut, joined
from autoshard.verification.ranks import OpFailed, Watch, run_ranks

MakeOptimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


@dataclass(frozen=True, eq=False)
class Outcome:
    """What one step hands out, put together: user outputs, gradients and new buffers by name."""

    users: tuple[Joined, ...]
    grads: Mapping[str, Joined]
    mutations: Mapping[str, Joined]


class Program:
    """`state`: parameters and buffers by name, whole; they are copied. Raises LoweringError."""

    def __init__(self, traced: Traced, plan: Plan, state: Mapping[str, torch.Tensor], device: torch.device) -> None:
        self.traced, self.graph, self.plan, self.mesh, self.device = traced, with_recompute(traced.graph, plan.recompute), plan, plan.mesh, device
        lowered = lower(self.graph, plan, self.mesh, schedule(self.graph, plan, self.mesh, route_of(plan)))
        self.forward, self.backward = (g and replace(g, graph=as_run(g.graph)) for g in (lowered.forward, lowered.backward))
        self.local: dict[str, Ranked] = {}
        everything = {**traced.calling.constants, **state}
        for op in self.graph.of_kind("param", "buffer"):
            whole = everything[op.target].detach().to(device)
            self.local[op.target] = _own(cut(whole, op.outputs[0], plan.ops[op.name].outputs[0], self.mesh))
        self._leaves: dict[str, dict[int, nn.Parameter]] = {}
        self._optimizer: torch.optim.Optimizer | None = None
        self._grads: dict[str, Ranked] = {}

    def step(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], seed: int,
             watch: Watch = lambda node, value: None) -> Outcome:
        """Forward and backward under tangents of ones. Buffers are written, weights stay until `update`. Raises LoweringError where an
        op cannot run on a rank's tensors."""
        given = self._inputs(args, kwargs, seed)
        forward = self._run(self.forward, given, watch)
        given |= {port: value for port, value in forward.items() if port.kind == "saved"}
        results = dict(forward)
        if self.backward is not None:
            backward = self._run(self.backward, given, watch)
            self._grads = {port.name: value for port, value in backward.items() if port.kind == Role.GRADIENT}
            results |= backward
        for port, value in forward.items():
            if port.kind == Role.MUTATION:
                self.local[port.name] = value
        return self._outcome(results)

    def _run(self, local: LocalGraph, given: Mapping[Port, Ranked], watch: Watch) -> dict[Port, Ranked]:
        try:
            return run_ranks(local, self.mesh, given, self.device, watch)
        except OpFailed as e:
            part = e.node.meta.get("part")
            op = self.graph.op(part.name) if part is not None and part.kind == "compute" else None
            raise LoweringError(f"{op.where if op else e.node.format_node()} cannot run on the tensors of a rank: {e}") from e

    def weights(self) -> dict[str, Joined]:
        """Parameters by name, put together."""
        return {op.target: joined(self.local[op.target], op.outputs[0], self.plan.ops[op.name].outputs[0], self.mesh)
                for op in self.graph.of_kind("param")}

    def update(self, make: MakeOptimizer) -> None:
        """One step of an optimizer that treats every element alike (SGD, Adam, ...): then pieces may be its parameters."""
        if self._optimizer is None:
            names = [n for n in self._grads if n in self.local]
            self._leaves = {n: {id(p): nn.Parameter(p) for p in self.local[n]} for n in names}
            self._optimizer = make([leaf for leaves in self._leaves.values() for leaf in leaves.values()])
        for name, leaves in self._leaves.items():
            for piece, grad in zip(self.local[name], self._grads[name], strict=True):
                leaves[id(piece)].grad = grad
        self._optimizer.step()

    def _inputs(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], seed: int) -> dict[Port, Ranked]:
        tensors = {f"input:{i}": t for i, t in enumerate(self.traced.calling.flatten(args, kwargs))}
        given: dict[Port, Ranked] = {Port("seed", ""): [seed] * self.mesh.size}
        for op in self.graph.of_kind("param", "buffer", "input", "tangent"):
            if op.kind in ("param", "buffer"):
                pieces = self.local[op.target]
            else:
                meta = op.outputs[0]
                whole = (tensors[op.target].detach().to(self.device) if op.kind == "input"
                         else torch.ones(meta.shape, dtype=meta.dtype, device=self.device))
                pieces = cut(whole, meta, self.plan.ops[op.name].outputs[0], self.mesh)
            given[Port(op.kind, op.target)] = pieces
        return given

    def _outcome(self, results: Mapping[Port, Ranked]) -> Outcome:
        found = {role: {name: joined(results[Port(role, name)], self.graph.meta(op.refs[0]), self.plan.ops[op.name].inputs[0], self.mesh)
                        for name, op in self.graph.outputs(role).items()} for role in Role}
        return Outcome(tuple(found[Role.USER].values()), found[Role.GRADIENT], found[Role.MUTATION])


def _own(pieces: Ranked) -> Ranked:
    """Copies; ranks that shared a piece share its copy."""
    copies: dict[int, torch.Tensor] = {}
    for p in pieces:
        if id(p) not in copies:
            copies[id(p)] = p.clone(memory_format=torch.contiguous_format)
    return [copies[id(p)] for p in pieces]
