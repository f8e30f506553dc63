"""Model + example inputs -> Graph. Tries the modes that library code may run in; where none gives one graph, says all places why,
or lets submodules run whole. What one trace is: see one_trace.py."""
from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from autoshard._torch import pytree
from autoshard.base.graph import Graph, TensorMeta
from autoshard.base.precision import Precision
from autoshard.errors import TraceError
from autoshard.experts.capacity import EXPERT_CAPACITY
from autoshard.program.around import own_hooks
from autoshard.program.calling import Traced
from autoshard.program.known_ranges import with_known_ranges
from autoshard.program.opaque.opaque_probe import CannotRunWhole
from autoshard.program.order_of_use import in_order_of_use
from autoshard.program.simplify import simplify
from autoshard.program.taken import check_taken, dense_buffers
from autoshard.program.tracing.any_size import AnySize
from autoshard.program.tracing.one_trace import OneTrace
from autoshard.program.tracing.survey import ReadsData, Survey
from autoshard.rules.factors import factor_graph
from autoshard.rules.outside import find_packages
from autoshard.rules.part_dims import with_parts

MODES = ("eager", "compiling", "exporting")


def trace(model: nn.Module, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None, *,
          loss_fn: Callable[..., Any] | None = None, training: bool | None = None,
          precision: Precision | None = None, marks: Mapping[str, str] | None = None, fallback: str = "error", hooks_run: bool = False,
          raw: bool = False, stored: Mapping[str, TensorMeta] | None = None, expert_capacity: float = EXPERT_CAPACITY,
          any_size: AnySize | None = None, without: Collection[str] = ()) -> Traced:
    """Trace `model(*args, **kwargs)`, or `loss_fn(model(*args[:-1], **kwargs), args[-1])`, to its canonical graph: simplified, with the factors and
    parts of every dim (`stored`: parameters that have theirs already); `raw`: as it was recorded. Arguments are bound as Python does; the
    target may also be given by the name that only `loss_fn` has.

    Weights and inputs may be real, meta, fake or DTensors; only shapes and dtypes are read and the model is
    left as it is. `training` asks for the backward pass (default: gradients are enabled and some parameter
    is trainable or some input requires a gradient); dropout and batch norm follow `model.training`. The autocast context around the call holds
    for the forward. `marks` (glob over module paths -> seed text) hold what leaves these modules as
    `autoshard.annotate` would. Outputs that need a gradient get a tangent; of a mapping with a scalar "loss" only the loss.
    `hooks_run`: gradient hooks of parameters run outside of the graph, as those of a compiled module do; else they are refused.
    `expert_capacity`: see experts/ops.py. `any_size`: see tracing/any_size.py. `without`: paths of submodules of a list that the model is traced
    without, to learn about the others.
    `fallback="replicate"`: a submodule that cannot be traced becomes one op, which runs it whole (see program/opaque/opaque.py).

    Raises UsageError for a call that `forward` or `loss_fn` does not take, and TraceError, naming the user's lines, for
    data-dependent control flow and what else cannot be one graph: all places at once, as far as they can be found.
    """
    find_packages()
    check_taken(model)
    if training is None:
        inputs = [t for t in pytree.tree_leaves((args, dict(kwargs or {}))) if isinstance(t, torch.Tensor)]
        training = torch.is_grad_enabled() and any(t.requires_grad for t in (*model.parameters(), *inputs))

    def run(whole: Collection[str], survey: Survey | None = None, mode: str = MODES[-1]) -> Traced:
        with torch.random.fork_rng(devices=()), own_hooks():
            return OneTrace(model, args, kwargs or {}, loss_fn, training, precision, marks or {}, whole, survey,
                            mode=mode, hooks_run=hooks_run, expert_capacity=expert_capacity, any_size=any_size, without=without).traced()

    if any_size is not None or without:  # as most models are traced; a program that is not the same is no use, so nothing else is tried
        found = run((), mode=MODES[0])
    else:
        found = _with_fallback(run) if fallback == "replicate" else _surveyed(run, ())
    if raw:
        return found
    graph = simplify(with_known_ranges(in_order_of_use(found.graph), found.calling.constants))
    return Traced(_with_idle(with_parts(factor_graph(graph), stored), model), found.calling)


def _with_idle(graph: Graph, model: nn.Module) -> Graph:
    """With the bytes of what the model stores and the graph does not read."""
    def unread(kind: str, tensors: Iterable[tuple[str, torch.Tensor]]) -> int:
        read = {op.target for op in graph.of_kind(kind)}
        return sum(t.numel() * t.element_size() for name, t in tensors if name not in read)

    return replace(graph, idle=(unread("param", model.named_parameters()), unread("buffer", dense_buffers(model))))


def _surveyed(run: Callable[..., Traced], whole: Collection[str]) -> Traced:
    """One trace; where it fails, another that finds out where else it would. Raises NotOneGraph.

    First the model runs as in eager mode. Library code that looks at data may leave that out while a model is compiled or
    exported, and some computes other things then, so these come later."""
    refused: dict[str, TraceError] = {}
    for mode in MODES:
        try:
            return run(whole, mode=mode)
        except TraceError as e:
            if isinstance(e, CannotRunWhole) and mode == MODES[-1]:
                raise
            refused[mode] = e
    # a mode in which the model raises something else may be one that its library never runs it in
    mode = next((m for m in reversed(MODES) if isinstance(refused[m], ReadsData)), MODES[-1])
    survey = Survey()
    try:
        run(whole, survey, mode)
    except TraceError as last:
        survey.end(last)
    raise NotOneGraph(survey.message(refused[mode]), survey.modules) from None


def _with_fallback(run: Callable[..., Traced]) -> Traced:
    """Trace with ever more submodules run whole, until the rest is one graph."""
    whole: frozenset[str] = frozenset()
    while True:
        try:
            return _surveyed(run, whole)
        except CannotRunWhole as e:
            more, why = (whole - {e.path}) | {e.caller}, e
        except NotOneGraph as e:
            more, why = whole | e.modules - {""}, e  # what is left of the model's own may come of its submodules
        if "" in more or more == whole:
            raise TraceError(f'{why}\n  fallback="replicate" runs submodules whole, and this is in the model itself or its loss; '
                             "move it into a submodule") from None
        whole = more


class NotOneGraph(TraceError):
    """`modules`: paths of the submodules with what cannot be traced, "" for the model itself."""

    def __init__(self, text: str, modules: frozenset[str]) -> None:
        super().__init__(text)
        self.modules = modules
