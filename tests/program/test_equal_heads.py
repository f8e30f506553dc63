"""Attention whose values have fewer or more features than its keys is one op, and computes the same."""
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import autoshard
from autoshard.program.trace import trace

aten = torch.ops.aten
ATTENTION = aten._scaled_dot_product_flash_attention_for_cpu.default


class Latent(nn.Module):
    """Two heads of `features` for queries and keys, and of `values` for values."""

    def __init__(self, features: int, values: int, mask: bool = False, scale: float | None = None, dropout: float = 0.0):
        super().__init__()
        self.mask, self.scale, self.dropout = mask, scale, dropout
        self.q, self.k, self.v = nn.Linear(8, 2 * features), nn.Linear(8, 2 * features), nn.Linear(8, 2 * values)

    def forward(self, x):
        q, k, v = (linear(x).view(*x.shape[:2], 2, -1).transpose(1, 2) for linear in (self.q, self.k, self.v))
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril() if self.mask else None
        out = F.scaled_dot_product_attention(q, k, v, mask, self.dropout, not self.mask, scale=self.scale)
        return out.transpose(1, 2).flatten(2)


def built(*args, **more):
    torch.manual_seed(0)
    return Latent(*args, **more).double(), torch.randn(2, 5, 8, dtype=torch.float64)


@pytest.mark.parametrize("how", [{}, {"mask": True}, {"scale": 0.3}], ids=["causal", "mask", "scale"])
@pytest.mark.parametrize("sizes", [(6, 4), (4, 6)], ids=["fewer", "more"])
def test_it_is_one_op_and_verifies(sizes, how):
    model, x = built(*sizes, **how)
    graph = trace(model, (x,)).graph
    found = [op for op in graph.of_kind("call") if op.target == ATTENTION]
    assert len(found) == 1 and "test_equal_heads.py" in found[0].source, "the line is the user's"
    assert not any(op.outputs[0].shape[-2:] == (5, 5) and op.phase == "backward" for op in graph.of_kind("call")), "scores are not kept"
    report = autoshard.verify(model, "tp=2", (x,), cluster="cpu-gloo")
    assert report.ok, report


def test_heads_of_one_size_stay_as_they_are():
    model, x = built(4, 4)
    targets = {op.target for op in trace(model, (x,)).graph.of_kind("call")}
    assert ATTENTION in targets and not targets & {aten.constant_pad_nd.default, aten.slice.Tensor}


def test_dropout_has_no_such_kernel():
    model, x = built(6, 4, dropout=0.5)
    assert ATTENTION not in {op.target for op in trace(model, (x,)).graph.of_kind("call")}
