"""The kind of a plan in one sentence, derived from the plan's data: "ZeRO-2 over dp*tp; vocabulary split over tp".

Per mesh axis: are values split along dim 0, the batch; are weights gathered before they are used, and again for backward; which weights
stay split while they compute. The words are those of the literature: see docs/report.md."""
from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

from autoshard.base.plan import LATE_REDUCTION, PlacedTensor, Plan
from autoshard.base.spec import R, Spec, split_by
from autoshard.base.windows import START

MOST = 0.5  # of the values: then the axis is said to split the batch
BESIDE = 0.25  # of the values with a sequence: norms and residuals are a part of what a layer makes
ALL, SOME = 0.9, 0.02  # parts of the bytes of weights: from ALL on it is said of the plan, below SOME it is not worth a word
REPEATED = re.compile(r"(^|\.)\d+\.")


@dataclass(frozen=True)
class Axis:
    """What one mesh axis does. Parts of 1: `batch` of the module outputs split along dim 0, `sequence` along dim 1 of those with three;
    `gathered`, `again` and `inside` of the bytes of weights: stored split and gathered for forward, gathered once more for backward, or used as
    they are split. `dims`: what the weights of `inside` and attention are split by. `works`: whether any op has part of the work."""

    name: str
    ranks: int
    batch: float
    sequence: float
    gathered: float
    again: float
    inside: float
    dims: tuple[str, ...]
    works: bool


def kind_of(plan: Plan) -> str:
    """The sentence."""
    mesh = plan.spec_mesh
    axes = {a: axis_of(plan, a) for a, size in enumerate(mesh.sizes) if size > 1}
    if not axes:
        return "one rank does everything"
    if not any(a.works or a.gathered > 0 for a in axes.values()):
        return f"nothing is split: {plan.mesh.size} ranks do the work of one"
    said: dict[str, list[int]] = {}
    for a, axis in axes.items():
        for words in _words(axis, plan):
            said.setdefault(words, []).append(a)
    idle = [a for a in axes.values() if not (a.works or a.gathered > 0)]
    tail = [f"nothing is split over {a.name}: its {a.ranks} ranks do the work of one" for a in idle]
    return "; ".join([words.format("*".join(mesh.shown(over))) for words, over in sorted(said.items(), key=lambda s: _order(s[0]))] + tail)


def axis_of(plan: Plan, a: int) -> Axis:
    """What mesh axis number `a` does."""
    weights = [x for x in plan.layouts if x.kind == "weight"]
    total = sum(map(_elements, weights)) or 1
    forward, backward = (_gathers(plan, a, windows) for windows in ((START, "forward"), ("backward",)))
    backward = frozenset(x for x in backward if x in forward or x.startswith("param:"))  # other modules move gradients there
    split = [w for w in weights if w.spec[a] >= 0]
    gathered = [w for w in split if _is_in(w, forward) or _is_in(w, backward)]
    inside = [w for w in split if w not in gathered]
    values = [x for x in plan.layouts if x.kind == "activation" and x.shape]
    wide = [x for x in values if len(x.shape) == 3]
    return Axis(plan.spec_mesh.names[a], plan.spec_mesh.sizes[a], _part(values, a, 0), _part(wide, a, 1), sum(map(_elements, gathered)) / total,
                sum(_elements(w) for w in gathered if _is_in(w, backward)) / total, sum(map(_elements, inside)) / total,
                tuple(_dims(plan, a, inside)), any(spec[a] != R for spec in _work(plan)))


