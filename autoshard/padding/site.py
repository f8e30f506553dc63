"""One op while it is rewritten: what it reads, brought into the form it needs, and what is written instead of it."""
from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch

from autoshard.base.graph import Call, Op, Ref, TensorMeta
from autoshard.padding.values import FINITE, LOWEST, Fill, Pad, Value, is_finite, joint
from autoshard.rules.ops.embedding_bag import EMBEDDING_BAG_BACKWARD
from autoshard.rules.registry import REPLICATE, rule_of

if TYPE_CHECKING:
    from autoshard.padding.walk import Walk

aten = torch.ops.aten
PRODUCTS = (aten.mm.default, aten.addmm.default)
"""They can be given what their last dim is filled with: their bias has it."""
GROWS = {aten.embedding_dense_backward.default: ("num_weights", 0), EMBEDDING_BAG_BACKWARD: ("num_weights", 0),
         aten.new_zeros.default: ("size", None), aten.zeros.default: ("size", None), aten.expand.default: ("size", None)}
"""Ops that make zeros at positions nobody asks for, or the same again: the argument that says how many, and the dim (None: any)."""

RESHAPES = {aten.view.default: "size", aten._unsafe_view.default: "size", aten.reshape.default: "shape", aten.view_copy.default: "size",
            aten.slice_backward.default: "input_sizes"}
"""The argument with the shape of the result, where the rule's `sizes` do not say."""


class FillWhereMade(Exception):
    """A product can fill its last dim by its bias, which is cheaper than where the value is read. Not an error: the walk starts again."""


@dataclass(frozen=True)
class Outcome:
    """An op of the new graph. `pads` of its outputs, by dim; `args` where they are not those of the op with `values` in place;
    `stays`: where its output is its only input in another form, which dims of that its dims are."""

    values: Sequence[Value]
    pads: Sequence[Mapping[int, Pad]]
    target: Any = None
    args: tuple[Any, ...] | None = None
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    stays: Mapping[int, int] = field(default_factory=dict)


