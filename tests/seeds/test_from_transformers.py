"""Plans that models of transformers bring along: read as seeds and cuts, a row of `compare`, and ours written in their words."""
from __future__ import annotations

import json

import pytest
import torch
import transformers
from torch import nn

import autoshard
from autoshard.base.mesh import parse_mesh
from autoshard.errors import MeshError, UsageError
from autoshard.seeds.from_transformers import STYLES, generic, hand_plan

SMALL = {"vocab_size": 256, "hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 6,
         "num_key_value_heads": 2, "max_position_embeddings": 64, "use_cache": False}
X = {"input_ids": torch.zeros(4, 12, dtype=torch.int64), "labels": torch.zeros(4, 12, dtype=torch.int64)}


def llama(**changed) -> nn.Module:
    with torch.device("meta"):
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**SMALL, **changed}))


def qwen2() -> nn.Module:
    with torch.device("meta"):
        return transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**SMALL))


def neox() -> nn.Module:
    """Like GPT-2, with biases and a plan."""
    with torch.device("meta"):
        return transformers.GPTNeoXForCausalLM(transformers.GPTNeoXConfig(**{k: v for k, v in SMALL.items() if k != "num_key_value_heads"}))


def gpt2() -> nn.Module:
    with torch.device("meta"):
        return transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=256, n_embd=48, n_layer=2, n_head=6, n_positions=64))


def mixtral(**changed) -> nn.Module:
    with torch.device("meta"):
        return transformers.MixtralForCausalLM(transformers.MixtralConfig(**{**SMALL, **changed}, num_local_experts=4))


