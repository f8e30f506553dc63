"""Models of transformers whose config says use_cache=True, as nearly all do, are captured without anybody's doing."""
from __future__ import annotations

import copy

import pytest
import torch
import transformers
from torch import nn

import autoshard
from autoshard.base.roles import Role
from autoshard.errors import TraceError
from autoshard.program.trace import trace

SMALL = {"vocab_size": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 1, "use_cache": True}
DECODER = {**SMALL, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1,
           "head_dim": 8}
FAMILIES = {
    "gpt2": {**SMALL, "n_layer": 1, "n_head": 2, "n_embd": 16, "n_positions": 16},
    "llama": DECODER,
    "qwen3": DECODER,
    "t5": {**SMALL, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2, "decoder_start_token_id": 0},
    "bart": {**SMALL, "d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2, "decoder_attention_heads": 2,
             "encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "max_position_embeddings": 16, "decoder_start_token_id": 0},
}


def build(family: str, **changes: object) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(family, **{**FAMILIES[family], **changes})
    auto = transformers.AutoModelForSeq2SeqLM if config.is_encoder_decoder else transformers.AutoModelForCausalLM
    ids = torch.randint(2, 64, (2, 8))
    return auto.from_config(config), {"input_ids": ids, "labels": ids}


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_graph_is_that_without_a_cache(family, training):
    (model, inputs), (plain, _) = build(family), build(family, use_cache=False)
    traced = trace(model, (), inputs, training=training)
    assert traced.graph.hash == trace(plain, (), inputs, training=training).graph.hash
    assert model.config.use_cache is True
    result = traced.calling.unflatten(tuple(torch.empty(0) for op in traced.graph.outputs(Role.USER)))
    assert result.past_key_values is None and result.loss is not None


def test_plan_verify_and_compile_without_a_word():
    model, inputs = build("gpt2", resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    assert autoshard.plan(model, "dp=2", (), inputs, cluster="cpu-gloo").status == "optimal"
    assert autoshard.verify(model, "dp=2", (), inputs, cluster="cpu-gloo").ok
    fast = autoshard.compile(copy.deepcopy(model), "one=1", cluster="cpu-gloo", cache=False)
    for step in (fast.train, fast.eval):
        step()
        got = fast(**inputs)
        assert got.past_key_values is None and type(got) is type(model(**inputs))
        torch.testing.assert_close(got.loss, model(**inputs).loss)
    with torch.no_grad():
        torch.testing.assert_close(fast(**inputs).logits, model.eval()(**inputs).logits)


def test_a_cache_asked_for_in_the_call_is_refused():
    model, inputs = build("gpt2")
    with pytest.raises(TraceError, match="DynamicCache.*use_cache=True out of the call"):
        trace(model, (), {**inputs, "use_cache": True})


class Prefixed(nn.Module):
    """Learned keys and values before those of the text, as peft's prefix tuning has them."""

    def __init__(self) -> None:
        super().__init__()
        self.model = build("gpt2", resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)[0].requires_grad_(False)
        self.prefix = nn.Parameter(torch.randn(2, 2, 3, 8))

    def forward(self, input_ids: torch.Tensor, **kwargs: torch.Tensor) -> transformers.utils.ModelOutput:
        cache = transformers.DynamicCache()
        cache.update(*self.prefix.unsqueeze(1).expand(-1, len(input_ids), -1, -1, -1), 0)
        return self.model(input_ids=input_ids, past_key_values=cache, **kwargs)


def test_a_cache_that_the_model_makes_is_left_out_of_its_output():
    model, (_, inputs) = Prefixed(), build("gpt2")
    fast = autoshard.compile(copy.deepcopy(model), "one=1", cluster="cpu-gloo", cache=False)
    got, expected = fast(**inputs), model(**inputs)
    assert got.past_key_values is None and expected.past_key_values is not None
    torch.testing.assert_close(got.logits, expected.logits)
    got.loss.backward(), expected.loss.backward()
    torch.testing.assert_close(fast.prefix.grad, model.prefix.grad)


class Looks(nn.Module):
    """A model of transformers that looks at data, so that it runs whole."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = build("gpt2", resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)[0]
        self.inner.register_forward_pre_hook(self._look, with_kwargs=True)

    @staticmethod
    def _look(module: nn.Module, args: tuple, kwargs: dict) -> None:
        if kwargs["input_ids"].max().item() > 1000:
            raise ValueError("no such token")

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.inner(input_ids=ids).logits * 2


def test_a_submodule_that_runs_whole():
    model, ids = Looks(), build("gpt2")[1]["input_ids"]
    fast = autoshard.compile(copy.deepcopy(model), "one=1", cluster="cpu-gloo", cache=False, fallback="replicate")
    torch.testing.assert_close(fast(ids), model(ids))
    assert any("inner" in note for note in fast.plan.notes)


class Own(nn.Module):
    """Its config has a flag of the same name that means something else."""

    def __init__(self) -> None:
        super().__init__()
        self.config = type("Config", (), {"use_cache": True})()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).sin() if self.config.use_cache else self.linear(x).cos()


def test_a_config_of_the_users_own_is_left_alone():
    ops = {str(op.target) for op in trace(Own(), (torch.randn(2, 4),)).graph.of_kind("call") if op.phase == "forward"}
    assert "aten.sin.default" in ops and "aten.cos.default" not in ops
