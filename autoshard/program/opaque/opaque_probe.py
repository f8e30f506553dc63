"""Records submodules in a trace as one opaque op each (program/opaque/opaque.py), and probes their outputs and effects.

Two runs on made-up values that take different branches: a trace of the submodule alone, and where that fails a real run on
random data.
"""
from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from autoshard import _torch
from autoshard._torch import pytree
from autoshard.base.graph import Graph, TensorMeta
from autoshard.base.roles import Role
from autoshard.errors import TraceError, UsageError
from autoshard.program.calling import TensorLeaf, Traced
from autoshard.program.opaque.opaque import Frame, Opaque, Outcome, Shared, plain, shape_text
from autoshard.program.taken import dense_buffers
from autoshard.program.tracing.tape import Tape, is_random, meta_of
from autoshard.rules import registry
from autoshard.seeds.marks import calls_collectives

VARIANTS = 2
MOST_BYTES = 1 << 30
"""Of weights and inputs in a real run on made-up values."""


class CannotRunWhole(TraceError):
    """A submodule cannot be one op. `caller`: path of the module that calls it."""

    def __init__(self, text: str, path: str, caller: str) -> None:
        super().__init__(text)
        self.path, self.caller = path, caller


class _Node(torch.autograd.Function):
    """Both ops in one trace. `record(target, tensors)` writes an op down and gives its results."""

    @staticmethod
    def forward(ctx: Any, shared: Shared, record: Callable[..., list[torch.Tensor]], *tensors: torch.Tensor) -> Any:
        n = len(tensors) - len(shared.frame.buffers)
        kept = [_torch.unwrap(t) for t in tensors[n:]]  # as they are now: the model may write them before backward
        outs = record(Opaque(shared, False), tensors)
        outcome, users = shared.outcome, len(shared.outcome.outputs)
        state = outs[len(outs) - 1:] if outcome.random else []
        ctx.save_for_backward(*tensors[:n], *state)
        ctx.shared, ctx.record, ctx.buffers, ctx.n, ctx.total = shared, record, kept, n, len(tensors)
        ctx.mark_non_differentiable(*(t for i, t in enumerate(outs) if i >= users or i not in outcome.tangents))
        return tuple(outs)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        outcome, saved = ctx.shared.outcome, ctx.saved_tensors
        given = [*saved[:ctx.n], *ctx.buffers, *saved[ctx.n:], *(gradients[i] for i in outcome.tangents)]
        found = dict(zip(ctx.shared.grads, ctx.record(Opaque(ctx.shared, True), given), strict=True))
        return (None, None, *(found.get(i) for i in range(ctx.total)))


