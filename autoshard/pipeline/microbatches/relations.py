"""How a value of the batch's program is made of the same value in the programs of the micro-batches, op by op.

A virtual mesh axis whose ranks are the micro-batches: every input lies on it split along its batch dim, parameters whole. The sharding rules
say what an op makes of that where each micro-batch runs it by itself. Where only a collective would help, or where the op of a micro-batch
is another one than that of the batch, micro-batches compute something else than the batch."""
from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

import torch

from autoshard.base.graph import Call, Graph, Op, Ref, TensorMeta
from autoshard.base.spec import PSUM, R, is_partial
from autoshard.program.tracing.tape import is_random
from autoshard.rules import registry
from autoshard.rules.types import Row, Rule

aten = torch.ops.aten
MEAN, NONE = 1, 0


@dataclass(frozen=True)
class Same:
    """The value does not depend on the batch."""


@dataclass(frozen=True)
class Cut:
    """The pieces of the micro-batches lie one after another along logical dim `dim`."""

    dim: int


@dataclass(frozen=True)
class Added:
    """`factor` times the sum over micro-batches; with `weights`, times their mean by these."""

    factor: Fraction
    weights: Ref | None = None


@dataclass(frozen=True)
class Rows:
    """The numbers of the samples along logical dim `dim`; every micro-batch counts its own from 0."""

    dim: int


Relation = Same | Cut | Added | Rows


class Inexact(Exception):
    """Why an op computes something else on micro-batches. `op`: of the batch's graph."""

    def __init__(self, op: Op, why: str) -> None:
        super().__init__(why)
        self.op, self.why = op, why


@dataclass(frozen=True)
class Pair:
    """An op in the program of the batch (`whole`) and of a micro-batch (`part`), and what its inputs are."""

    whole: Op
    part: Op
    graph: Graph
    pieces: int
    inputs: tuple[Relation, ...]

    def refuse(self, why: str) -> Inexact:
        return Inexact(self.whole, why)

    @property
    def placements(self) -> tuple[int, ...]:
        return tuple(i.dim if isinstance(i, (Cut, Rows)) else PSUM if isinstance(i, Added) else R for i in self.inputs)

    @property
    def added(self) -> list[Added]:
        return [i for i in self.inputs if isinstance(i, Added)]


def relations_of(pair: Pair) -> tuple[Relation, ...]:
    """The outputs of the op. Raises Inexact."""
    found = _relations(pair)
    for whole, part in _unlike(pair, found):
        raise pair.refuse(f"its result is {whole.shape} for the batch and {part.shape} for a micro-batch, which is no part of it")
    return found


def _unlike(pair: Pair, found: Sequence[Relation]) -> Iterator[tuple[TensorMeta, TensorMeta]]:
    """Outputs for the batch and for a micro-batch, where these are not as long as the relation says."""
    private = registry.rule_of(pair.whole.target).private
    for i, (relation, whole, part) in enumerate(zip(found, pair.whole.outputs, pair.part.outputs, strict=True)):
        if whole is not None and part is not None and i not in private and part.shape != _shape_of_part(relation, whole, pair.pieces):
            yield whole, part


