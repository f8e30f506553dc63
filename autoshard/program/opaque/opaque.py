"""A submodule as one opaque op of the graph: code that cannot be traced runs as Python, unsharded, on every rank.

`Opaque` is the target of two ops. Forward takes the submodule's tensor inputs, parameters and buffers and gives its outputs
and the buffers it wrote. Backward takes the same and the gradients of the outputs, recomputes the submodule under autograd, and gives
the gradients; so nothing but the inputs lives from forward to backward. Random numbers are drawn from the state of the generator
that forward saved, so they are the same.

What the op looks like was found by runs on made-up values (program/opaque/opaque_probe.py). What a later call does beyond that (another shape,
a buffer written, numbers drawn) is refused when it happens.
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import nn

from autoshard import _torch
from autoshard._torch import pytree
from autoshard.base.graph import Call, TensorMeta
from autoshard.base.random import generator_of, seeded
from autoshard.errors import UsageError
from autoshard.program.calling import TensorLeaf
from autoshard.program.tracing.no_cache import without_decoding_cache
from autoshard.program.tracing.tape import meta_of
from autoshard.rules import registry
from autoshard.rules.family import Family
from autoshard.rules.types import Rule


@dataclass(frozen=True, eq=False)
class Frame:
    """How a submodule is called. `module`: a copy of it, without its weights; `params`, `buffers`: their names in it;
    `inputs`: how many tensors are passed."""

    module: nn.Module
    in_spec: Any
    leaves: tuple[Any, ...]
    inputs: int
    params: tuple[str, ...]
    buffers: tuple[str, ...]
    autocast: torch.dtype | None

    def call(self, tensors: Sequence[torch.Tensor]) -> tuple[list[Any], Any, dict[str, torch.Tensor]]:
        """(leaves of the result, its structure, buffers that were written) of a call on inputs, parameters, buffers.
        Raises UsageError when an input or a parameter is written in place."""
        inputs, rest = tensors[:self.inputs], tensors[self.inputs:]
        state = dict(zip(self.params, rest, strict=False))
        given = dict(zip(self.buffers, rest[len(self.params):], strict=True))
        before = {name: t.clone() for name, t in given.items()}
        versions = [t._version for t in tensors]
        args, kwargs = pytree.tree_unflatten([inputs[v.index] if isinstance(v, TensorLeaf) else v for v in self.leaves], self.in_spec)
        now, marks = {**state, **before}, {name: t._version for name, t in before.items()}
        device = tensors[0].device.type if tensors else "cpu"
        with torch.autocast(device, dtype=self.autocast, enabled=self.autocast is not None), without_decoding_cache(self.module):
            out = torch.func.functional_call(self.module, now, args, kwargs)
        if [t._version for t in tensors] != versions:
            raise UsageError(f"{type(self.module).__name__}, which runs whole, writes into an input or a parameter in place; write into a copy")
        written = {n: now[n] for n, t in before.items() if now[n] is not t or t._version != marks[n] or _differs(t, given[n])}
        flat, spec = pytree.tree_flatten(out)
        return flat, spec, written


def _differs(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether any value does. Batch norm writes its statistics without counting that as a write."""
    if isinstance(a, _torch.FakeTensor) or isinstance(b, _torch.FakeTensor):
        return False
    return not bool(((a == b) | ((a != a) & (b != b))).all())


@dataclass(frozen=True, eq=False)
class Outcome:
    """What a run on made-up values showed. `leaves`: the result with `TensorLeaf`s; `outputs`: its tensors; `tangents`: those
    with a gradient; `written`: buffers;
    `inside`: the calls it made, as (phase, call); `peak`: bytes that its own values took at most, forward and in all."""

    spec: Any
    leaves: tuple[Any, ...]
    outputs: tuple[TensorMeta, ...]
    tangents: tuple[int, ...] = ()
    written: tuple[str, ...] = ()
    random: bool = False
    inside: tuple[tuple[str, Call], ...] = ()
    peak: tuple[int, int] = (0, 0)


