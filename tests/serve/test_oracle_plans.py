"""Plans of single tokens that are known to be right, found by the search: no seed holds anything unless a test says so."""
from __future__ import annotations

import pytest
import torch

from autoshard.cost.cluster import load_cluster
from tests.support.one_token import kept, plan_of, planned

CAPTURED = "h100-dgx:captured"
QWEN_3B = {"width": 2048, "heads": 16, "kv_heads": 2, "hidden": 11008, "vocab": 512, "layers": 1, "context": 4096}
LLAMA_70B = {"width": 8192, "heads": 64, "kv_heads": 8, "hidden": 28672, "vocab": 512}
LAYER_70B = 2 * (2 * 8192**2 + 2 * 8192**2 // 8 + 3 * 8192 * 28672)
"""Bytes of the weights of a layer."""
GLM_9B = {"width": 4096, "heads": 32, "kv_heads": 2, "hidden": 13696, "vocab": 512, "layers": 1, "context": 4096}


def test_one_sequence_on_eight_gpus_is_split_by_heads_with_two_reductions_a_layer():
    """Where kernels and small buffers are cheap. Where each kernel is started by itself, computing attention whole saves more."""
    plan = planned("tp=8", layers=2, cluster=CAPTURED)
    assert kept(plan) == {(1,)} and [c.kind for c in plan.collectives] == ["all_reduce"] * 4 + ["all_gather"]
    assert all(0 in spec or 1 in spec for name, spec in plan.placements.items() if ".attention." in name or ".feed_forward." in name)


def test_eight_gpus_that_split_the_batch_give_nearly_eight_times_the_tokens():
    one, eight = (planned(f"dp={n}", batch=512 * n, context=512, layers=1, vocab=512) for n in (1, 8))
    assert kept(eight) == {(0,)} and {c.kind for c in eight.collectives} <= {"all_gather"} and len(eight.collectives) == 1
    assert one.objective_s < eight.objective_s < 1.15 * one.objective_s


def test_a_token_of_70b_is_fastest_with_tensor_parallelism_over_all_eight():
    """Two reductions a layer, so 160 of 80 layers; 64 sequences of 4,096 read 10.7 GB of keys and values a rank beside 17.1 of weights."""
    one = planned("tp=8", layers=2, cluster=CAPTURED, **LLAMA_70B)
    assert kept(one) == {(1,)} and [c.kind for c in one.collectives] == ["all_reduce"] * 4
    bandwidth, keys = load_cluster(CAPTURED).device.memory_bandwidth, 2 * 64 * 4096 * 8 * 128 * 2 / 8
    many = planned("dp=2,tp=4", batch=64, context=4096, layers=1, cluster=CAPTURED, **LLAMA_70B)
    assert kept(many) == {(1, 1)} and many.objective_s == planned("tp=8", batch=64, context=4096, layers=1, cluster=CAPTURED, **LLAMA_70B).objective_s
    assert (LAYER_70B / 8 + keys) / bandwidth < many.objective_s < 3 * (LAYER_70B / 8 + keys) / bandwidth
    assert 80 * keys == pytest.approx(10.7e9, rel=0.01) and 80 * LAYER_70B / 8 == pytest.approx(17.1e9, rel=0.01)


def test_many_sequences_of_70b_are_split_by_batch_on_one_axis_and_by_heads_on_the_other():
    """Weights are on fewer ranks than there are, which no plan of one axis has."""
    sizes = {"batch": 1024, "context": 512, "layers": 1, "cluster": CAPTURED, **LLAMA_70B}
    both = planned("dp=2,tp=4", **sizes)
    assert {frozenset(spec) for spec in kept(both)} == {frozenset((0, 1))}
    assert both.objective_s < 0.9 * planned("tp=8", **sizes).objective_s


def test_a_million_tokens_of_eight_heads_lie_on_two_axes_by_heads_and_by_sequence():
    tight = planned("h=8,t=2", context=2**20, layers=1, vocab=512, memory="420MiB")
    assert kept(tight) == {(1, 2)}
    assert tight.memory["buffers"] == pytest.approx(2 * 8 * 2**20 * 128 * 2 / 16, rel=0.01)


def test_two_heads_of_keys_on_eight_ranks_are_held_in_groups():
    """Query heads lie on both axes, those of keys on the first, so four ranks hold the same keys."""
    plan = planned("kv=2,g=4", batch=4, cluster=CAPTURED, held=(("*keys", "-,kv,-,-"), ("*values", "-,kv,-,-")), **GLM_9B)
    free = planned("kv=2,g=4", batch=4, cluster=CAPTURED, **GLM_9B)  # whole values cost as much: a product so small takes what its kernel takes
    assert plan.objective_s == free.objective_s and (1, -1) in kept(free)
    assert kept(plan) == {(1, -1)} and [c.kind for c in plan.collectives] == ["all_reduce"] * 2
    assert plan.objective_s < planned("tp=8", batch=4, cluster=CAPTURED, **GLM_9B).objective_s


def test_heads_of_keys_are_never_cut():
    """Of a model whose attention is so small that computing it whole, or by batch, is cheaper by these prices."""
    grouped = planned("kv=2,g=4", held=(("*keys", "-,kv,-,-"), ("*values", "-,kv,-,-"), ("*wq.weight", "kv*g,-")), **QWEN_3B)
    assert kept(grouped) == {(1, -1)} and not any(c.kind == "all_to_all" for c in grouped.collectives)
    assert all(3 not in spec and not any(c.kind == "all_to_all" for c in plan.collectives) for plan in
               (planned("tp=8", batch=n, **QWEN_3B) for n in (1, 64)) for spec in kept(plan))


def test_attention_with_one_head_of_keys_splits_the_batch_and_its_experts_are_split():
    """512 sequences on 8 GPUs: 8 GiB of keys and values, by batch; every expert is on one rank."""
    transformers = pytest.importorskip("transformers")
    from autoshard.serve.cached_model import CachedModel
    from autoshard.serve.generator import example_step

    with torch.device("meta"):
        config = transformers.Qwen3MoeConfig(
            vocab_size=512, hidden_size=4096, moe_intermediate_size=1536, num_hidden_layers=1, num_attention_heads=32, num_key_value_heads=1,
            head_dim=128, num_experts=128, num_experts_per_tok=8, max_position_embeddings=4096)
        cached = CachedModel(transformers.AutoModelForCausalLM.from_config(config).bfloat16().eval(), 512, 4096).eval()
        given = example_step(cached, 512, 1, 4095)
    plan = plan_of(cached, given, "ep=8", "h200-dgx:captured")
    experts = {spec for name, spec in plan.placements.items() if ".experts." in name}
    attention = {spec for name, spec in plan.placements.items() if "self_attn" in name}
    assert (kept(plan), experts, attention) == ({(0,)}, {(0,)}, {(-1,)})
