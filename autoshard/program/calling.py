"""How a call of the model maps to its graph: flattening arguments, rebuilding the result."""
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from autoshard._torch import pytree
from autoshard.base.graph import Graph, TensorMeta
from autoshard.errors import UsageError
from autoshard.program.binding import Binding, leaf_key


@dataclass(frozen=True)
class TensorLeaf:
    """Stands for tensor `index` of the inputs (or of the user outputs) in a flattened pytree."""

    index: int


@dataclass(frozen=True, eq=False)
class Calling:
    """How a call of the model maps to the graph.

    binding               how arguments are bound, in the trace and in every call
    leaves / out_leaves   flattened (args, kwargs) / result, with `TensorLeaf`s where tensors are; the other
                          leaves are baked into the graph and must be equal at every call
    inputs                shape and dtype of each tensor input;  names: where each comes from, for messages
    constants             "_constant_i" -> its data
    left_out              user outputs that have a gradient in the model and none here: all but the loss of a mapping with a scalar "loss"
    """

    binding: Binding
    in_spec: Any
    leaves: tuple[Any, ...]
    names: tuple[str, ...]
    inputs: tuple[TensorMeta, ...]
    out_spec: Any
    out_leaves: tuple[Any, ...]
    constants: Mapping[str, torch.Tensor] = field(default_factory=dict)
    left_out: frozenset[int] = frozenset()

    def flatten(self, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None = None) -> tuple[torch.Tensor, ...]:
        """The tensor inputs in graph order. Raises UsageError when the call differs from the traced one in
        structure, in a non-tensor argument, or in a shape or dtype."""
        flat, spec = self.binding.flatten(args, kwargs or {})
        if spec != self.in_spec:
            raise UsageError("the model was traced with other arguments: pass the same positional and keyword arguments")
        tensors = []
        for leaf, value in zip(self.leaves, flat, strict=True):
            if isinstance(leaf, TensorLeaf):
                self._check(leaf.index, value)
                tensors.append(value)
            elif isinstance(value, torch.Tensor) or not (leaf is value or leaf_key(leaf) == leaf_key(value)):
                raise UsageError(f"the model was traced with the argument {leaf!r} and is called with {value!r}; "
                                 "non-tensor arguments are part of the graph, trace again")
        return tuple(tensors)

    def _check(self, index: int, value: Any) -> None:
        want = self.inputs[index]
        if not isinstance(value, torch.Tensor) or tuple(value.shape) != want.shape or value.dtype != want.dtype:
            found = f"{tuple(value.shape)} {value.dtype}" if isinstance(value, torch.Tensor) else repr(value)
            raise UsageError(f"argument {self.names[index]} was traced as {want.shape} {want.dtype} and is now {found}")

    def unflatten(self, outputs: tuple[torch.Tensor, ...]) -> Any:
        """The model's result from the tensors of the graph's outputs to the user, in order."""
        if self.out_spec.is_leaf() and len(outputs) == 1:
            return outputs[0]
        leaves = [outputs[v.index] if isinstance(v, TensorLeaf) else v for v in self.out_leaves]
        return pytree.tree_unflatten(leaves, self.out_spec)


def as_stored(t: torch.Tensor) -> torch.Tensor:
    """What a graph takes: contiguous, and with its values in memory, where a conjugate may be a note on the tensor only."""
    return t.resolve_conj().resolve_neg().contiguous()


@dataclass(frozen=True, eq=False)
class Traced:
    """A graph and how to call it."""

    graph: Graph
    calling: Calling
