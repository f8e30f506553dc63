"""What depends on no weight is in one order, whatever the order in which a loop made it."""
from __future__ import annotations

import pytest
import torch
from torch import nn

from autoshard.program.interpret import run
from autoshard.program.trace import trace

KINDS = ("far", "near", "none")


class Kinds(nn.Module):
    """Masks and angles per kind of layer, as in models of transformers, made in a loop over `order`. `weighted`: a weight is read in the loop, too."""

    def __init__(self, order: tuple[str, ...], weighted: bool = False) -> None:
        super().__init__()
        self.order, self.weighted = order, weighted
        self.layers = nn.ModuleList([nn.Linear(8, 8) for _ in KINDS])
        for i, kind in enumerate(KINDS):
            self.register_buffer(f"{kind}_speed", torch.linspace(0.1, 1.0 + i, 8))

    def forward(self, x: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        angles, masks = {}, {}
        for kind in self.order:
            there = at[:, None].double()
            there.square()  # which nothing reads
            angles[kind] = torch.cos(there * self.get_buffer(f"{kind}_speed"))
            masks[kind] = (at[:, None] - at < len(kind)) & (at[:, None] >= at) if kind != "none" else at[:, None] >= at
            if self.weighted:
                angles[kind] = angles[kind] * self.layers[0].bias
        for kind, layer in zip(KINDS, self.layers, strict=True):
            x = masks[kind].double() @ torch.tanh(layer(x) * angles[kind])
        return x


def made(order: tuple[str, ...], weighted: bool = False):
    torch.manual_seed(0)
    model = Kinds(order, weighted).double()
    return model, trace(model, (torch.zeros(6, 8, dtype=torch.float64), torch.arange(6)))


def test_loops_in_another_order_give_one_program():
    (model, one), *others = (made(order) for order in (KINDS, KINDS[::-1], ("near", "none", "far")))
    for _, other in others:
        assert other.graph.hash == one.graph.hash
        assert [op.name for op in other.graph.ops] == [op.name for op in one.graph.ops]
    x, at = torch.randn(6, 8, dtype=torch.float64), torch.arange(6) * 2
    with torch.no_grad():
        mine = run(others[0][1], dict((*model.named_parameters(), *model.named_buffers())), (x, at)).users[0]
    torch.testing.assert_close(mine, model(x, at), rtol=0, atol=1e-14)


def test_what_reads_weights_keeps_the_order_of_the_trace():
    assert made(KINDS, weighted=True)[1].graph.hash != made(KINDS[::-1], weighted=True)[1].graph.hash


def test_what_nothing_reads_may_be_read_by_what_nothing_reads():
    """A mask made in a loop, and a part of it that is taken behind the first layer; neither is used."""
    class Unused(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x):
            masks = [x > i for i in range(2)]
            y = self.layer(x)
            masks[0][:, 2:]
            return y

    model, x = Unused().double(), torch.randn(6, 8, dtype=torch.float64)
    traced = trace(model, (x,))
    assert torch.equal(run(traced, dict(model.named_parameters()), (x,)).users[0], model(x))


@pytest.mark.parametrize("family", ["Gemma3TextConfig", "ModernBertConfig"])
def test_models_of_transformers_that_go_through_a_set(family, monkeypatch):
    """Their order, forwards and backwards."""
    transformers = pytest.importorskip("transformers")
    config = getattr(transformers, family)(vocab_size=64, hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2,
                                           num_key_value_heads=2, head_dim=8, sliding_window=4, pad_token_id=0, bos_token_id=1, eos_token_id=2, cls_token_id=1, sep_token_id=2)
    config.layer_types = ["sliding_attention", "full_attention"]
    with torch.device("meta"):
        model = (transformers.AutoModelForMaskedLM if "Bert" in family else transformers.AutoModelForCausalLM).from_config(config)
    ids, hashes = torch.zeros(2, 6, dtype=torch.int64), set()
    for back in (False, True):
        monkeypatch.setitem(vars(__import__(type(model).__module__, fromlist="x")), "set", lambda its, back=back: sorted(its, reverse=back))
        hashes.add(trace(model, (), {"input_ids": ids, "attention_mask": torch.ones_like(ids)}).graph.hash)
    assert len(hashes) == 1
