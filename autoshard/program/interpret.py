"""Run a traced graph op by op on real tensors: the single-device reference of everything downstream."""
from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from autoshard.base.graph import Op, Ref, map_args
from autoshard.base.pads import with_pad, without_pad
from autoshard.base.roles import Role
from autoshard.errors import UsageError
from autoshard.program.calling import Traced, as_stored
from autoshard.rules.device_kernels import on_device

aten = torch.ops.aten
VIEWS = (aten.view.default, aten._unsafe_view.default)
Tangents = Mapping[int, torch.Tensor] | Callable[[Mapping[str, tuple[Any, ...]]], Mapping[int, torch.Tensor]]

Instead = Callable[[Op, tuple[Any, ...], int], "tuple[Any, ...] | None"]
"""An answer for (op, its tensor inputs, the micro-batch), or None."""


@dataclass(frozen=True, eq=False)
class Results:
    """Values of the output ops: `users[i]`, and by name gradients and the new values of mutated buffers."""

    users: tuple[torch.Tensor, ...]
    grads: Mapping[str, torch.Tensor]
    mutations: Mapping[str, torch.Tensor]


def run(traced: Traced, state: Mapping[str, torch.Tensor], args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None, tangents: Mapping[int, torch.Tensor] | None = None) -> Results:
    """Interpret the graph. `state` holds parameters and buffers by name; `tangents` the gradient of each
    user output that has a tangent (default: ones). Everything runs on the device of the inputs or state.

    Raises UsageError when `state` lacks a value or the call differs from the traced one."""
    return results_of(traced, values(traced, state, args, kwargs, tangents))


def values(traced: Traced, state: Mapping[str, torch.Tensor], args: tuple[Any, ...] = (),
           kwargs: Mapping[str, Any] | None = None, tangents: Mapping[int, torch.Tensor] | None = None,
           instead: Callable[[Op, tuple[Any, ...]], tuple[Any, ...] | None] = lambda op, inputs: None) -> dict[str, tuple[Any, ...]]:
    """Every value of the graph, by the name of the op that makes it. `instead(op, tensor inputs)` may answer for an op."""
    return values_of(traced, state, traced.calling.flatten(args, kwargs), tangents, instead)


def values_of(traced: Traced, state: Mapping[str, torch.Tensor], inputs: Sequence[torch.Tensor], tangents: Tangents | None = None,
              instead: Callable[[Op, tuple[Any, ...]], tuple[Any, ...] | None] = lambda op, inputs: None) -> dict[str, tuple[Any, ...]]:
    """`values` for the tensor inputs of the graph, which may be those of one micro-batch. `tangents` may be computed from the values before."""
    given = {f"input:{i}": t for i, t in enumerate(inputs)}
    state = {**traced.calling.constants, **state}
    device = next((t.device for t in (*inputs, *state.values())), torch.device("cpu"))
    found: dict[str, tuple[Any, ...]] = {}
    with torch.no_grad():
        for op in traced.graph.ops:
            if op.kind == "call":
                answer = instead(op, tuple(found[r.op][r.index] for r in op.refs))
                found[op.name] = call_op(op, found, device) if answer is None else answer
            elif op.kind != "output":
                if op.kind == "tangent" and callable(tangents):
                    tangents = tangents(found)
                found[op.name] = (_given(op, state, given, {} if tangents is None or callable(tangents) else tangents, device),)
    return found


def _given(op: Op, state: Mapping[str, torch.Tensor], inputs: Mapping[str, torch.Tensor],
           tangents: Mapping[int, torch.Tensor], device: torch.device) -> torch.Tensor:
    meta = op.outputs[0]
    if op.kind == "tangent":
        default = torch.ones(meta.shape, dtype=meta.dtype, device=device)
        return as_stored(tangents.get(op.target, default))
    source = inputs if op.kind == "input" else state
    if op.target not in source:
        raise UsageError(f"{op.kind} {op.target!r} has no value; pass it in state")
    return as_stored(with_pad(source[op.target].detach(), meta))


def call_op(op: Op, values: Mapping[str, tuple[Any, ...]], device: torch.device) -> tuple[Any, ...]:
    def value(leaf: Any) -> Any:
        return values[leaf.op][leaf.index] if isinstance(leaf, Ref) else leaf

    kwargs = {k: map_args(value, v) for k, v in op.kwargs}
    if isinstance(op.target, torch._ops.OpOverload) and not op.refs and any(a.name == "device" for a in op.target._schema.arguments):
        kwargs["device"] = device
    # a kernel may lay a result otherwise than the trace has it
    target = aten.reshape.default if op.target in VIEWS else on_device(op.target, device)
    result = target(*map_args(value, op.args), **kwargs)
    return tuple(result) if isinstance(result, (tuple, list)) else (result,)


def results_of(traced: Traced, values: Mapping[str, tuple[Any, ...]]) -> Results:
    """What the output ops hand out."""
    found = {role: {name: without_pad(values[op.refs[0].op][op.refs[0].index], traced.graph.meta(op.refs[0]))
                    for name, op in traced.graph.outputs(role).items()} for role in Role}
    return Results(tuple(found[Role.USER].values()), found[Role.GRADIENT], found[Role.MUTATION])