class Gated(nn.Module):
    """A fused projection of two parts, as in families that pack gate and up."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up, self.down = nn.Linear(48, 192, bias=False), nn.Linear(96, 48, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_up(x).chunk(2, -1)
        return self.down(torch.nn.functional.silu(gate) * up).square().mean()


def planned(model: nn.Module, mesh: str, **options):
    return autoshard.plan(model, mesh, (), X, cluster="h100-dgx", time_limit=8, **options)


@pytest.mark.parametrize("build", [llama, qwen2])
def test_parameters_lie_as_the_models_own_plan_has_them(build):
    model = build()
    plan = planned(model, "dp=2,tp=2", seeds={**autoshard.transformers_seeds(model, "dp=2,tp=2"), "input:*": ("dp", ...)})
    split = {generic(n): spec[1] for n, spec in plan.placements.items() if spec[1] >= 0}
    columns = {f"model.layers.*.{n}.weight" for n in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")}
    rows = {f"model.layers.*.{n}.weight" for n in ("self_attn.o_proj", "mlp.down_proj")}
    assert columns | {"model.embed_tokens.weight", "lm_head.weight"} <= split.keys() and rows <= split.keys()
    assert all(split[n] == 0 for n in columns | {"model.embed_tokens.weight", "lm_head.weight"})
    assert all(split[n] > 0 for n in rows)
    if build is qwen2:
        assert all(split[f"model.layers.*.self_attn.{n}_proj.bias"] == 0 for n in "qkv")


def test_what_has_no_words_or_does_not_divide_is_said_and_left_open(caplog):
    found = hand_plan(mixtral(), parse_mesh("tp=2"))
    assert str(found.seeds["model.layers.*.mlp.experts.gate_up_proj"]) == "-,tp,-" and not found.unsaid
    halves = hand_plan(mixtral(intermediate_size=97), parse_mesh("tp=2"))
    assert [line for line in halves.unsaid if "gate_up_proj" in line and "194 does not divide" in line], "194 divides by 2, its halves do not"
    uneven = hand_plan(llama(intermediate_size=90), parse_mesh("tp=4"))
    assert any("90 does not divide over 4 ranks" in line for line in uneven.unsaid)
    odd = Gated()
    odd.tp_plan = {"gate_up": "diagonal", "down": "rowwise"}
    assert list(autoshard.transformers_seeds(odd, "tp=2")) == ["down.weight"]
    assert "'diagonal': an unknown style" in caplog.text


def test_experts_have_a_plan_of_their_own():
    seeds = autoshard.transformers_seeds(mixtral(), "ep=2", kind="ep")
    assert {k: str(v) for k, v in seeds.items()} == {"model.layers.*.mlp.experts.gate_up_proj": "ep,-,-",
                                                     "model.layers.*.mlp.experts.down_proj": "ep,-,-"}


def test_every_style_that_transformers_has_is_known():
    from transformers.integrations.tensor_parallel import ALL_PARALLEL_STYLES

    assert set(ALL_PARALLEL_STYLES) <= set(STYLES), f"new in transformers: {set(ALL_PARALLEL_STYLES) - set(STYLES)}"


def test_mistakes_are_named():
    with pytest.raises(UsageError, match="GPT2LMHeadModel has no tp_plan"):
        autoshard.transformers_seeds(gpt2(), "tp=2")
    with pytest.raises(UsageError, match="Linear has no tp_plan"):
        autoshard.transformers_seeds(nn.Linear(4, 4), "tp=2")
    with pytest.raises(UsageError, match="LlamaForCausalLM has no ep_plan; it has tp_plan, pp_plan"):
        autoshard.transformers_seeds(llama(), "tp=2", kind="ep")
    with pytest.raises(UsageError, match="is not one of tp, ep"):
        autoshard.transformers_seeds(llama(), "tp=2", kind="sp")
    with pytest.raises(MeshError, match="no mesh axis 'tp'; the axes are d"):
        autoshard.transformers_seeds(llama(), "d=2", axis="tp")


def test_cuts_are_where_transformers_cuts():
    model = llama(num_hidden_layers=5)
    assert autoshard.transformers_cuts(model, 2) == ("model.layers.2",)
    assert autoshard.transformers_cuts(model, 5) == tuple(f"model.layers.{i}" for i in range(1, 5))
    assert autoshard.transformers_cuts(model, 1) == ()
    with pytest.raises(UsageError, match="5 layers, which are no 6 stages"):
        autoshard.transformers_cuts(model, 6)
    with pytest.raises(UsageError, match="has no pp_plan"):
        autoshard.transformers_cuts(gpt2(), 2)


# --- ours in their words ---

@pytest.mark.parametrize("build", [llama, qwen2])
def test_a_plan_that_can_be_said_is_the_models_own_again(build):
    model = build()
    plan = planned(model, "tp=2", seeds=autoshard.transformers_seeds(model, "tp=2"))
    said = autoshard.transformers_plan(plan, model)
    own = {k: "colwise" if v == "colwise_gather_output" else v for k, v in model.tp_plan.items()}
    found = {k: "colwise" if v == "colwise_gather_output" else v for k, v in said.tp_plan.items()}
    assert own.items() <= found.items()
    assert all("layernorm" in line or "norm" in line for line in said.unsaid), said.unsaid


def test_what_cannot_be_said_is_listed():
    model = llama()
    columns = {f"model.layers.{i}.mlp.up_proj.weight": ("tp", None) if i else (None, None) for i in range(2)}
    plan = planned(model, "dp=2,tp=2", seeds={**columns, "model.norm.weight": ("tp",), "model.layers.*.mlp.down_proj.weight": ("dp", "tp")})
    said = autoshard.transformers_plan(plan, model)
    text = "\n".join(said.unsaid)
    assert "model.layers.0.mlp.up_proj is whole" in text and "a style holds for all layers" in text
    assert "model.norm (LlamaRMSNorm): weight split along dim 0, for which there is no style" in text
    assert "split over dp too" in text
    assert said.tp_plan["model.layers.*.mlp.down_proj"] == "rowwise"


def test_a_style_of_ours_is_one_of_theirs():
    from transformers.integrations.tensor_parallel import ALL_PARALLEL_STYLES

    model = neox()
    plan = planned(model, "tp=2", seeds={"*.dense_h_to_4h.weight": ("tp", None), "*.dense_4h_to_h.weight": (None, "tp")})
    said = autoshard.transformers_plan(plan, model).tp_plan
    assert set(said.values()) <= set(ALL_PARALLEL_STYLES)
    assert said["gpt_neox.layers.*.mlp.dense_h_to_4h"] == "colwise" and said["gpt_neox.layers.*.mlp.dense_4h_to_h"] == "rowwise"


def test_two_parts_split_one_by_one_are_packed():
    model = Gated()
    model.tp_plan = {"gate_up": "packed_colwise", "down": "rowwise"}
    seeds = autoshard.transformers_seeds(model, "tp=2")
    plan = autoshard.plan(model, "tp=2", (torch.randn(8, 48),), seeds=seeds, cluster="cpu-gloo")
    assert autoshard.transformers_plan(plan, model).tp_plan == model.tp_plan, [x for x in plan.layouts if x.kind == "weight"]


# --- a row of compare ---

@pytest.mark.parametrize("mesh, axes", [("tp=2", "tensor tp"), ("dp=2,tp=2", "data dp, tensor tp")])
def test_compare_has_a_row_for_the_models_own_plan(run, tmp_path, mesh, axes):
    config = tmp_path / "config.json"
    config.write_text(json.dumps({**SMALL, "model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]}))
    code, out, err = run("compare", "--hf", config, "--mesh", mesh, "--batch", 4, "--seq", 12, "--json", "--save-dir", tmp_path)
    assert code == 0, err
    rows = {r["name"]: r for r in json.loads(out)["rows"]}
    own, chosen = rows["its own tp_plan"], rows["chosen by the search"]
    assert own["axes"] == axes and own["fits"] and own["step_s"] >= chosen["step_s"]
    plan = autoshard.Plan.load(tmp_path / "its-own-tp-plan.json")
    a = plan.mesh.index("tp")
    assert plan.placements["model.layers.0.mlp.up_proj.weight"][a] == 0 and plan.placements["model.norm.weight"][a] == -1


def test_compare_without_such_a_plan_has_no_row(run):
    code, out, err = run("compare", "gpt:tiny", "--mesh", "tp=2", "--cluster", "cpu-gloo", "--json")
    assert code == 0, err
    assert "its own tp_plan" not in out
