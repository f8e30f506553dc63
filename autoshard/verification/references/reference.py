"""The results of the unsharded model: run by torch or, with random ops, its graph run with the random numbers of the ranks."""
from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import nn

from autoshard._torch import pytree
from autoshard.base.graph import Graph, Op
from autoshard.base.precision import Precision
from autoshard.base.roles import Role
from autoshard.program.calling import Traced
from autoshard.program.interpret import results_of, values
from autoshard.program.taken import dense_buffers
from autoshard.program.tracing.no_cache import without_decoding_cache
from autoshard.program.tracing.tape import is_random
from autoshard.program.tracing.twin import copy_tree
from autoshard.program.tracing.user_collectives import alone
from autoshard.verification.one_process.program import MakeOptimizer
from autoshard.verification.references.microbatches import OnOneDevice, key_of

aten = torch.ops.aten
Numbers = Mapping[str, tuple[torch.Tensor, ...]]
"""What the random ops drew, whole, by op name (of micro-batches: by `key_of`)."""


@dataclass(frozen=True, eq=False)
class Expected:
    """One step's results: user outputs, gradients, and buffers and written parameters by name. `values`: of every op, where known."""

    users: tuple[torch.Tensor, ...]
    grads: Mapping[str, torch.Tensor]
    buffers: Mapping[str, torch.Tensor]
    values: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)


class Reference(Protocol):
    """The unsharded model in training."""

    def step(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], numbers: Numbers) -> Expected: ...

    def update(self, make: MakeOptimizer) -> None: ...

    def weights(self) -> Mapping[str, torch.Tensor]: ...


