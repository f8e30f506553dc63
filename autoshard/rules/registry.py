"""Which rule an op has: own tables first, then DTensor's registries, then all-Replicate.

Every file of `ops` holds a table `RULES: {op overload: Rule}`; this file merges them. `rows` is the one
place where rows are cleaned, so that no rule has to care about ints, size-1 dims or duplicates.
"""
from __future__ import annotations

from collections.abc import Sequence
from functools import cache, lru_cache
from typing import Any

import torch

from autoshard.base.graph import Call, Graph, Op, Ref, TensorMeta
from autoshard.base.spec import PSUM, Placement, R, Spec, is_partial, local_shape, shard_counts
from autoshard.rules.borrowed import borrowed
from autoshard.rules.family import Family
from autoshard.rules.notation import NotationMismatch, is_number
from autoshard.rules.ops import (
    attention,
    contraction,
    conv,
    distance,
    embedding,
    embedding_bag,
    experts,
    factory,
    grouped,
    images,
    index,
    linalg,
    loss,
    marker,
    norm,
    pointwise,
    random,
    reduction,
    rms_norm,
    view,
)
from autoshard.rules.types import LocalContext, Origin, Row, Rule

TABLES = (contraction, pointwise, reduction, view, factory, embedding, embedding_bag, loss, attention, conv, norm, rms_norm, random, index,
          grouped, experts, marker, images, distance, linalg)


def all_replicate(call: Call) -> Row:
    return Row((R,) * len(call.inputs), (R,) * len(call.outputs))


REPLICATE = Rule(rows=lambda call: (all_replicate(call),), origin="replicate")


@lru_cache(maxsize=1)
def table() -> dict[Any, Rule]:
    """All own rules by op overload; those of other packages' ops, which may not be imported, by printed name.

    Raises ValueError when two files claim one op."""
    out: dict[Any, Rule] = {}
    for module in TABLES:
        rules = {**getattr(module, "RULES", {}), **getattr(module, "BY_NAME", {})}
        if twice := out.keys() & rules.keys():
            raise ValueError(f"op {next(iter(twice))} has a second rule in {module.__name__}")
        out.update(rules)
    return out


@lru_cache(maxsize=1)
def outside() -> dict[Any, str]:
    """Ops of other packages that were given a rule, with what tells that rule from another one."""
    return {}


def add(target: Any, found: Rule, says: str) -> None:
    """Give an op of another package its rule (see outside.py). What was looked up before is forgotten."""
    table()[target], outside()[target] = found, says
    for looked_up in (rule_of, rows, _resolve):
        looked_up.cache_clear()


@cache
def rule_of(target: Any) -> Rule:
    """The rule of an op overload: its own, by tag, borrowed, or all-Replicate. A target that is none brings its rule along."""
    if not isinstance(target, torch._ops.OpOverload) and hasattr(target, "rule"):
        brought: Rule = target.rule
        return brought
    if target in table():
        return table()[target]
    if str(target) in table():
        return table()[str(target)]
    if torch.Tag.pointwise in getattr(target, "tags", ()):
        return pointwise.tagged(target)
    return borrowed(target) or REPLICATE


def family_of(op: Op) -> Family | None:
    """What kind of work an op of a graph does; None for one that is no call."""
    return rule_of(op.target).family if op.kind == "call" else None


def is_view(op: Op) -> bool:
    """Whether the op is free: its value lies in the buffer of what it reads."""
    return op.kind == "call" and rule_of(op.target).family.free


def private_values(graph: Graph) -> frozenset[Ref]:
    """Values that lie as the op that made them knows alone (`Rule.private`)."""
    return frozenset(Ref(op.name, i) for op in graph.of_kind("call") for i in rule_of(op.target).private)


def is_heavy(op: Op) -> bool:
    """Whether the op counts FLOP, so that its time can hide communication."""
    return op.kind == "call" and rule_of(op.target).family.heavy


def is_cast(op: Op) -> bool:
    """Whether the op is a copy in another dtype."""
    return op.kind == "call" and _casts(op.target)