def _words(axis: Axis, plan: Plan) -> Iterator[str]:
    """Phrases with a place for the names of the axes; those of several axes with one phrase are joined."""
    sharded = _zero(axis, plan)
    if axis.gathered >= ALL * (1.0 - axis.inside) and axis.gathered >= SOME:
        yield sharded if axis.batch >= MOST or not axis.works else f"weights stored split over {{}} and gathered ({sharded.partition(' ')[0]})"
    elif axis.batch >= MOST:
        yield "data parallel over {}" + (f" ({sharded.partition(' ')[0]} for {axis.gathered:.0%} of the weights)" if axis.gathered >= SOME else "")
    elif axis.gathered >= SOME:
        yield f"{axis.gathered:.0%} of the weights stored split over {{}} and gathered"
    inner = [d for d in axis.dims if d != "vocabulary"]
    if inner:
        yield f"tensor parallel ({', '.join(inner)}) over {{}}"
    if "vocabulary" in axis.dims:
        yield "vocabulary split over {}"
    if axis.sequence >= BESIDE and axis.batch < MOST:
        yield "sequence split over {}"
    elif axis.works and axis.batch < MOST and not axis.dims and axis.gathered < SOME:
        yield "some ops split over {}"


def _zero(axis: Axis, plan: Plan) -> str:
    """The stage of ZeRO: what is stored split is the same in all of them; they differ in when gradients and weights are whole."""
    if not plan.settings.get("training"):
        return "weights stored split over {} and gathered when used"
    if LATE_REDUCTION.items() <= plan.settings.items():
        return "ZeRO-1 over {}"
    return "ZeRO-3 (FSDP) over {}" if axis.again >= axis.gathered / 2 else "ZeRO-2 over {}"


def _order(words: str) -> int:
    starts = ("ZeRO", "data parallel", "weights stored", "tensor parallel", "vocabulary", "sequence")
    return next((i for i, start in enumerate(starts) if words.startswith(start)), len(starts))


def _elements(weight: PlacedTensor) -> int:
    return prod(weight.shape)


def _part(values: Sequence[PlacedTensor], a: int, dim: int) -> float:
    return sum(x.spec[a] == dim for x in values) / max(1, len(values))


def _gathers(plan: Plan, a: int, windows: Sequence[str]) -> frozenset[str]:
    """Names and modules of the weights that are gathered over the axis in some windows. A weight that is cast first is known by its reader's
    module alone."""
    calls = [c for c in plan.collectives if c.kind == "all_gather" and c.hideable and c.phase in windows and a in plan.spec_mesh.axes(c.axis)]
    names = (c.value.replace("held:", "param:") if c.value.startswith("held:") else c.value for c in calls)
    return frozenset(name if name.startswith("param:") else f"module {c.module}" for name, c in zip(names, calls, strict=True))


def _is_in(weight: PlacedTensor, gathered: frozenset[str]) -> bool:
    return f"param:{weight.name}" in gathered or f"module {weight.module}" in gathered


def _work(plan: Plan) -> Iterator[Spec]:
    """The specs of what ops read and make; of what is only stored or handed on, none."""
    for name, op in plan.ops.items():
        if ":" not in name:
            yield from (*op.inputs, *op.outputs)


def _dims(plan: Plan, a: int, inside: Sequence[PlacedTensor]) -> Iterator[str]:
    """What weights that compute as they are split, and attention, are split by."""
    words = _vocabulary(plan)
    shares: dict[str, int] = {}
    for w in inside:
        is_table = words and len(w.shape) == 2 and w.shape[0] == words and split_by(w.spec[a]) == 0
        word = "vocabulary" if is_table else "experts" if _is_expert(w, a) else "hidden"
        shares[word] = shares.get(word, 0) + _elements(w)
    if any(op.inputs and len(op.inputs) > 2 and op.inputs[0][a] == 1 for name, op in plan.ops.items() if "scaled_dot_product" in name):
        yield "heads"
    total = sum(_elements(x) for x in plan.layouts if x.kind == "weight") or 1
    yield from (word for word in ("hidden", "experts", "vocabulary") if shares.get(word, 0) >= SOME * total)


def _is_expert(weight: PlacedTensor, a: int) -> bool:
    return len(weight.shape) == 3 and split_by(weight.spec[a]) == 0


def _vocabulary(plan: Plan) -> int:
    """Rows of the largest table that is looked up: of weights outside of repeated layers; 0 where nothing is."""
    if not any(name.startswith("embedding") for name in plan.ops):
        return 0
    return max((x.shape[0] for x in plan.layouts if x.kind == "weight" and len(x.shape) == 2 and not REPEATED.search(x.name)), default=0)
