"""What a verification runs: a copy of the model in the sharpest dtype it can do, and its graph."""
from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from autoshard.calling import Traced
from autoshard.errors import TraceError
from autoshard.graph import Graph
from autoshard.mesh import Mesh
from autoshard.plan import Plan
from autoshard.rules.factors import factor_graph
from autoshard.runtime.fits import check_fits
from autoshard.simplify import simplify
from autoshard.trace import trace
from autoshard.verify.copies import cast, default_dtype, own_copy
from autoshard.verify.reference import Eager

TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-5, torch.bfloat16: 5e-2, torch.float16: 1e-2}
"""By the least precise float of the graph."""
UPCAST = 1e-6
"""Where a float64 model computes some values in float32."""


@dataclass(frozen=True, eq=False)
class Call:
    """A model and how it is called. `marks`, `fallback`: as `trace` wants them."""

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    loss_fn: Callable[..., Any] | None
    training: bool | None
    marks: Mapping[str, str] = field(default_factory=dict)
    fallback: str = "error"

    def traced(self) -> Traced:
        found = trace(self.model, self.args, self.kwargs, loss_fn=self.loss_fn, training=self.training, marks=self.marks,
                      fallback=self.fallback)
        return Traced(factor_graph(simplify(found.graph)), found.calling)


@dataclass(frozen=True, eq=False)
class Subject:
    """What is run: a copy of the model and its call in `dtype`, and its graph."""

    call: Call
    traced: Traced
    dtype: torch.dtype
    tolerance: float
    device: torch.device
    notes: tuple[str, ...]

    @property
    def state(self) -> dict[str, torch.Tensor]:
        return {n: t.detach() for n, t in (*self.call.model.named_parameters(), *self.call.model.named_buffers())}


def subject_of(call: Call, plan: Plan | None, mesh: Mesh, dtype: torch.dtype | None) -> Subject:
    """In the first dtype that the model and the plan can do."""
    notes: list[str] = []
    original = call.traced().graph if plan is not None else None
    if plan is not None:
        check_fits(plan, original, mesh)
    for choice in (dtype,) if dtype else (torch.float64, torch.float32):
        try:
            found = _in_dtype(call, choice)
        except (TraceError, RuntimeError, NotImplementedError) as e:
            if dtype is not None or choice is torch.float32:
                raise
            notes.append(f"computed in float32, because float64 fails: {_first_line(e)}")
            continue
        if original is None or _same_ops(original, found.traced.graph):
            return replace(found, notes=tuple(notes))
        notes.append(f"the plan does not fit the model in {choice}: computed in the dtypes of the plan")
    return replace(_in_dtype(call, None), notes=tuple(notes[-1:]))


def _in_dtype(call: Call, dtype: torch.dtype | None) -> Subject:
    model, (args, kwargs) = own_copy(call.model, dtype), cast((call.args, dict(call.kwargs)), dtype)
    twin = replace(call, model=model, args=args, kwargs=kwargs)
    floats = [t.dtype for t in model.parameters() if t.is_floating_point()] or [torch.float32]
    used = dtype or min(floats, key=lambda d: -TOLERANCE.get(d, 1.0))
    with default_dtype(used):
        traced = twin.traced()
        Eager(model, traced, call.loss_fn).step(args, kwargs)  # whether torch can run it at all
    device = next((t.device for t in (*model.parameters(), *model.buffers())), torch.device("cpu"))
    return Subject(twin, traced, used, _tolerance(traced.graph, used), device, ())


def _tolerance(graph: Graph, dtype: torch.dtype) -> float:
    floats = {m.dtype for op in graph.ops for m in op.outputs if m is not None and m.dtype.is_floating_point}
    worst = max((TOLERANCE.get(d, 5e-2) for d in floats), default=0.0)
    return UPCAST if dtype is torch.float64 and worst == TOLERANCE[torch.float32] else max(worst, TOLERANCE[torch.float64])


def _same_ops(a: Graph, b: Graph) -> bool:
    """Whether a plan of one graph is one of the other: equal but for dtypes."""
    def shape(graph: Graph) -> list[Any]:
        return [(op.name, op.kind, str(op.target), op.refs, [m and (m.shape, m.factors) for m in op.outputs]) for op in graph.ops]

    return shape(a) == shape(b)


def _first_line(e: BaseException) -> str:
    return (str(e).strip().splitlines() or [type(e).__name__])[0][:200]
