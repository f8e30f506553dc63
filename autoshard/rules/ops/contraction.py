"""Products of matrices: a shard of a contracted dim leaves Partial sums."""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from autoshard.base.graph import Call
from autoshard.base.spec import PSUM, R
from autoshard.rules.family import Family
from autoshard.rules.notation import rule
from autoshard.rules.types import LocalContext, Row, Rule

aten = torch.ops.aten


def _matmul(text: str | Callable[[Call], str]) -> Rule:
    return rule(text, family=Family.MATMUL, partial="each")


def _biased(product: str, out: str) -> Rule:
    """beta * bias + alpha * (a @ b). A whole bias joins Partial products by being added in equal parts,
    which is what row-parallel layers need."""
    letters = out.split()

    def text(call: Call) -> str:
        missing = len(letters) - len(call.inputs[0].shape)
        return f"{' '.join(letters[missing:])} + {product} -> {out}"

    def rows(call: Call) -> tuple[Row, ...]:
        found = base.rows(call)
        return found + tuple(Row((R, *row.inputs[1:]), row.outputs) for row in found if row.inputs[0] == PSUM)

    base = rule(text, family=Family.MATMUL, partial="each")
    return replace(base, rows=rows, local=_share_bias, notation=f"[{out}] + {product} -> {out}")


def _share_bias(ctx: LocalContext, bias: Any, a: Any, b: Any, *, beta: Any = 1, alpha: Any = 1) -> Any:
    axes = [i for i, (p, q) in enumerate(zip(ctx.inputs[0], ctx.outputs[0], strict=True)) if q == PSUM and p != PSUM]
    parts = ctx.ranks(axes)
    return ctx.call.target(bias, a, b, beta=beta if parts == 1 else beta / parts, alpha=alpha)


def _trilinear_line(call: Call) -> str:
    """Every operand lacks the dims it is expanded along; products are summed over `sumdim`."""
    missing = [set(call.argument(f"expand{i}")) for i in (1, 2, 3)]
    n = len(call.inputs[0].shape) + len(missing[0])
    terms = [" ".join(f"d{d}" for d in range(n) if d not in gone) for gone in (*missing, set(call.argument("sumdim")))]
    return f"{', '.join(terms[:3])} -> {terms[3]}"


RULES = {
    aten.mm.default: _matmul("m k, k n -> m n"),
    aten.bmm.default: _matmul("b m k, b k n -> b m n"),
    aten.mv.default: _matmul("m k, k -> m"),
    aten.dot.default: _matmul("k, k ->"),
    aten.vdot.default: _matmul("k, k ->"),
    aten._trilinear.default: _matmul(_trilinear_line),
    aten.addmm.default: _biased("m k, k n", "m n"),
    aten.baddbmm.default: _biased("b m k, b k n", "b m n"),
    aten.addmv.default: _biased("m k, k", "m"),
}
