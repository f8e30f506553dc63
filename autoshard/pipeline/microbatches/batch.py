"""A step's batch in micro-batches: inputs are cut, the program is traced at one micro-batch, and proved to compute what the batch would.

`traced` is what planning, compiling and verifying trace with. For one micro-batch, and without gradients, it is the trace itself."""
from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cached_property, partial
from math import prod
from typing import Any

import torch
from torch import nn

from autoshard._torch import pytree
from autoshard.base.graph import Graph, Op, Ref
from autoshard.base.mesh import Mesh
from autoshard.base.roles import Output, Role
from autoshard.base.windows import CAT, JOIN, JOIN_DIM, MEAN, SAME, SUM, WEIGHTED, WEIGHTS, batch_dim_of
from autoshard.decide.pipeline_options import Pipeline
from autoshard.errors import TraceError, UsageError
from autoshard.padding.padded import WEIGHTS as PAD_WEIGHTS
from autoshard.padding.padded import padded
from autoshard.pipeline.microbatches.few_layers import made_from_one
from autoshard.pipeline.microbatches.known_sizes import made_between
from autoshard.pipeline.microbatches.one_row import as_the_batch
from autoshard.pipeline.microbatches.relations import Cut, Inexact, Relation, Rows, Same
from autoshard.pipeline.microbatches.walk import by_shape, only_checked, partners, walk
from autoshard.program.accumulate import accumulating
from autoshard.program.calling import Calling, Traced
from autoshard.program.trace import trace


def traced(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], pipeline: Pipeline, mesh: Mesh | None = None, **how: Any) -> Traced:
    """`program.trace.trace` of a step whose batch is cut as `pipeline` says, with the dims that are padded on `mesh`; `args` and `kwargs` are of
    the whole batch. Raises UsageError for a batch that does not divide, for a loss that is not in the graph, and for a model that computes
    something else on micro-batches."""
    asked = Batch(model, args, kwargs, how)
    return asked.cut(pipeline) if mesh is None else asked.on(mesh, pipeline)