class Eager:
    """The model itself, under torch's autograd. `precision`: casts where its values enter, as the policy says; `casting`: makes
    the autocast context of the forward pass."""

    def __init__(self, model: nn.Module, traced: Traced, loss_fn: Callable[..., Any] | None, precision: Precision | None = None,
                 casting: Callable[[], Any] = nullcontext) -> None:
        self.model, self.loss_fn, self.graph, self.binding = copy_tree(model, {}), loss_fn, traced.graph, traced.calling.binding
        self.precision, self.casting = precision, casting
        self.tangents = [op.target for op in traced.graph.of_kind("tangent")]
        self._optimizer: torch.optim.Optimizer | None = None

    def step(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], numbers: Numbers = {}) -> Expected:  # noqa: B006
        self.model.zero_grad()
        args, kwargs = pytree.tree_map(_fresh, (args, dict(kwargs)))
        # Without a cache, since backward may recompute parts of forward.
        with torch.set_grad_enabled(self.graph.training), alone(), self._cast(), without_decoding_cache(self.model):
            with self.casting():
                out = self._call(args, kwargs)
            users = [t for t in pytree.tree_leaves(out) if isinstance(t, torch.Tensor)]
            if self.tangents:
                torch.autograd.backward([users[i] for i in self.tangents], [torch.ones_like(users[i]) for i in self.tangents])
        inputs = [t for t in self.binding.flatten(args, kwargs)[0] if isinstance(t, torch.Tensor)]
        grads = {n: p.grad.clone() for n, p in self.model.named_parameters() if p.grad is not None}
        grads |= {f"input:{i}": t.grad for i, t in enumerate(inputs) if t.grad is not None}
        written = self.graph.outputs(Role.MUTATION)
        buffers = {n: b.detach().clone() for n, b in dense_buffers(self.model)}
        buffers |= {n: p.detach().clone() for n, p in self.model.named_parameters() if n in written}
        return Expected(tuple(u.detach() for u in users), grads, buffers)

    def _call(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        args, kwargs, target = self.binding.split(args, kwargs)
        out = self.model(*self._entering(args), **self._entering(kwargs))
        return out if self.loss_fn is None else self.loss_fn(out, *target)

    def _entering(self, tree: Any) -> Any:
        """Floating inputs in the policy's dtype."""
        return tree if self.precision is None else pytree.tree_map(
            lambda v: v.to(self.precision.compute) if isinstance(v, torch.Tensor) and v.is_floating_point() else v, tree)

    @contextmanager
    def _cast(self) -> Iterator[None]:
        """The model holds casts of its parameters and buffers meanwhile; buffers that it wrote are written back."""
        if self.precision is None:
            yield
            return
        kept = [(table, dict(table)) for m in self.model.modules() for table in (m._parameters, m._buffers)]
        self.precision.cast(self.model)
        before = {id(t): (t, t.clone()) for m in self.model.modules() for t in m._buffers.values() if t is not None}
        try:
            yield
        finally:
            for table, stored in kept:
                for key, t in stored.items():
                    now = table[key]
                    if t is None or now is t or isinstance(t, nn.Parameter):
                        continue
                    if id(now) not in before or not torch.equal(now, before[id(now)][1]):  # batch norms write without a new `_version`
                        t.copy_(now.detach())
                table.update(stored)

    def update(self, make: MakeOptimizer) -> None:
        if self._optimizer is None:
            self._optimizer = make([p for p in self.model.parameters() if p.requires_grad])
        self._optimizer.step()

    def weights(self) -> Mapping[str, torch.Tensor]:
        return dict(self.model.named_parameters())


class Interpreted:
    """The graph, op by op on whole tensors. Random ops repeat what the ranks drew."""

    def __init__(self, traced: Traced, state: Mapping[str, torch.Tensor]) -> None:
        self.traced = traced
        self.state = {n: t.detach().clone() for n, t in state.items()}
        self._params: dict[str, nn.Parameter] = {}
        self._optimizer: torch.optim.Optimizer | None = None
        self._grads: Mapping[str, torch.Tensor] = {}

    def step(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], numbers: Numbers) -> Expected:
        def instead(op: Op, inputs: tuple[Any, ...], m: int = 0) -> tuple[Any, ...] | None:
            key = key_of(self.traced.graph, op.name, m)
            return repeated(op, inputs, numbers[key]) if key in numbers else None

        if self.traced.graph.microbatches > 1:
            run = OnOneDevice(self.traced, self.state)
            run.run(self.traced.calling.flatten(args, kwargs), instead)
            self._grads = run.grads
            return Expected(tuple(run.results.finished()), run.grads, run.mutations, run.values)
        found = values(self.traced, self.state, args, kwargs, instead=instead)
        results = results_of(self.traced, found)
        self._grads = results.grads
        self.state.update({n: t.clone() for n, t in results.mutations.items()})  # the optimizer writes into parameters among them
        return Expected(results.users, results.grads, results.mutations, found)

    def update(self, make: MakeOptimizer) -> None:
        if self._optimizer is None:
            self._params = {n: nn.Parameter(self.state[n]) for n in self._grads if n in self.state}
            self._optimizer = make(list(self._params.values()))
        for name, p in self._params.items():
            p.data, p.grad = self.state[name], self._grads[name]
        self._optimizer.step()

    def weights(self) -> Mapping[str, torch.Tensor]:
        return {op.target: self.state[op.target] for op in self.traced.graph.of_kind("param")}


def repeated(op: Op, inputs: tuple[Any, ...], drawn: tuple[Any, ...]) -> tuple[Any, ...]:
    """A random op's outputs from numbers drawn elsewhere. Of dropout only the mask is taken as it is."""
    if op.target is aten.native_dropout.default:
        keep, p = drawn[1] if len(drawn) > 1 else drawn[0] != 0, op.args[1]  # where nobody reads the mask it is not kept
        scale = 0.0 if p == 1 else 1.0 / (1.0 - p)
        return inputs[0] * keep * scale, keep
    return drawn


def random_ops(graph: Graph) -> frozenset[str]:
    """Names of the ops that may draw numbers."""
    return frozenset(op.name for op in graph.of_kind("call") if is_random(op.target) and not _draws_nothing(op, graph))


def _draws_nothing(op: Op, graph: Graph) -> bool:
    """Attention without dropout."""
    return graph.calls[op.name].argument("dropout_p") == 0.0


def _fresh(leaf: Any) -> Any:
    return leaf.detach().clone().requires_grad_(leaf.requires_grad) if isinstance(leaf, torch.Tensor) else leaf