def _shape_of_part(relation: Relation, whole: TensorMeta, pieces: int) -> tuple[int, ...]:
    """The shape that the value has in the program of a micro-batch."""
    if not isinstance(relation, Cut | Rows):
        return whole.shape
    return tuple(n // pieces if relation.dim in whole.logical_dims(d) else n for d, n in enumerate(whole.shape))


def _relations(pair: Pair) -> tuple[Relation, ...]:
    for op, handle in SPECIAL.items():
        if pair.whole.target is op and (found := handle(pair)) is not None:
            return found
    if all(isinstance(i, Same) for i in pair.inputs):
        return _without_batch(pair)
    if any(isinstance(i, Rows) for i in pair.inputs):
        return _of_rows(pair)
    _check_arguments(pair)
    return _by_rule(pair, _common(pair))


# --- by the sharding rule ---

def _by_rule(pair: Pair, added: Added) -> tuple[Relation, ...]:
    call, rule = _of_floats(pair.graph.calls[pair.whole.name]), registry.rule_of(pair.whole.target)
    rows = [row for row in registry.rows(call) if row.inputs == pair.placements]
    if not rows:
        raise pair.refuse("it mixes samples" if not pair.added else "it is not linear in a sum over samples")
    if _counts_samples(call, rule, pair.placements):
        raise pair.refuse("it finds samples by their numbers in the batch")
    found = next((row for row in rows if not any(_unlike(pair, _made(row, added)))), rows[0])  # x.new_zeros(n) has rows of any outputs
    if found.inner:
        raise pair.refuse("it needs numbers of the whole batch")
    read = [p for i, p in enumerate(found.outputs) if i not in rule.private]  # the others are the gradient's, of the same micro-batch
    if rule.local is not None and PSUM in read and not pair.added and pair.whole.target not in AS_THEY_ARE:
        raise pair.refuse("it adds samples up with other factors than one micro-batch does")
    if any(is_partial(p) and p != PSUM for p in found.outputs):
        raise pair.refuse("it takes the largest or smallest of the whole batch")
    return _made(found, added)


def _made(row: Row, added: Added) -> tuple[Relation, ...]:
    return tuple(Same() if p == R else added if p == PSUM else Cut(p) for p in row.outputs)


def _counts_samples(call: Call, rule: Rule, placements: Sequence[Any]) -> bool:
    """Whether positions are counted along the dim that is cut: every micro-batch would find its own."""
    if rule.looks_up is None:
        return False
    tensor, dims = rule.looks_up
    return any(placements[tensor] in call.inputs[tensor].logical_dims(d) for d in dims(call))


def _of_floats(call: Call) -> Call:
    """A sum of whole numbers (how many are right) as one of floats: Partial sums are of floats alone, for they are what ranks reduce."""
    if call.target not in SUMS or call.inputs[0].dtype.is_floating_point:
        return call
    return replace(call, inputs=(replace(call.inputs[0], dtype=torch.float64),), outputs=(replace(call.output(), dtype=torch.float64),))


def _common(pair: Pair) -> Added:
    """What a linear op makes of its sums; 1 where it makes one itself."""
    kinds = set(pair.added)
    if len(kinds) > 1:
        raise pair.refuse("it adds sums over samples that are weighted differently")
    return next(iter(kinds), Added(Fraction(1)))


def _check_arguments(pair: Pair) -> None:
    """What is no tensor must be the same, but for shapes."""
    sizes = {name for name, _ in registry.rule_of(pair.whole.target).sizes}
    for name, (a, b) in _arguments(pair).items():
        if a != b and name not in sizes and name not in SHAPES and (pair.whole.target, name) not in COUNTS_OF_SAMPLES:
            raise pair.refuse(f"its argument {name} is {a} for the batch and {b} for a micro-batch")


def _arguments(pair: Pair) -> dict[str, tuple[Any, Any]]:
    """What is no tensor, by name, of both programs."""
    names = [a.name for a in pair.whole.target._schema.arguments] if hasattr(pair.whole.target, "_schema") else []
    names += [f"number {i}" for i in range(len(names), max(len(pair.whole.args), len(pair.part.args)))]
    of: list[dict[str, Any]] = [dict(zip(names, map(_numbers, op.args), strict=False)) | {k: _numbers(v) for k, v in op.kwargs}
                                for op in (pair.whole, pair.part)]
    return {name: (of[0].get(name), of[1].get(name)) for name in of[0] | of[1]}


def _numbers(value: Any) -> Any:
    """Arguments without the names of the values among them."""
    if isinstance(value, Ref):
        return "tensor"
    return tuple(map(_numbers, value)) if isinstance(value, tuple) else value


# --- values that no sample goes into ---

def _without_batch(pair: Pair) -> tuple[Relation, ...]:
    outputs = list(zip(pair.whole.outputs, pair.part.outputs, strict=True))
    if all(a is None or b is not None and a.shape == b.shape for a, b in outputs):
        for name, (a, b) in _arguments(pair).items():
            if a != b:
                raise pair.refuse(f"its argument {name} is {a} for the batch and {b} for a micro-batch")
        return (Same(),) * len(outputs)
    if not (is_random(pair.whole.target) or any(word in str(pair.whole.target) for word in REPEATED)):
        raise pair.refuse("it makes numbers that depend on the size of the batch")
    _check_arguments(pair)
    return tuple(Same() if a is None or b is None or a.shape == b.shape else Cut(cut_dim(a, b, pair)) for a, b in outputs)


def cut_dim(whole: TensorMeta, part: TensorMeta, pair: Pair) -> int:
    """The one logical dim that is so many times as long in the batch."""
    a, b = whole.logical_shape, part.logical_shape
    longer = [d for d, (m, n) in enumerate(zip(a, b, strict=False)) if m != n]
    if len(a) != len(b) or len(longer) != 1 or a[longer[0]] != pair.pieces * b[longer[0]]:
        raise pair.refuse(f"its result is {whole.shape} for the batch and {part.shape} for a micro-batch")
    return longer[0]


SHAPES = ("size", "sizes", "shape", "repeats")
COUNTS_OF_SAMPLES = frozenset({(aten.native_group_norm.default, "N")})
"""Arguments that say how many samples there are, which the input says too."""
SUMS = (aten.sum.default, aten.sum.dim_IntList)
INDEXED = (aten.index.Tensor, aten.index_put.default, aten._unsafe_index_put.default)
REPEATED = ("zeros", "ones", "full", "empty", "expand", "fill", "scalar_tensor", "repeat")
"""Ops that make the same numbers everywhere along a new dim."""


# --- the numbers of the samples ---

def _numbers_of_rows(pair: Pair) -> tuple[Relation, ...] | None:
    """A count from 0 to the size of the batch."""
    (a, b), start = (op.outputs[0].shape[0] for op in (pair.whole, pair.part)), pair.whole.args[:-1]
    return (Rows(0),) if a == pair.pieces * b and start in ((), (0,)) and a != b else None


def _of_rows(pair: Pair) -> tuple[Relation, ...]:
    """Numbers of samples may be viewed otherwise, and pick the samples themselves or write into them."""
    if registry.is_view(pair.whole) or registry.is_cast(pair.whole):
        _check_arguments(pair)
        return tuple(Rows(r.dim) if isinstance(r, Cut) else r for r in _by_rule(pair, Added(Fraction(1))))
    if pair.whole.target in INDEXED and _by_own_number(pair):
        _check_arguments(pair)
        whole, part = pair.whole.outputs[0], pair.part.outputs[0]
        assert whole is not None and part is not None, "indexing makes a tensor"
        return (Cut(cut_dim(whole, part, pair)),)
    raise pair.refuse("it reads the numbers of the samples in the batch")


def _by_own_number(pair: Pair) -> bool:
    """Whether every sample is read or written under its own number, as in `h[torch.arange(n), last]`: what belongs to a sample of the other
    indices, and of the values that are written, lies where its number does."""
    (base, *given), (meta, *metas) = pair.inputs, map(pair.graph.meta, pair.whole.refs)
    if not isinstance(base, Cut) or meta.is_flat or any(m.is_flat for m in metas):
        return False
    left = iter(zip(given, metas, strict=True))
    by = {d: next(left) for d, index in enumerate(pair.whole.args[1]) if index is not None}
    if [d for d, (i, _) in by.items() if isinstance(i, Rows)] != [base.dim] or any(isinstance(i, Added) for i in given):
        return False
    (place, *others) = {m.ndim - i.dim for i, m in by.values() if isinstance(i, Cut | Rows)}  # counted from the end, as broadcasting does
    together = max(by) - min(by) + 1 == len(by)
    behind = meta.ndim - len(by) - (min(by) if together else 0)  # dims of the result behind those of the indices
    return not others and all(isinstance(v, Same) or isinstance(v, Cut) and m.ndim - v.dim == place + behind for v, m in left)


# --- ops with their own ways ---

def _mean(pair: Pair) -> tuple[Relation, ...] | None:
    """A mean over samples is the mean of the micro-batches' means: they are equally large."""
    if not isinstance(pair.inputs[0], Cut):
        return None
    (found,) = _by_rule(pair, Added(Fraction(1, pair.pieces)))
    return (found,)


def _loss(pair: Pair) -> tuple[Relation, ...] | None:
    if not any(isinstance(i, Cut) for i in pair.inputs):
        return None
    averages = pair.graph.calls[pair.whole.name].argument("reduction") == MEAN
    return _by_rule(pair, Added(Fraction(1, pair.pieces) if averages else Fraction(1)))


def _nll(pair: Pair) -> tuple[Relation, ...] | None:
    """The mean of a micro-batch is over the targets that count there, and the second output says how much they weigh."""
    call = pair.graph.calls[pair.whole.name]
    if call.argument("reduction") == NONE or not isinstance(pair.inputs[1], Cut):
        return None
    row = next((r for r in registry.rows(call) if r.inputs == pair.placements), None)
    if row is None:
        raise pair.refuse("it mixes samples")
    weights = first_equal(pair.graph, Ref(pair.whole.name, 1)) if call.argument("reduction") == MEAN else None
    return Added(Fraction(1), weights), Added(Fraction(1))


def _quotient(pair: Pair) -> tuple[Relation, ...] | None:
    """A sum over a sum is a mean by weights. A number that depends on the size of the batch changes the factor."""
    over, under = (*pair.inputs, Same())[:2]
    if isinstance(over, Added) and isinstance(under, Added):
        below = pair.whole.refs[1]
        if over.weights or under.weights or not _of_data_alone(pair.graph, below):
            raise pair.refuse("it divides sums over samples, and what it divides by depends on parameters")
        return (Added(over.factor / under.factor, first_equal(pair.graph, below)),)
    return _scaled(pair, lambda a, b: Fraction(b) / Fraction(a))


def _product(pair: Pair) -> tuple[Relation, ...] | None:
    return _scaled(pair, lambda a, b: Fraction(a) / Fraction(b))


def _scaled(pair: Pair, change: Callable[[Any, Any], Fraction]) -> tuple[Relation, ...] | None:
    numbers = [(a, b) for a, b in zip(pair.whole.args, pair.part.args, strict=True) if not isinstance(a, Ref) and a != b]
    if len(pair.added) != 1 or len(numbers) != 1:
        return None
    (a, b), (sums,) = numbers[0], pair.added
    if not all(isinstance(n, (int, float)) and n for n in (a, b)):
        return None
    return (replace(sums, factor=sums.factor * change(a, b).limit_denominator(1 << 40)),)


def _sum(pair: Pair) -> tuple[Relation, ...] | None:
    """To a mean a number that is the same for all may be added, and zero to any sum, as Python's `sum` of losses does first."""
    added, others = pair.added, [i for i in pair.inputs if not isinstance(i, Added)]
    number = next((a for a in pair.whole.args if isinstance(a, (int, float))), None)
    alone = len(pair.inputs) == 1 and number is not None
    if len(added) == 1 and (alone or others and all(isinstance(i, Same) for i in others)) and (
            alone and number == 0 or _averages(added[0], pair.pieces)):
        _check_arguments(pair)
        return (added[0],)
    return None


def _averages(a: Added, pieces: int) -> bool:
    return a.factor == (1 if a.weights else Fraction(1, pieces))


def first_equal(graph: Graph, weights: Ref) -> Ref:
    """The first value in the graph that counts the same targets: a loss with label smoothing is the sum of two means, by the weights of
    `nll_loss` and by a sum over a mask, and both are the number of targets that are not ignored."""
    counted = _counted(graph, weights)
    return weights if counted is None else next(
        ref for op in graph.ops for ref in (Ref(op.name, len(op.outputs) - 1),) if _counted(graph, ref) == counted)


def _counted(graph: Graph, ref: Ref) -> tuple[Ref, Any] | None:
    """The targets and the one that is ignored, where the value is the number of those that are not."""
    op = graph.op(ref.op)
    if op.target in NLL and ref.index == 1:
        call = graph.calls[op.name]
        return None if len(op.refs) > 2 or call.argument("reduction") != MEAN else (op.refs[1], call.argument("ignore_index"))
    if op.target not in SUMS or op.outputs[0].shape:
        return None
    mask, compares = _before_casts(graph, op.refs[0]), aten.ne.Scalar
    if mask.target in (aten.bitwise_not.default, aten.logical_not.default):
        mask, compares = graph.op(mask.refs[0].op), aten.eq.Scalar
    return (mask.refs[0], mask.args[1]) if mask.target is compares else None


def _before_casts(graph: Graph, ref: Ref) -> Op:
    op = graph.op(ref.op)
    return _before_casts(graph, op.refs[0]) if registry.is_cast(op) else op


def _of_data_alone(graph: Graph, ref: Ref) -> bool:
    """Whether no parameter goes into the value."""
    todo, seen = [ref.op], {ref.op}
    while todo:
        op = graph.op(todo.pop())
        if op.kind == "param":
            return False
        new = {r.op for r in op.refs} - seen
        seen |= new
        todo += new
    return True


NLL = (aten.nll_loss_forward.default, aten.nll_loss2d_forward.default)
AS_THEY_ARE: frozenset[Any] = frozenset({
    aten.mean.default, aten.mean.dim, aten.mse_loss.default, aten.smooth_l1_loss.default, aten.huber_loss.default,
    aten.soft_margin_loss.default, aten.binary_cross_entropy.default, aten.binary_cross_entropy_with_logits.default})
"""Ops with local implementations whose factors are known here."""

SPECIAL: Mapping[Any, Callable[[Pair], tuple[Relation, ...] | None]] = {
    **dict.fromkeys((aten.mean.default, aten.mean.dim), _mean),
    **dict.fromkeys(AS_THEY_ARE - {aten.mean.default, aten.mean.dim}, _loss),
    **dict.fromkeys(NLL, _nll),
    **dict.fromkeys((aten.div.Tensor, aten.div.Scalar), _quotient), **dict.fromkeys((aten.mul.Tensor, aten.mul.Scalar), _product),
    **dict.fromkeys((aten.add.Tensor, aten.sub.Tensor, aten.rsub.Scalar), _sum),
    **dict.fromkeys((aten.arange.default, aten.arange.start), _numbers_of_rows)}
"""Ops that need more than their rule says."""