@cache
def _casts(target: Any) -> bool:
    return "_to_copy" in str(target)


@cache
def rows(call: Call) -> tuple[Row, ...]:
    """Every way to run `call` over one mesh axis, all-Replicate first, none twice. Divisibility is not
    checked here."""
    return _resolve(call)[1]


def origin(call: Call) -> Origin:
    """Where the rows come from; "replicate" deserves a line in the report."""
    return _resolve(call)[0]


@cache
def _resolve(call: Call) -> tuple[Origin, tuple[Row, ...]]:
    rule = rule_of(call.target)
    try:
        found = rule.rows(call)
    except NotationMismatch:
        return "replicate", (all_replicate(call),)
    if rule.origin == "dtensor" and len(found) == 1:
        return "replicate", found
    metas = (*call.inputs, *call.outputs)
    kept = [row for row in found if all(_fits(p, m) for p, m in zip((*row.inputs, *row.outputs), metas, strict=True))]
    return rule.origin, tuple(dict.fromkeys((all_replicate(call), *kept)))


def _fits(p: Placement, meta: TensorMeta | None) -> bool:
    if meta is None or p == R:
        return p == R
    if is_partial(p):
        return is_number(meta.dtype) and (p == PSUM or not meta.dtype.is_complex)
    return p < meta.ndim and meta.logical_shape[p] > 1 and p not in meta.part_dims


def factors(call: Call) -> tuple[tuple[tuple[int, ...], ...] | None, ...]:
    """Factors of every output (None where the output is None); plain dims where the rule says nothing."""
    rule = rule_of(call.target)
    plain = tuple(None if m is None else tuple((n,) for n in m.shape) for m in call.outputs)
    if rule.factors is None:
        return plain
    try:
        return rule.factors(call)
    except NotationMismatch:
        return plain


def is_choosy(call: Call) -> bool:
    """Whether `takes_pieces` may say no."""
    rule = rule_of(call.target)
    return rule.grain is not None or rule.takes is not None


def takes_pieces(call: Call, specs: Sequence[Spec], sizes: tuple[int, ...]) -> bool:
    """Whether the op's kernel takes the pieces that inputs with `specs` are cut into on mesh axes of `sizes`, and their combination."""
    rule = rule_of(call.target)
    if rule.takes is not None and not rule.takes(call, specs, sizes):
        return False
    grain = rule.grain
    if grain is None:
        return True
    for meta, spec, multiples in zip(call.inputs, specs, grain(call), strict=True):
        local, counts = local_shape(meta.logical_shape, spec, sizes), shard_counts(meta.ndim, spec, sizes)
        if any(counts[d] > 1 and local[d] % n for d, n in multiples.items()):
            return False
    return True


def run_local(ctx: LocalContext, *args: Any, **kwargs: Any) -> Any:
    """Run `ctx.call`'s op on the local tensors in `args`: its local implementation, or the op itself with
    size arguments replaced by local shapes. Works on tensors and on FX proxies."""
    call = ctx.call
    rule = rule_of(call.target)
    if rule.local is not None:
        return rule.local(ctx, *args, **kwargs)
    args, kwargs = localize_sizes(ctx, rule.sizes, args, kwargs)
    return call.target(*args, **kwargs)


def localize_sizes(ctx: LocalContext, sizes: tuple[tuple[str, str], ...], args: tuple[Any, ...],
                   kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """`args`, `kwargs` with each schema argument named in `sizes` replaced by a local tensor shape."""
    if not sizes:
        return args, kwargs
    places = {a.name: i for i, a in enumerate(ctx.call.target._schema.arguments)}
    new, named = list(args), dict(kwargs)
    for name, tensor in sizes:
        index = int(tensor.lstrip("inout"))
        shape = list(ctx.local_in(index) if tensor.startswith("in") else ctx.local_out(index))
        if places[name] < len(new):
            new[places[name]] = shape
        else:
            named[name] = shape
    return tuple(new), named
