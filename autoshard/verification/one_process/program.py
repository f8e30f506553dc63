"""A plan's lowered program with the weights of all ranks: one training step at a time, and the optimizer's update."""
from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from autoshard.base.graph import BACKWARD, FORWARD
from autoshard.base.plan import RECOMPUTE_SUFFIX, Plan
from autoshard.base.random import of_microbatch
from autoshard.base.roles import Role
from autoshard.base.spec import local_tensor_shape
from autoshard.base.windows import END, START
from autoshard.errors import LoweringError
from autoshard.lower.lower import LocalGraph, Port, lower
from autoshard.lower.schedule import schedule
from autoshard.pipeline.microbatches.results import Results, pieces_of
from autoshard.program.calling import Traced
from autoshard.recompute.rewrite import with_recompute
from autoshard.runtime.execute.backends import as_run
from autoshard.runtime.route import route_of
from autoshard.verification.one_process.collectives import Ranked
from autoshard.verification.one_process.pieces import Joined, cut, joined, seen
from autoshard.verification.one_process.ranks import OpFailed, Watch, run_ranks
from autoshard.verification.references.microbatches import loss_of

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
        self.traced, self.graph, self.plan, self.device = traced, with_recompute(traced.graph, plan.recompute), plan, device
        self.mesh = plan.spec_mesh
        lowered = lower(self.graph, plan, self.mesh, schedule(self.graph, plan, self.mesh, route_of(plan)))
        self.windows = {w.window: replace(w, graph=as_run(w.graph)) for w in lowered.windows}
        self.stage = self.microbatch = 0
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
        """Forward and backward under tangents of ones, of one micro-batch after the other if there are several. Buffers are written, weights
        stay until `update`. Raises LoweringError where an op cannot run on a rank's tensors."""
        tensors, graph = self.traced.calling.flatten(args, kwargs), self.graph
        results, given, outcome = Results(graph) if graph.microbatches > 1 else None, dict(self._accumulators()), dict[Port, Ranked]()
        for m in range(graph.microbatches):
            self.microbatch = m
            given |= self._inputs(pieces_of(graph, tensors, m), seed if results is None else of_microbatch(seed, m))
            for name, window in self.windows.items():
                if name == START and m or name == END and m < graph.microbatches - 1 or name == BACKWARD and not _counts(results):
                    continue
                sums = {Port("saved", port.name): value for port, value in given.items() if name == END and port.kind == "accumulator"}
                outcome |= (given_out := self._run(window, {**sums, **given}, watch))
                given |= {port: value for port, value in given_out.items() if port.kind == "saved"}
                given |= {port: given[Port("saved", port.name)] for port in given if port.kind == "accumulator" and name == BACKWARD}
                if name == FORWARD and results is not None:
                    self._weigh(results, m, given_out, given)
            for port in [p for p in outcome if p.kind == Role.MUTATION]:
                self._write(port.name, outcome[port])
        self._grads = {port.name: value for port, value in outcome.items() if port.kind == Role.GRADIENT}
        if results is not None and (factor := results.factor) is not None:
            for g in {id(g): g for pieces in self._grads.values() for g in pieces}.values():
                g.mul_(factor)
        return self._outcome(outcome, results)

    def _write(self, name: str, pieces: Ranked) -> None:
        """A new value: of a parameter into the pieces that there are, which an optimizer may have."""
        if f"param:{name}" not in self.graph.by_name:
            self.local[name] = pieces
            return
        for held, piece in zip(self.local[name], pieces, strict=True):
            held.copy_(piece)

    def whole_name(self, op: str) -> str | None:
        """What an op of the program is called in the graph as it was traced, without ops that are run again."""
        name = op if op in self.traced.graph.by_name else op.removesuffix(RECOMPUTE_SUFFIX)
        return name if name in self.traced.graph.by_name else None

    def _weigh(self, results: Results, m: int, forward: Mapping[Port, Ranked], given: dict[Port, Ranked]) -> None:
        """Take the results of a micro-batch, and set its tangent."""
        results.add(m, [j.whole for j in self._joined(Role.USER, forward).values()])
        loss = loss_of(self.graph)
        op = self.graph.op(f"tangent:{loss}")
        given[Port("tangent", loss)] = cut(results.tangent(loss).to(self.device), op.outputs[0], self.plan.ops[op.name].outputs[0], self.mesh)

    def _accumulators(self) -> Iterator[tuple[Port, Ranked]]:
        for port in (p for w in self.windows.values() for p in w.takes if p.kind == "accumulator"):
            meta = self.graph.meta(port.name.ref)
            zeros = torch.zeros(local_tensor_shape(meta, port.name.spec, self.mesh), dtype=meta.dtype, device=self.device)
            yield port, [zeros] * self.mesh.size

    def _run(self, local: LocalGraph, given: Mapping[Port, Ranked], watch: Watch) -> dict[Port, Ranked]:
        try:
            return run_ranks(local, self.mesh, given, self.device, watch)
        except OpFailed as e:
            part = e.node.meta.get("part")
            op = self.graph.op(part.name) if part is not None and part.kind == "compute" else None
            raise LoweringError(f"{op.where if op else e.node.format_node()} cannot run on the tensors of a rank: {e}") from e

    def weights(self) -> dict[str, Joined]:
        """Parameters by name, put together."""
        return {op.target: seen(joined(self.local[op.target], op.outputs[0], self.plan.ops[op.name].outputs[0], self.mesh), op.outputs[0])
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

    def _inputs(self, inputs: Sequence[torch.Tensor], seed: int) -> dict[Port, Ranked]:
        tensors = {f"input:{i}": t for i, t in enumerate(inputs)}
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

    def _outcome(self, outcome: Mapping[Port, Ranked], results: Results | None) -> Outcome:
        users = tuple(self._joined(Role.USER, outcome).values())
        if results is not None:
            users = tuple(Joined(t, users[0].disagreement) for t in results.finished())
        return Outcome(users, self._joined(Role.GRADIENT, outcome), self._joined(Role.MUTATION, outcome))

    def _joined(self, role: Role, outcome: Mapping[Port, Ranked]) -> dict[Any, Joined]:
        graph = self.graph
        return {name: seen(joined(outcome[Port(role, name)], graph.meta(op.refs[0]), self.plan.ops[op.name].inputs[0], self.mesh),
                           graph.meta(op.refs[0])) for name, op in graph.outputs(role).items()}


def _counts(results: Results | None) -> bool:
    return results is None or results.counts


def _own(pieces: Ranked) -> Ranked:
    """Copies; ranks that shared a piece share its copy."""
    copies: dict[int, torch.Tensor] = {}
    for p in pieces:
        if id(p) not in copies:
            copies[id(p)] = p.clone(memory_format=torch.contiguous_format)
    return [copies[id(p)] for p in pieces]