@dataclass(eq=False)
class Site:
    walk: Walk
    op: Op
    values: list[Value]

    @property
    def call(self) -> Call:
        """The op of the old graph, without names."""
        return self.walk.graph.calls[self.op.name]

    # --- what is read ---

    def cut(self, value: Value, dims: Collection[int] | None = None, spills: bool = True) -> Value:
        """Without the pads of some dims (default: all)."""
        for d in sorted(value.pads if dims is None else dims):
            pad = value.pads[d]
            if spills:
                self.walk.spilled |= pad.sources
            rest = {k: p for k, p in value.pads.items() if k != d}
            shape = (*value.shape[:d], pad.true, *value.shape[d + 1:])
            value = self.emit(f"cut{d}", aten.slice.Tensor, value, rest, shape, d, 0, pad.true)
        return value

    def lengthened(self, value: Value, dim: int, like: Pad) -> Value:
        """As long as `like` along a dim, with zeros where it was not; a value that is one position there is left alone."""
        if dim in value.pads or value.shape[dim] != like.true:
            return value
        if value.dtype is not torch.bool and (grown := self._grown(value, dim, like)) is not None:
            return grown
        if len(value.shape) > 1 and self.op.phase == "forward":
            self.walk.spilled |= like.sources
        pads = {**value.pads, dim: like.filled(0.0)}
        behind = (*(0, 0) * (len(value.shape) - 1 - dim), 0, like.length - like.true)
        shape = (*value.shape[:dim], like.length, *value.shape[dim + 1:])
        return self.emit(f"longer{dim}", aten.constant_pad_nd.default, value, pads, shape, behind, 0)

    def filled(self, value: Value, dim: int, fill: Fill) -> Value:
        """With a number behind a dim, where there is something else."""
        pad = value.pads.get(dim)
        if pad is None or pad.fill == fill:
            return value
        if fill == LOWEST and (maker := self._product(value, dim)) is not None:
            self.walk.fills[maker] = fill
            raise FillWhereMade
        row = self.walk.constant(pad.true, pad.length, torch.bool)
        after = len(value.shape) - 1 - dim
        if after:
            row = self.emit(f"row{after}", aten.view.default, row, {}, (pad.length, *(1,) * after), (pad.length, *(1,) * after))
        pads = {d: p if d == dim or p.fill == fill else p.filled(joint(p.fill, fill)) for d, p in value.pads.items()}
        name = "lowest" if fill == LOWEST else str(fill).replace(".", "_").replace("-", "minus_")
        return self.emit(f"fill{dim}_{name}", aten.masked_fill.Scalar, value, {**pads, dim: pad.filled(fill)}, value.shape, row.ref, fill)

    def finite(self, value: Value) -> Value:
        """Without infinities and NaNs in its pads."""
        for dim, pad in value.pads.items():
            if not is_finite(pad.fill):
                value = self.filled(value, dim, 0.0)
        return value

    def _grown(self, value: Value, dim: int, like: Pad) -> Value | None:
        """Made longer where it is made, by an op that fills what it is not told about with zeros; the op in place may be dropped."""
        maker = self.walk.makers[value.ref]
        if maker.target is aten.expand.default and not self.is_new(maker, dim):
            return None
        argument, only = GROWS.get(maker.target, ("", None)) if maker.kind == "call" else ("", None)
        if not argument or only not in (None, dim):
            return None
        shape = (*value.shape[:dim], like.length, *value.shape[dim + 1:])
        places = [a.name for a in maker.target._schema.arguments]
        at, said = places.index(argument), like.length if only is not None else shape
        args = (*maker.args[:at], said, *maker.args[at + 1:])
        key = (value.ref, "grown", dim, self.op.phase)
        if key not in self.walk.written:
            name = f"{maker.name}_longer{dim}{_late(self.op)}"
            op = replace(maker, name=name, args=args, outputs=(TensorMeta(shape, value.dtype),), phase=self.op.phase)
            self.walk.put(op, [{**value.pads, dim: like.filled(FINITE if maker.target is aten.expand.default else 0.0)}])
            self.walk.written[key] = self.walk.values[Ref(name)]
        return self.walk.written[key]

    def is_new(self, expand: Op, dim: int) -> bool:
        """Whether the dim is one that an expand makes: longer, it repeats the same numbers."""
        source, (made,) = self.walk.values[expand.refs[0]], expand.outputs
        at = dim - (len(made.shape) - len(source.shape)) if made is not None else 0
        return source.is_finite and (at < 0 or source.shape[at] == 1)

    def _product(self, value: Value, dim: int) -> str | None:
        """The matrix product whose last dim this is, in another form; None where it is not one."""
        while value.ref in self.walk.came:
            before, stays = self.walk.came[value.ref]
            if dim not in stays:
                return None
            value, dim = before, stays[dim]
        maker = self.walk.makers[value.ref]
        can = maker.kind == "call" and maker.target in PRODUCTS and dim == 1 and maker.name not in self.walk.fills
        return maker.name if can and maker.name in self.walk.graph.by_name else None

    # --- what is written ---

    def emit(self, what: str, target: Any, value: Value, pads: Mapping[int, Pad], shape: Sequence[int], *args: Any, **kwargs: Any) -> Value:
        """An op before this one, on `value`; the same one once for a phase."""
        key = (value.ref, what, self.op.phase)
        if key not in self.walk.written:
            output = f"_out{value.ref.index}" if value.ref.index else ""
            name = f"{value.ref.op.replace(':', '_')}{output}_{what}{_late(self.op)}"
            op = replace(self.op, name=name, kind="call", target=target, args=(value.ref, *args), kwargs=tuple(kwargs.items()),
                         outputs=(TensorMeta(tuple(shape), value.dtype),))
            self.walk.put(op, [pads])
            self.walk.written[key] = self.walk.values[Ref(name)]
        return self.walk.written[key]

    def write(self, outcome: Outcome) -> bool:
        """The op itself; False, and nothing written, if it does not come out in the shapes that its pads say."""
        op, left = self.op, iter(outcome.values)
        args, kwargs = outcome.args, tuple(outcome.kwargs.items())
        if args is None:
            same = op.reading(lambda _: next(left).ref)
            args, kwargs = same.args, same.kwargs
        metas = tuple(m and TensorMeta(tuple(its[d].length if d in its else n for d, n in enumerate(m.shape)), m.dtype)
                      for m, its in zip(op.outputs, outcome.pads, strict=True))
        new = replace(op, target=outcome.target or op.target, args=args, kwargs=kwargs, outputs=metas)
        if any(outcome.pads) or any(v.pads for v in outcome.values):
            new = self._resized(new, outcome.values)
            if not self._holds(new):
                return False
        self.walk.put(new, outcome.pads)
        if outcome.stays:
            self.walk.came[Ref(op.name)] = (outcome.values[0], outcome.stays)
        return True

    def _resized(self, op: Op, values: Sequence[Value]) -> Op:
        """With the sizes among its arguments as they are now."""
        rule = rule_of(op.target)
        sizes = dict(rule.sizes)
        names = [a.name for a in op.target._schema.arguments] if hasattr(op.target, "_schema") else []
        if rule is not REPLICATE and op.target in RESHAPES:
            sizes[RESHAPES[op.target]] = "out0"
        for name, tensor in sizes.items():
            shape = op.outputs[0].shape if tensor == "out0" and op.outputs[0] else values[int(tensor.removeprefix("in"))].shape
            at = names.index(name)
            op = replace(op, args=(*op.args[:at], shape, *op.args[at + 1:])) if at < len(op.args) else replace(
                op, kwargs=tuple((k, shape if k == name else v) for k, v in op.kwargs))
        return op

    def _holds(self, op: Op) -> bool:
        """Whether the op makes of these shapes what is said; tried on tensors without memory."""
        def empty(leaf: Any) -> Any:
            if isinstance(leaf, tuple):
                return [empty(x) for x in leaf]
            made = self.walk.values[leaf] if isinstance(leaf, Ref) else None
            return leaf if made is None else torch.empty(made.shape, dtype=made.dtype, device="meta")

        try:
            result = op.target(*map(empty, op.args), **{k: empty(v) for k, v in op.kwargs})
        except (RuntimeError, ValueError, IndexError, NotImplementedError):
            return False  # it cannot run on these shapes, so it reads true ones
        results = result if isinstance(result, (tuple, list)) else (result,)
        return [m and m.shape for m in op.outputs] == [None if m is None else tuple(r.shape) for r, m in zip(results, op.outputs, strict=True)]


def _late(op: Op) -> str:
    """For names: the phase that an op is written in, but for forward."""
    return "" if op.phase == "forward" else f"_{op.phase}"
