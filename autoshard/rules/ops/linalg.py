"""Decompositions and solves of batches of matrices: dims before the last two split, and so do columns that are solved for each by
itself. A matrix stays whole. Other ops of torch.linalg have DTensor's rows."""
from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch

from autoshard.base.graph import Call
from autoshard.rules.family import Family
from autoshard.rules.notation import rule
from autoshard.rules.parts import contiguous_inputs
from autoshard.rules.types import Rule

aten = torch.ops.aten


def _svd_line(call: Call) -> str:
    return "... m! n! -> ... m! u!, ... k!, ... v! n!" if call.argument("compute_uv") else "... m! n! -> u!, ... k!, v!"


def _eigh_line(call: Call) -> str:
    return f"... m! n! -> ... k!, {'... m! k!' if call.argument('compute_v') else 'v!'}"


def _qr_line(call: Call) -> str:
    """Mode "r" leaves out Q, an empty tensor."""
    return f"... m! n! -> {'q!' if call.argument('mode') == 'r' else '... m! k!'}, ... k! n!"


def _columns(call: Call, matrices: str) -> str:
    """Solving A X = B keeps the columns of B apart, solving X A = B its rows."""
    b = "... n! c" if call.argument("left") else "... c n!"
    return f"{matrices}, {b} -> {b}"


def _of_matrices(line: Any, **more: Any) -> Rule:
    return rule(line, family=Family.REDUCTION, **more)


def _solves(line: Any, b: int, triangles: int) -> Rule:
    """`b`: which input holds the right-hand sides; `triangles`: triangular solves in the op, each a multiply and an add per number of
    the right-hand side and row of the matrix, of which half are 0."""
    def flops(call: Call, inputs: Sequence[Any], outputs: Sequence[Any]) -> Any:
        return float(triangles) * prod(inputs[b]) * call.inputs[0 if b else 1].shape[-1]

    return rule(line, family=Family.MATMUL, flops=flops, partial="each")


RULES = {
    aten._linalg_svd.default: _of_matrices(_svd_line),
    aten._linalg_eigh.default: _of_matrices(_eigh_line),
    aten.linalg_qr.default: _of_matrices(_qr_line),
    # what they factor, the matrix or the transposed one, depends on its strides: the trace gives them a contiguous one
    aten._linalg_det.default: _of_matrices("... m! n! -> ..., ... m! n!, ... p!", local=contiguous_inputs),
    aten._linalg_slogdet.default: _of_matrices("... m! n! -> ..., ..., ... m! n!, ... p!", local=contiguous_inputs),
    aten.linalg_pinv.atol_rtol_tensor: _of_matrices("... m! n!, ..., ... -> ... n! m!"),
    aten.linalg_solve_triangular.default: _solves(lambda call: _columns(call, "~... a! b!"), 1, 1),
    aten.linalg_lu_solve.default: _solves(lambda call: _columns(call, "~... a! b!, ~... p!"), 2, 2),
    aten.cholesky_solve.default: _solves("... n! c, ~... a! b! -> ... n! c", 0, 2),
}
