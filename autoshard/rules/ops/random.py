"""Random ops: every dim of the result splits, Partial never passes.

Each rank runs the op itself on its piece. That replicas agree and shards differ is the lowering's work: it
runs every op that torch tags as random under a seed of (step, op, piece of the result); see base/random.py. So
one piece per rank is all a rule has to say, and numbers differ from those the unsharded model would draw.
"""
from __future__ import annotations

from typing import Any

import torch

from autoshard.base.graph import Call
from autoshard.rules.family import Family
from autoshard.rules.notation import rule
from autoshard.rules.parts import dims_but

aten = torch.ops.aten


def _drawn(line: Any, sizes: tuple[tuple[str, str], ...] = ()) -> Any:
    return rule(line, family=Family.RANDOM, sizes=sizes)


def _samples_line(call: Call) -> str:
    """The weights of one draw stay together."""
    dims = dims_but(call, (-1,)).split()
    return f"{' '.join(dims)} -> {' '.join((*dims[:-1], 's!'))}"


SIZE = (("size", "out0"),)

RULES = {
    aten.native_dropout.default: _drawn("... -> ..., ..."),
    aten.rrelu_with_noise_functional.default: _drawn("..., ... -> ..., ..."),
    **{op: _drawn("... -> ...") for op in (
        aten.bernoulli.default, aten.bernoulli.p, aten.rand_like.default, aten.uniform.default,
        aten.randn_like.default, aten.normal_functional.default, aten.normal.Tensor_float, aten.normal.float_Tensor,
        aten.randint_like.default, aten.randint_like.low_dtype, aten.exponential.default, aten.poisson.default)},
    **{op: _drawn("..., ... -> ...") for op in (aten.bernoulli.Tensor, aten.normal.Tensor_Tensor)},
    **{op: _drawn("-> ...", SIZE) for op in (
        aten.rand.default, aten.randn.default, aten.normal.float_float, aten.randint.default, aten.randint.low)},
    aten.randperm.default: _drawn("-> n!"),
    aten.multinomial.default: _drawn(_samples_line),
}
