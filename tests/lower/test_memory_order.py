"""Fake values of a lowered graph lie in memory as what the kernels make."""
from __future__ import annotations

import pytest
import torch

from autoshard.base.mesh import Mesh
from autoshard.lower import emit

aten = torch.ops.aten
ARGUMENTS = {
    aten.softplus_backward.default: (1, 20), aten.elu_backward.default: (1, 1, 1, False), aten.hardtanh_backward.default: (-1, 1), aten.logit_backward.default: (None,),
    aten.native_dropout_backward.default: (2.0,),
}
"""What comes after the tensors, and in elu's case between them."""


def call(op):
    first, second = torch.rand(4, 6, 16).transpose(1, 2), torch.rand(4, 16, 6)
    rest = ARGUMENTS.get(op, ())
    if op is aten.elu_backward.default:
        return (first, *rest, second)
    return (first, second > 0.5 if op is aten.native_dropout_backward.default else second, *rest)


@pytest.mark.parametrize("op", sorted(emit.LAID_AS_PRODUCTS, key=str), ids=str)
def test_results_lie_as_kernels_make_them(op):
    args, emitter = call(op), emit.Emitter(Mesh(("d",), (2,)))
    tensors = [emitter.placeholder("x", tuple(a.shape), a.dtype, a.stride()) if isinstance(a, torch.Tensor) else a for a in args]
    with emitter.part(emit.Part("compute", "op", "backward")):
        made = op(*tensors)
    assert emitter.value(made).stride() == op(*args).stride() != op(*(a.contiguous() if isinstance(a, torch.Tensor) else a for a in args)).stride()