@dataclass(frozen=True, eq=False)
class Batch:
    """A model with the batch of a step, which may be cut in several ways; `how`: the rest of what `program.trace.trace` takes, and `pad`: what is
    padded (padding/padded.py). `others`: batches of the same model, traced in the same way; between two of them nothing is traced
    (known_sizes.py), and where there is one, few of the layers are (few_layers.py)."""

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    how: Mapping[str, Any]
    others: Collection[Batch] = ()
    _known: dict[Pipeline, Traced] = field(default_factory=dict)
    _about: dict[Pipeline, Traced] = field(default_factory=dict)

    @cached_property
    def whole(self) -> Traced:
        """The program of the batch."""
        known = [((other.args, dict(other.kwargs)), other.whole) for other in self.others if "whole" in vars(other)]
        anew = partial(trace, self.model, self.args, self.kwargs, **self._tracing)
        return made_between((self.args, dict(self.kwargs)), known) or known and made_from_one(known[-1][1], anew) or anew()

    def rows(self, pipeline: Pipeline) -> int:
        """The length of the batch dim. Raises UsageError."""
        tensors = [t for t in self._flat[0] if isinstance(t, torch.Tensor)]
        dims = _batch_dims(self.whole, tensors, replace(pipeline, microbatches=1))
        return next(t.shape[d] for t, d in zip(tensors, dims, strict=True) if d is not None)

    def cut(self, pipeline: Pipeline) -> Traced:
        """See `traced`; traced once for equal parts."""
        key = _key(pipeline)
        if key not in self._known:
            self._known[key] = self._cut(key, short=False)
        return self._known[key]

    def about(self, pipeline: Pipeline) -> Traced:
        """`cut`, for prices: where layers are equal in the program of the batch, few of them are traced (few_layers.py)."""
        key = _key(pipeline)
        if key not in self._known and key not in self._about:
            self._about[key] = self._cut(key, short=True)
        return self._known.get(key) or self._about[key]

    def on(self, mesh: Mesh, pipeline: Pipeline) -> Traced:
        """`cut`, as ranks of `mesh` run it: dims that do not divide over its axes are padded. Stages of a pipeline keep them whole."""
        found = self.cut(pipeline)
        return found if pipeline.axis in mesh.names else padded(found, mesh, self.how.get("stored"), self.how.get("pad", PAD_WEIGHTS))

    def as_one(self, pipeline: Pipeline) -> Graph:
        """The batch as a micro-batch by itself: the program of the batch with what `cut` adds to that of a part. For prices."""
        part = self.about(pipeline).graph
        dims = [batch_dim_of(op) for op in part.of_kind("input")]
        results = [(dict(op.kwargs), op) for op in part.outputs(Role.USER).values()]
        joins = [(said[JOIN], said[JOIN_DIM]) for said, _ in results if said[JOIN] != WEIGHTS]
        graph = replace(accumulating(self.whole.graph, pipeline.count, dims, joins), microbatches=1)
        weights = [op.refs[0] for said, op in results if said[JOIN] == WEIGHTS]
        return _with_weights(graph, weights[0], len(joins)) if weights and weights[0].op in graph.by_name else graph

    def _cut(self, pipeline: Pipeline, short: bool) -> Traced:
        whole, count = self.whole, pipeline.count
        if count == 1 or not whole.graph.training:
            return whole
        loss = _loss(whole.graph, count)
        flat, tree = self._flat
        tensors = [t for t in flat if isinstance(t, torch.Tensor)]
        dims = _batch_dims(whole, tensors, pipeline)
        rows = next(t.shape[d] for t, d in zip(tensors, dims, strict=True) if d is not None)

        def anew(n: int = rows // count, **less: Any) -> Traced:
            pieces = iter([t if d is None else _first_rows(t.detach(), d, n) for t, d in zip(tensors, dims, strict=True)])
            some, named = pytree.tree_unflatten([next(pieces) if isinstance(v, torch.Tensor) else v for v in flat], tree)
            return trace(self.model, some, named, **self._tracing, **less)

        try:
            part = short and made_from_one(whole, anew) or anew()
            part = as_the_batch(whole, rows, part, anew) if rows == count else part
        except TraceError as e:
            raise TraceError(f"{e}\n  {_about_parts(whole.calling.names, dims, count)}") from None
        return replace(whole, graph=_microbatched(whole, part, dims, pipeline, loss), calling=_calling(whole.calling, part.calling))

    @property
    def _tracing(self) -> dict[str, Any]:
        return {name: value for name, value in self.how.items() if name != "pad"}

    @cached_property
    def _flat(self) -> tuple[Any, Any]:
        return self.whole.calling.binding.flatten(self.args, self.kwargs)


def _first_rows(t: torch.Tensor, dim: int, n: int) -> torch.Tensor:
    """Of a batch with less than `n` rows, its rows and the first ones again."""
    return (t if n <= t.shape[dim] else torch.cat([t, t], dim)).narrow(dim, 0, n)


def _about_parts(names: Sequence[str], dims: Sequence[int | None], count: int) -> str:
    """What to do where a part of a batch cannot be traced, and the batch can."""
    cut = [i for i, d in enumerate(dims) if d is not None]
    whole = f"Pipeline(microbatches={count}, batch_dims={{'input:{cut[len(cut) // 2]}': None}})"
    return (f"the whole batch can be traced, and the part of it that one of {count} micro-batches has cannot. Cut are "
            f"{', '.join(f'{names[i]} (input:{i})' for i in cut)}; an input that all of them read whole, such as a mask over positions, is named by "
            f"{whole}. A number of rows that is written in the model has to be read from an input (x.shape[0])")


def _key(pipeline: Pipeline) -> Pipeline:
    """Equal for options that cut a batch alike."""
    return Pipeline(pipeline.count, batch_dims=pipeline.batch_dims, inexact=pipeline.inexact)


def rows_of(traced: Traced) -> int:
    """Rows of one micro-batch: the length of the batch dim of the first input that has one."""
    return next((op.outputs[0].shape[d] for op in traced.graph.of_kind("input") if (d := batch_dim_of(op)) is not None), 0)


def _loss(graph: Graph, count: int) -> Op:
    """The output that is differentiated. Raises UsageError where it is not one number."""
    tangents = [op.target for op in graph.of_kind("tangent")]
    losses = [op for i, op in graph.outputs(Role.USER).items() if i in tangents]
    if len(losses) != 1 or graph.meta(losses[0].refs[0]).shape:
        found = ", ".join(f"output {op.target.name} of shape {graph.meta(op.refs[0]).shape}" for op in losses)
        raise UsageError(f"{count} micro-batches need the loss in the graph: one differentiable number, and the model gives {found or 'none'}; pass "
                         'loss_fn=, or return {"loss": loss, ...} with the rest of the outputs beside it')
    wanted = [name for name in graph.outputs(Role.GRADIENT) if str(name).startswith("input:")]
    if wanted:
        raise UsageError(f"{wanted[0]} requires a gradient, which micro-batches do not give; detach it")
    return losses[0]


def _batch_dims(whole: Traced, tensors: Sequence[torch.Tensor], pipeline: Pipeline) -> list[int | None]:
    """The batch dim of every input. Raises UsageError for names there are not, and for dims that do not divide."""
    names, count, given = whole.calling.names, pipeline.count, dict(pipeline.batch_dims)
    known = {f"input:{i}": i for i in range(len(tensors))} | {name: i for i, name in enumerate(names)}
    unknown = [name for name in given if name not in known]
    if unknown:
        raise UsageError(f"batch_dims names {unknown[0]!r}, and the inputs are {', '.join(f'{n} (input:{i})' for i, n in enumerate(names))}")
    chosen = {known[name]: dim for name, dim in given.items()}
    dims = [chosen.get(i, 0 if t.ndim else None) for i, t in enumerate(tensors)]
    batch = next((t.shape[d] for t, d in zip(tensors, dims, strict=True) if d is not None and -t.ndim <= d < t.ndim), 0)
    for i, (name, t, d) in enumerate(zip(names, tensors, dims, strict=True)):
        if d is None:
            continue
        if not -t.ndim <= d < t.ndim:
            raise UsageError(f"batch_dims gives {name} (input:{i}) the batch dim {d}, and its shape is {tuple(t.shape)}")
        if t.shape[d] != batch:
            raise UsageError(f"{name} (input:{i}) of shape {tuple(t.shape)} has {t.shape[d]} rows, and the batch {batch}; where micro-batches read "
                             f"it whole, say so: Pipeline(microbatches={count}, batch_dims={{'input:{i}': None}})")
        dims[i] = d % t.ndim
    if not batch or batch % count:
        raise UsageError(f"a batch of {batch} rows does not divide into {count} micro-batches; choose a divisor of {batch}, or leave out a last "
                         "batch of another size (drop_last=True of a DataLoader)" if batch
                         else f"no input has a batch dim, so there is nothing to cut into {count} micro-batches")
    return dims


@dataclass
class _Found:
    """What is not exact, if it is accepted."""

    accepts: bool
    count: int
    notes: list[str]

    def __call__(self, inexact: Inexact) -> None:
        if not self.accepts:
            raise UsageError(_message(inexact.op, inexact.why, self.count))
        self.notes.append(f"{inexact.op.where}: {inexact.why}")


def _message(op: Op, why: str, count: int) -> str:
    return (f"{count} micro-batches compute something else than the batch: {op.where}: {why}. Change the model there, or accept it with "
            f'Pipeline(microbatches={count}, inexact="accept")')


def _microbatched(whole: Traced, part: Traced, dims: Sequence[int | None], pipeline: Pipeline, loss: Op) -> Graph:
    """The graph of the step. Raises UsageError."""
    told = _Found(pipeline.inexact == "accept", pipeline.count, [])
    others = partners(whole.graph, part.graph, told)
    relations = {} if others is None else walk(whole.graph, others, dims, pipeline.count, told)
    _check_constants(whole, part, others or {}, told)
    _check_mutations(whole.graph, told)
    joins, weights = [], None
    for a, b in zip(*(g.outputs(Role.USER).values() for g in (whole.graph, part.graph)), strict=True):
        metas = whole.graph.meta(a.refs[0]), part.graph.meta(b.refs[0])
        found = relations.get(a.refs[0]) or by_shape(*metas, pipeline.count)
        joins.append(_join(a, found, metas[0], pipeline.count, told))
        if joins[-1][0] == WEIGHTED:
            if weights not in (None, found.weights):
                told(Inexact(a, "two outputs are means by different weights"))
            weights = found.weights
    if (how := joins[loss.target.name][0]) in (CAT, SAME):
        told(Inexact(loss, f"the loss is no sum or mean over samples ({how})"))
    graph = accumulating(part.graph, pipeline.count, dims, joins)
    if weights is not None and others is not None:
        weights = Ref(others[weights.op].name, weights.index)
    return replace(_with_weights(graph, weights, len(joins)), notes=tuple(told.notes))


def _check_constants(whole: Traced, part: Traced, others: Mapping[str, Op], told: _Found) -> None:
    """Relations take a constant for the same in all micro-batches, and code may make one of the number of rows."""
    checks = only_checked(whole.graph)
    for op in whole.graph.of_kind("buffer"):
        reader = next((o for o in whole.graph.ops if op.name in {r.op for r in o.refs} and o.name not in checks), None)
        a, b = (p.calling.constants.get(o.target) if o else None for p, o in ((whole, op), (part, others.get(op.name))))
        if reader is None or a is None or b is None or a.is_meta or b.is_meta or _are_equal(a, b):
            continue
        found = [str(t.tolist()) if t.numel() == 1 else f"of shape {tuple(t.shape)}" for t in (a, b)]
        told(Inexact(reader, f"it reads a constant that is {found[0]} for the batch and {found[1]} for a micro-batch; take a number of rows as it is "
                             "(x.shape[0]), and make what has a number for every row of an input (x.new_ones(x.shape[0]))"))


def _are_equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and bool(((a == b) | ((a != a) & (b != b))).all())


def _check_mutations(graph: Graph, told: _Found) -> None:
    for name, op in graph.outputs(Role.MUTATION).items():
        if f"param:{name}" in graph.by_name:  # what is gathered of it before the first micro-batch would stay behind
            raise UsageError(f"the model writes into its parameter {name!r}, which micro-batches cannot do; write it outside of the model, between "
                             "steps")
        told(Inexact(graph.op(op.refs[0].op), f"it updates the buffer {name!r} in every micro-batch, each with what the one before wrote"))


def _join(op: Op, found: Relation, meta: Any, count: int, told: _Found) -> tuple[str, int]:
    """How a user output is put together, and along which tensor dim."""
    if isinstance(found, Same):
        return SAME, 0
    if isinstance(found, Cut):
        dim = next(d for d in range(len(meta.shape)) if found.dim in meta.logical_dims(d))
        if meta.logical_dims(dim)[0] != found.dim:
            told(Inexact(op, f"samples are not the major part of dim {dim} of the output"))
        return CAT, dim
    if isinstance(found, Rows):
        told(Inexact(op, "the output holds the numbers of the samples"))
        return CAT, 0
    if found.weights is not None and found.factor == 1:
        return WEIGHTED, 0
    if found.weights is None and found.factor in (1, Fraction(1, count)):
        return (SUM if found.factor == 1 else MEAN), 0
    told(Inexact(op, f"the output is {float(found.factor)} times the sum of those of the micro-batches"))
    return MEAN, 0


def _with_weights(graph: Graph, weights: Ref | None, users: int) -> Graph:
    """The graph with the weight of a micro-batch as one more user output."""
    if weights is None:
        return graph
    target = Output(Role.USER, users)
    op = Op(str(target), "output", target, (weights,),
            ((JOIN, WEIGHTS), (JOIN_DIM, 0), (WEIGHTS, _about(graph, weights))), phase=graph.op(weights.op).phase)
    last = max(i for i, o in enumerate(graph.ops) if o.phase == op.phase)
    return replace(graph, ops=(*graph.ops[:last + 1], op, *graph.ops[last + 1:]))


def _about(graph: Graph, weights: Ref) -> int:
    """The number of terms that make a weight."""
    op = graph.op(weights.op)
    terms = op.refs[1] if weights.index == 1 and len(op.refs) > 1 else op.refs[0] if op.refs else weights
    return max(1, prod(graph.meta(terms).shape))


def _calling(whole: Calling, part: Calling) -> Calling:
    """How the batch is passed, and the constants of the program that runs."""
    return replace(whole, constants=part.constants)