@dataclass(eq=False)
class Runner:
    """Runs submodules of one trace whole. `alone(module, args, kwargs, training, variant)` traces one on made-up values."""

    tape: Tape
    recorder: Any
    alone: Callable[..., Traced]
    copy: Callable[[nn.Module, dict[int, Any]], nn.Module]
    _known: dict[Any, Shared] = field(default_factory=dict)

    def forward(self, path: str, original: nn.Module, twin: nn.Module) -> Callable[..., Any]:
        """A forward for `twin` that makes one op of it. Raises CannotRunWhole when called."""
        return lambda *args, **kwargs: self._call(path, original, twin, args, kwargs)

    def _call(self, path: str, original: nn.Module, twin: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        flat, spec = pytree.tree_flatten((args, dict(kwargs)))
        inputs = [v for v in flat if isinstance(v, torch.Tensor)]
        order = iter(range(len(inputs)))
        leaves = tuple(TensorLeaf(next(order)) if isinstance(v, torch.Tensor) else v for v in flat)
        params, buffers = dict(twin.named_parameters()), dict(dense_buffers(twin))
        tensors = [*inputs, *params.values(), *buffers.values()]
        training = torch.is_grad_enabled() and any(t.requires_grad for t in tensors)
        key = (path, spec, tuple(map(repr, leaves)), tuple((meta_of(t), t.requires_grad) for t in tensors), training)
        if key not in self._known:
            try:
                with _torch.no_modes(), torch.autograd.graph.saved_tensors_hooks(_as_it_is, _as_it_is):  # a checkpoint counts
                    self._known[key] = self._shared(path, original, twin, spec, leaves, inputs, training)
            except (TraceError, UsageError) as e:
                stack = self.tape.modules
                raise CannotRunWhole(f"{path or 'the model'} cannot run whole: {e}", path, stack[-2] if len(stack) > 1 else "") from None
        shared = self._known[key]
        outs = list(_Node.apply(shared, self._record, *tensors))
        for name, new in zip(shared.outcome.written, outs[len(shared.outcome.outputs):], strict=False):
            with torch.no_grad():
                buffers[name].copy_(new)
        return pytree.tree_unflatten([outs[v.index] if isinstance(v, TensorLeaf) else v for v in shared.outcome.leaves], shared.outcome.spec)

    def _record(self, target: Opaque, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        fakes = tuple(_torch.unwrap(t) for t in tensors)
        made = [meta_of(fakes[i]) for i in target.shared.grads] if target.backward else target.outputs
        results = [self.recorder.empty(m.shape, m.dtype) for m in made]
        if self.tape.record(target, target.__name__, fakes, {}, results) and (target.shared.outcome.random or target.shared.outcome.written):
            raise TraceError(f"{target.shared.label} runs whole inside torch.utils.checkpoint, and draws random numbers or writes buffers; "
                             "leave it out of the checkpoint")
        return [_torch.functional(r) for r in results]

    def _shared(self, path: str, original: nn.Module, twin: nn.Module, spec: Any, leaves: tuple[Any, ...],
                inputs: Sequence[torch.Tensor], training: bool) -> Shared:
        module = self.copy(original, _without_data(original, twin))
        names = [n for n, _ in module.named_parameters()], [n for n, _ in dense_buffers(module)]
        autocast = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None
        frame = Frame(module, spec, leaves, len(inputs), *map(tuple, names), autocast)
        found = [self._outcome(frame, inputs, training, variant) for variant in range(VARIANTS)]
        buffers = tuple(meta_of(b) for _, b in dense_buffers(module))
        outcome = _merged(found)
        stored = [*inputs, *module.parameters()]
        grads = tuple(i for i, t in enumerate(stored) if t.requires_grad) if outcome.tangents else ()
        return Shared(path, frame, outcome, grads, buffers)

    def _outcome(self, frame: Frame, inputs: Sequence[torch.Tensor], training: bool, variant: int) -> Outcome:
        stand_ins = [_on_meta(t) for t in inputs]
        args, kwargs = pytree.tree_unflatten([stand_ins[v.index] if isinstance(v, TensorLeaf) else v for v in frame.leaves], frame.in_spec)
        try:
            return _of_trace(self.alone(frame.module, args, kwargs, training, variant), frame)
        except TraceError as e:
            return _of_run(frame, stand_ins, training, variant, e)


def _as_it_is(t: torch.Tensor) -> torch.Tensor:
    return t


def _without_data(original: nn.Module, twin: nn.Module) -> dict[int, torch.Tensor]:
    """Meta tensors for the weights of a module, in the dtypes that its twin has in the trace."""
    memo: dict[int, torch.Tensor] = {}
    for ours, theirs in ((original.named_parameters(), twin.named_parameters()), (dense_buffers(original), dense_buffers(twin))):
        for (_, old), (_, now) in zip(ours, theirs, strict=True):
            new = torch.empty(now.shape, dtype=now.dtype, device="meta")
            memo[id(old)] = nn.Parameter(new, now.requires_grad) if isinstance(old, nn.Parameter) else new
    return memo


def _on_meta(t: torch.Tensor) -> torch.Tensor:
    return torch.empty(t.shape, dtype=t.dtype, device="meta").requires_grad_(t.requires_grad)


def _of_trace(traced: Traced, frame: Frame) -> Outcome:
    graph = traced.graph
    if calls_collectives(graph):
        raise UsageError("it calls collectives, which would run on whole tensors; take them out of it")
    users, written = [graph.meta(op.refs[0]) for op in graph.outputs(Role.USER).values()], graph.outputs(Role.MUTATION)
    calls = graph.of_kind("call")
    return Outcome(traced.calling.out_spec, traced.calling.out_leaves, tuple(TensorMeta(m.shape, m.dtype) for m in users),
                   tuple(op.target for op in graph.of_kind("tangent")), tuple(n for n in frame.buffers if n in written),
                   any(is_random(op.target) for op in calls), tuple((op.phase, graph.calls[op.name]) for op in calls),
                   (_peak(graph, "forward"), _peak(graph, "backward")))


def _peak(graph: Graph, until: str) -> int:
    """Most bytes of values made by calls that are alive together; views count as memory of their own."""
    ops = [op for op in graph.of_kind("call") if until == "backward" or op.phase == "forward"]
    last = {ref: i for i, op in enumerate(ops) for ref in op.refs}
    ends: dict[int, int] = {}
    live = most = 0
    for i, op in enumerate(ops):
        for index, meta in enumerate(op.outputs):
            if meta is not None and not registry.is_view(op):
                live += meta.nbytes
                end = next((last[r] for r in last if r.op == op.name and r.index == index), i)
                ends[end] = ends.get(end, 0) + meta.nbytes
        most = max(most, live)
        live -= ends.pop(i, 0)
    return most


def _of_run(frame: Frame, inputs: Sequence[torch.Tensor], training: bool, variant: int, why: TraceError) -> Outcome:
    """What a real run on random data shows: for code that needs data, or that fake tensors cannot run. Its price is unknown."""
    stored = [*inputs, *frame.module.parameters(), *(b for _, b in dense_buffers(frame.module))]
    if sum(t.nbytes for t in stored) > MOST_BYTES:
        raise why
    with torch.random.fork_rng(devices=()), torch.set_grad_enabled(training):
        torch.manual_seed(variant)
        tensors = [_made_up(t, variant).requires_grad_(t.requires_grad and training) for t in stored]
        state = torch.get_rng_state()
        try:
            flat, spec, written = frame.call(tensors)
        except Exception as e:
            raise TraceError(f"{why}; run on made-up data, it raised {type(e).__name__}: {str(e)[:200]}") from None
        random = not torch.equal(state, torch.get_rng_state())
        outs = [v for v in flat if isinstance(v, torch.Tensor)]
        tangents = tuple(i for i, t in enumerate(outs) if t.requires_grad)
    order = iter(range(len(outs)))
    leaves = tuple(TensorLeaf(next(order)) if isinstance(v, torch.Tensor) else v for v in flat)
    return Outcome(spec, leaves, tuple(map(meta_of, outs)), tangents, tuple(written), random)


def _made_up(t: torch.Tensor, variant: int) -> torch.Tensor:
    if t.is_floating_point() or t.is_complex():
        return torch.randn(t.shape, dtype=t.dtype)
    return torch.full(t.shape, variant == 0 if t.dtype is torch.bool else 0, dtype=t.dtype)


def _merged(found: Sequence[Outcome]) -> Outcome:
    """What all runs together show. Raises TraceError when they return different things."""
    first = max(found, key=lambda o: len(o.inside))
    for other in found:
        if (other.spec, other.outputs, plain(other.leaves)) != (first.spec, first.outputs, plain(first.leaves)):
            raise TraceError(f"what it returns depends on the data of its inputs: {[shape_text(m) for m in first.outputs]} or "
                             f"{[shape_text(m) for m in other.outputs]}")
    if any(not is_plain(v) for v in plain(first.leaves)):
        raise TraceError("it returns something that is not a pytree of tensors and plain values")

    def union(name: str) -> tuple[Any, ...]:
        return tuple(sorted({v for o in found for v in getattr(o, name)}))

    return replace(first, tangents=union("tangents"), written=union("written"), random=any(o.random for o in found),
                   peak=tuple(map(max, zip(*(o.peak for o in found), strict=True))))


def is_plain(value: Any) -> bool:
    """Whether a leaf of a result can be part of the graph."""
    return value is None or isinstance(value, (bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size))
