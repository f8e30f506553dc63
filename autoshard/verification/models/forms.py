"""A program with its numbers in the dtypes of the model, and the same program in float64.

Of a program with bfloat16 or float32 in it only errors above their rounding can be seen. The same ops on the same
layouts in float64 show all that a plan does wrong.
"""
from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from autoshard.base.graph import Graph, Op, TensorMeta
from autoshard.pipeline.microbatches.results import pieces_of
from autoshard.program.calling import Traced
from autoshard.program.interpret import values_of
from autoshard.verification.models.copies import cast, default_dtype

WIDE = {torch.float16: torch.float64, torch.bfloat16: torch.float64, torch.float32: torch.float64, torch.complex64: torch.complex128}


@dataclass(frozen=True, eq=False)
class Form:
    """A program and one call of it. `state`: parameters and buffers by name; `dtype`: of what is made without one."""

    traced: Traced
    state: Mapping[str, torch.Tensor]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    dtype: torch.dtype

    @contextmanager
    def active(self) -> Iterator[None]:
        """Run its ops here: casts are ops of the graph already, so autocast is off."""
        with default_dtype(self.dtype), torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
            yield


def floats(graph: Graph) -> frozenset[torch.dtype]:
    """Every floating or complex dtype in a graph."""
    return frozenset(m.dtype for op in graph.ops for m in op.outputs if m is not None and (m.dtype.is_floating_point or m.dtype.is_complex))


def in_float64(form: Form) -> "Form | str":
    """The same ops in float64 (complex128), or why that cannot be run."""
    graph = form.traced.graph
    whole = next((op for op in graph.of_kind("call") if not isinstance(op.target, torch._ops.OpOverload)), None)
    if whole is not None:
        return f"{whole.where} runs the model's own code"
    calling = form.traced.calling
    traced = Traced(replace(graph, ops=tuple(map(_wide_op, graph.ops))), replace(
        calling, inputs=tuple(map(_wide_meta, calling.inputs)), constants={n: _wide_tensor(t) for n, t in calling.constants.items()}))
    args, kwargs = cast((form.args, dict(form.kwargs)), torch.float64)
    found = Form(traced, {n: _wide_tensor(t) for n, t in form.state.items()}, args, kwargs, torch.float64)
    return _obstacle(found) or found


def _obstacle(form: Form) -> str:
    """Runs it on one device."""
    with torch.random.fork_rng(devices=()), form.active():
        try:
            inputs = pieces_of(form.traced.graph, form.traced.calling.flatten(form.args, form.kwargs), 0)
            found = values_of(form.traced, form.state, inputs)
        except (RuntimeError, NotImplementedError) as e:
            return (str(e).strip().splitlines() or [type(e).__name__])[0][:200]
    for op in form.traced.graph.of_kind("call"):
        if any(m is not None and t is not None and m.dtype != t.dtype for t, m in zip(found[op.name], op.outputs, strict=True)):
            return f"{op.where} has no float64"
    return ""


def _wide_op(op: Op) -> Op:
    return replace(op.mapped(_wide), outputs=tuple(m and _wide_meta(m) for m in op.outputs))


def _wide(leaf: Any) -> Any:
    return WIDE.get(leaf, leaf) if isinstance(leaf, torch.dtype) else leaf


def _wide_meta(meta: TensorMeta) -> TensorMeta:
    return replace(meta, dtype=_wide(meta.dtype))


def _wide_tensor(t: torch.Tensor) -> torch.Tensor:
    return t.detach().to(_wide(t.dtype))
