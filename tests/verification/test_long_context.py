"""Models with the sequence split all the way, against one device: causal attention by positions, balanced over ranks."""
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import autoshard
from tests.support.long_context import along_sequence, build, loss_of


@pytest.mark.parametrize("name, mesh, axes, seq", [
    ("llama", "cp=4", "cp", 36),        # 9 rows on a rank: halves of 5 and 4
    ("gpt", "a=2,b=3", "a*b", 30),      # two axes, 5 rows on a rank
    ("llama", "dp=2,cp=5", "dp*cp", 10),  # one row on a rank: nothing to balance
])
def test_same_numbers_as_one_device(name, mesh, axes, seq):
    model, inputs = build(name, seq)
    report = autoshard.verify(model, mesh, inputs, loss_fn=loss_of(name), seeds=along_sequence(name, axes), plans=("searched",))
    assert report.ok and report.tolerance == 1e-9, str(report)


class Masked(nn.Module):
    """Attention under a mask that the caller gives."""

    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, x, mask):
        q, k, v = (t.unflatten(-1, (2, 8)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        return self.out(F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).flatten(2))


def test_a_mask_given_as_a_tensor_is_split_with_the_queries():
    torch.manual_seed(0)
    inputs = torch.randn(1, 12, 16), torch.ones(12, 12).tril().bool()[None, None]
    seeds = {"_scaled_dot_product_flash_attention_for_cpu_0": "-,-,cp,-", "input:0": "-,cp,-"}
    report = autoshard.verify(Masked(), "cp=4", inputs, seeds=seeds, plans=("searched",))
    assert report.ok, str(report)
    plan = autoshard.plan(Masked(), "cp=4", inputs, seeds=seeds)
    read = plan.ops["_scaled_dot_product_flash_attention_for_cpu_0"].inputs[-1]
    assert read == (2,), f"the mask is read by rows, not whole: {read}"
