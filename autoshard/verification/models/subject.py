"""What a verification runs: a copy of the model in the most precise dtype it supports, and its graph."""
from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from autoshard.base.graph import Graph
from autoshard.base.mesh import Mesh
from autoshard.base.plan import Plan
from autoshard.decide.options import Options
from autoshard.errors import TraceError
from autoshard.pipeline.microbatches import batch
from autoshard.program.calling import Traced
from autoshard.runtime.check_plan import check_fits
from autoshard.runtime.pipeline.check_stages import check_stages
from autoshard.verification.models.copies import cast, default_dtype, own_copy
from autoshard.verification.models.forms import Form, floats, in_float64
from autoshard.verification.references.numbers import Forerunners
from autoshard.verification.references.reference import Eager

TOLERANCE = {torch.float64: 1e-9, torch.complex128: 1e-9, torch.float32: 1e-5, torch.bfloat16: 5e-2, torch.float16: 1e-2}
"""By the least precise float of the graph, where its rounding cannot be measured."""


@dataclass(frozen=True, eq=False)
class Call:
    """A model, how it is called; `autocast`: the dtype, or None; `mesh`: that it is run on."""

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    loss_fn: Callable[..., Any] | None
    training: bool | None
    options: Options = field(default_factory=Options)
    autocast: torch.dtype | None = None
    mesh: Mesh | None = None

    def traced(self) -> Traced:
        return self.programs()[0]

    def programs(self) -> tuple[Traced, Forerunners]:
        """As ranks of the mesh run it, and what that was made of."""
        how = {"loss_fn": self.loss_fn, "training": self.training, "marks": self.options.marks, "fallback": self.options.fallback,
               "expert_capacity": self.options.expert_capacity, "pad": self.options.pad, "precision": self.options.precision}
        asked, pipeline = batch.Batch(self.model, self.args, self.kwargs, how), self.options.pipeline
        with self.casting():
            part = asked.cut(pipeline)
            return part if self.mesh is None else asked.on(self.mesh, pipeline), Forerunners(asked.whole, part)

    def casting(self) -> Any:
        """The autocast context that the model is called in."""
        return torch.autocast("cpu", dtype=self.autocast or torch.bfloat16, enabled=self.autocast is not None)

    def eager(self, traced: Traced) -> Eager:
        """The model itself, called so."""
        return Eager(self.model, traced, self.loss_fn, self.options.precision, self.casting)


@dataclass(frozen=True, eq=False)
class Subject:
    """What is run: a copy of the model in `dtype`, and its graph. `own`: the graph with its numbers; `exact`: the same ops in
    float64, where the graph has floats of less and its ops can do that; `before`: what the graph was made of; `tolerance`: of own numbers where
    they cannot."""

    call: Call
    own: Form
    before: Forerunners
    exact: Form | None
    dtype: torch.dtype
    tolerance: float
    device: torch.device
    notes: tuple[str, ...]

    @property
    def traced(self) -> Traced:
        return self.own.traced

    @property
    def rounds(self) -> bool:
        """Whether what is asked about is a program of low precision: then that one is run as well."""
        return self.exact is not None and self.dtype is not torch.float64

    @property
    def epsilon(self) -> float:
        """Of the least precise float of the graph."""
        return max(torch.finfo(d).eps for d in floats(self.traced.graph))


def subject_of(call: Call, plan: Plan | None, mesh: Mesh, dtype: torch.dtype | None) -> Subject:
    """In the first dtype that the model and the plan can do. A model that is called under a precision policy or autocast
    stays as it is: in float64 that would be another program."""
    notes: list[str] = []
    original = call.traced().graph if plan is not None else None
    if plan is not None:
        (check_fits if plan.pipeline is None else check_stages)(plan, original, mesh)
    as_it_is = call.options.precision is not None or call.autocast is not None
    for choice in () if as_it_is else (dtype,) if dtype else (torch.float64, torch.float32):
        try:
            found = _in_dtype(call, choice)
        except (TraceError, RuntimeError, NotImplementedError) as e:
            if dtype is not None or choice is torch.float32:
                raise
            notes.append(f"computed in float32, because float64 fails: {_first_line(e)}")
            continue
        if original is None or _same_ops(original, found.traced.graph):
            return replace(found, notes=(*notes, *found.notes))
        notes.append(f"the plan does not fit the model in {choice}: computed in the dtypes of the plan")
    found = _in_dtype(call, None)
    return replace(found, notes=(*notes[-1:], *found.notes))


def _in_dtype(call: Call, dtype: torch.dtype | None) -> Subject:
    model, (args, kwargs) = own_copy(call.model, dtype), cast((call.args, dict(call.kwargs)), dtype)
    if call.options.precision is not None:
        for p in model.parameters():
            p.data = p.data.to(call.options.precision.stored) if p.is_floating_point() else p.data
    twin = replace(call, model=model, args=args, kwargs=kwargs)
    present = [t.dtype for t in model.parameters() if t.is_floating_point()] or [torch.float32]
    used = dtype or min(present, key=lambda d: -TOLERANCE.get(d, 1.0))
    with default_dtype(used):
        traced, before = twin.programs()
        twin.eager(traced).step(args, kwargs)  # whether torch can run it at all
    device = next((t.device for t in (*model.parameters(), *model.buffers())), torch.device("cpu"))
    state = {n: t.detach() for n, t in (*model.named_parameters(), *model.named_buffers())}
    own = Form(traced, state, args, kwargs, used)
    exact = in_float64(own) if any(torch.finfo(d).eps > torch.finfo(torch.float64).eps for d in floats(traced.graph)) else None
    notes = (f"rounding could not be told from errors, because float64 fails: {exact}",) if isinstance(exact, str) else ()
    return Subject(twin, own, before, None if isinstance(exact, str) else exact, used, _tolerance(traced.graph), device, notes)


def _tolerance(graph: Graph) -> float:
    return max((TOLERANCE.get(d, 5e-2) for d in floats(graph)), default=TOLERANCE[torch.float64])


def _same_ops(a: Graph, b: Graph) -> bool:
    """Whether a plan of one graph is one of the other: equal but for dtypes."""
    def shape(graph: Graph) -> list[Any]:
        return [(op.name, op.kind, str(op.target), op.refs, [m and (m.shape, m.factors) for m in op.outputs]) for op in graph.ops]

    return shape(a) == shape(b)


def _first_line(e: BaseException) -> str:
    return (str(e).strip().splitlines() or [type(e).__name__])[0][:200]