@dataclass(frozen=True, eq=False)
class Shared:
    """What both ops of one submodule know of it. `grads`: positions, among inputs and parameters, of what gets a gradient: all
    that could, and zeros where a call does not use it."""

    path: str
    frame: Frame
    outcome: Outcome
    grads: tuple[int, ...]
    buffers: tuple[TensorMeta, ...]

    def run(self, tensors: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
        """Tensors of the result, and the buffers that the outcome says are written. Raises UsageError for anything else."""
        flat, spec, written = self.frame.call(tensors)
        outs = [v for v in flat if isinstance(v, torch.Tensor)]
        others = tuple(v for v in flat if not isinstance(v, torch.Tensor))
        expected = self.outcome
        if (spec, others, [meta_of(t) for t in outs]) != (expected.spec, plain(expected.leaves), list(expected.outputs)):
            raise UsageError(f"{self.label} runs whole and returned {[shape_text(meta_of(t)) for t in outs]}, {others}, where the trace saw "
                             f"{[shape_text(m) for m in expected.outputs]}, {plain(expected.leaves)}; what it returns must not depend on data "
                             "but in value")
        if surplus := written.keys() - set(expected.written):
            raise UsageError(f"{self.label} runs whole and writes buffer {min(surplus)!r} on a path that no trace took; write it on "
                             "every path")
        state = dict(zip(self.frame.buffers, tensors[len(tensors) - len(self.frame.buffers):], strict=True))
        return outs, {name: written.get(name, state[name]) for name in expected.written}

    @property
    def label(self) -> str:
        return f"submodule {self.path} ({type(self.frame.module).__name__})"


@dataclass(frozen=True, eq=False)
class Opaque:
    """Target of an op. `backward`: gradients of the inputs and parameters that get one, instead of the outputs."""

    shared: Shared
    backward: bool

    @property
    def __name__(self) -> str:
        return f"whole_{'backward' if self.backward else 'forward'}"

    def __str__(self) -> str:
        return f"autoshard.{self.__name__}({self.shared.path}: {type(self.shared.frame.module).__name__})"

    __repr__ = __str__

    @property
    def tags(self) -> tuple[torch.Tag, ...]:
        draws = self.shared.outcome.random and not self.backward
        return (torch.Tag.nondeterministic_seeded,) if draws else ()

    @cached_property
    def rule(self) -> Rule:
        return Rule(rows=lambda call: (registry.all_replicate(call),), family=Family.RANDOM, origin="replicate")  # never recomputed

    @cached_property
    def inside(self) -> tuple[Call, ...]:
        """The calls whose prices add up to the price of this one: of the longer of the runs on made-up values."""
        return tuple(c for phase, c in self.shared.outcome.inside if self.backward or phase == "forward")

    @property
    def workspace(self) -> int:
        """Bytes it takes at most while it runs, beyond inputs and results: an estimate, from the same runs."""
        return self.shared.outcome.peak[self.backward]

    @property
    def outputs(self) -> tuple[TensorMeta, ...]:
        """Shapes and dtypes of what the op gives; backward's are those of what it differentiates."""
        shared, outcome = self.shared, self.shared.outcome
        buffers = dict(zip(shared.frame.buffers, shared.buffers, strict=True))
        written = [buffers[n] for n in outcome.written]
        state = [meta_of(torch.default_generator.get_state())] if outcome.random else []
        return (*outcome.outputs, *written, *state)

    def __call__(self, *tensors: Any) -> Any:
        if torch.overrides.has_torch_function(tensors):  # a graph is being written
            return torch.overrides.handle_torch_function(self, tensors, *tensors)
        if any(isinstance(t, _torch.FakeTensor) for t in tensors):
            made = [meta_of(tensors[i]) for i in self.shared.grads] if self.backward else self.outputs
            return tuple(torch.empty(m.shape, dtype=m.dtype) for m in made)
        return self._backward(tensors) if self.backward else self._forward(tensors)

    def _forward(self, tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        generator = generator_of(tensors)
        state = generator.get_state()
        with torch.no_grad():
            outs, written = self.shared.run(tensors)
        random = self.shared.outcome.random
        if not random and not torch.equal(state, generator.get_state()):
            raise UsageError(f"{self.shared.label} runs whole and draws random numbers on a path that no trace took; draw them on every path")
        return (*_fresh([*outs, *written.values()], tensors), *([state] if random else []))

    def _backward(self, tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        outcome, frame = self.shared.outcome, self.shared.frame
        n = frame.inputs + len(frame.params) + len(frame.buffers)
        stored, states, tangents = tensors[:n], tensors[n:n + outcome.random], tensors[n + outcome.random:]
        generator = generator_of(tensors)
        before = generator.get_state()
        leaves = [t.detach().requires_grad_(i in self.shared.grads) for i, t in enumerate(stored)]
        try:
            for state in states:
                generator.set_state(state)
            with torch.enable_grad():
                outs, _ = self.shared.run(leaves)
        finally:
            generator.set_state(before)
        if surplus := [i for i, t in enumerate(outs) if t.requires_grad and i not in outcome.tangents]:
            raise UsageError(f"{self.shared.label} runs whole and its output {surplus[0]} depends on a parameter on a path that no trace "
                             "took; detach it on every path or on none")
        pairs = [(outs[i], g) for i, g in zip(outcome.tangents, tangents, strict=True) if outs[i].requires_grad]
        wanted = [leaves[i] for i in self.shared.grads]
        found = torch.autograd.grad([o for o, _ in pairs], wanted, [g for _, g in pairs], allow_unused=True) if pairs else [None] * len(wanted)
        return tuple(_fresh([torch.zeros_like(t) if g is None else g for t, g in zip(wanted, found, strict=True)], tensors))


@dataclass(frozen=True, eq=False)
class SeededOpaque:
    """`seeded` for a submodule: on several ranks all draw the same numbers. Code that FX writes cannot have one as an argument."""

    whole: Opaque

    @property
    def __name__(self) -> str:
        return f"seeded_{self.whole.__name__}"

    def __call__(self, seed: int, salt: int, piece: int, *tensors: torch.Tensor) -> Any:
        if any(isinstance(t, _torch.FakeTensor) for t in tensors):
            return self.whole(*tensors)
        return seeded(self.whole, seed, salt, piece, *tensors)


def _fresh(outs: Sequence[torch.Tensor], taken: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Contiguous tensors of their own memory: the program may overwrite what it was given, and what this op gives."""
    known, out = {_torch.storage_key(t) for t in taken}, []
    for t in outs:
        t = t.detach().contiguous()
        if _torch.storage_key(t) in known:
            t = t.clone()
        known.add(_torch.storage_key(t))
        out.append(t)
    return out


def opaque_of(node: torch.fx.Node) -> Opaque | None:
    """The submodule that a node of a local graph runs, under a seed or not."""
    target = node.target.whole if isinstance(node.target, SeededOpaque) else node.target
    return target if isinstance(target, Opaque) else None


def plain(leaves: Sequence[Any]) -> tuple[Any, ...]:
    """What is no tensor of a flattened result."""
    return tuple(v for v in leaves if not isinstance(v, TensorLeaf))


def shape_text(meta: TensorMeta) -> str:
    """float32[4, 8]"""
    return f"{str(meta.dtype).removeprefix('torch.')}{list(meta.shape)}"
