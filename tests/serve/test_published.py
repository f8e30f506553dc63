"""Seconds and plans of single tokens beside bounds by bandwidth and published measurements. Layers repeat, so two sizes give all of them."""
from __future__ import annotations

from functools import cache

import pytest
import torch

from autoshard.base.mesh import mesh_of
from autoshard.cost.cluster import load_cluster
from autoshard.decide.options import Options
from autoshard.decide.phase_timer import PhaseTimer
from autoshard.planner.stages import plan_traced
from autoshard.program.trace import trace
from models.llama import decoder

LLAMA_8B, QWQ_32B = {}, {"width": 5120, "heads": 40, "kv_heads": 8, "hidden": 27648, "vocab": 152064}
MS = 1e-3


@cache
def planned(mesh, batch=1, context=1024, cluster="h100-dgx", memory=None, held=(), **sizes):
    """The plan of one token, bfloat16."""
    with torch.device("meta"):
        model, inputs = decoder("8B", batch=batch, context=context, **sizes)
        given = inputs(1, context - 1)
    options = Options.of({"optimizer": "none", "cluster": cluster, "memory_budget": memory, "time_limit": 30.0}, seeds=dict(held))
    return plan_traced(trace(model.bfloat16(), given, training=False), mesh_of(mesh), options, clock=PhaseTimer(), profile=load_cluster(cluster))


def seconds_of(layers, mesh, **how):
    one, two = (planned(mesh, layers=n, **how).objective_s for n in (1, 2))
    return one + (layers - 1) * (two - one)


def kept(plan):
    return {spec for name, spec in plan.placements.items() if "keys" in name or "values" in name}


def test_a_token_of_one_gpu_takes_longer_than_reading_its_weights():
    weights = 2 * (32 * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336) + 128256 * 4096)
    least = weights / load_cluster("h100-dgx").device.memory_bandwidth
    assert least == pytest.approx(4.48 * MS, rel=0.01)
    assert least < seconds_of(32, "tp=1", **LLAMA_8B) < 2.5 * least


def test_what_tensor_parallelism_saves_is_what_was_measured():
    """QwQ-32B on A100s, batch 1, vLLM issue 16300: 27.5, 19.6 and 15.75 ms a token on 2, 4 and 8, which is proportional to 1/tp but for a
    constant. That constant is of other kernels than those of eager PyTorch; what remains is bandwidth."""
    found = {tp: seconds_of(64, f"tp={tp}", cluster="a100-dgx", **QWQ_32B) for tp in (2, 4, 8)}
    assert (found[2] - found[8]) / (1 / 2 - 1 / 8) == pytest.approx((27.5 - 15.75) * MS / (1 / 2 - 1 / 8), rel=0.1)
    assert (found[2] - found[4]) / (found[4] - found[8]) == pytest.approx(2, rel=0.1), "proportional to 1/tp"
    assert all(found[tp] > 65.5e9 / tp / load_cluster("a100-dgx").device.memory_bandwidth for tp in found)


def test_eight_gpus_that_split_the_batch_give_nearly_eight_times_the_tokens():
    one, eight = (planned(f"dp={n}", batch=512 * n, context=512, layers=1, vocab=512) for n in (1, 8))
    assert kept(eight) == {(0,)} and {c.kind for c in eight.collectives} <= {"all_gather"} and len(eight.collectives) == 1
    assert one.objective_s < eight.objective_s < 1.15 * one.objective_s


def test_a_million_tokens_of_eight_heads_lie_on_two_axes_by_heads_and_by_sequence():
    tight = planned("h=8,t=2", context=2**20, layers=1, vocab=512, memory="420MiB")
    assert kept(tight) == {(1, 2)}
    assert tight.memory["buffers"] == pytest.approx(2 * 8 * 2**20 * 128 * 2 / 16, rel=0.01)


def test_two_heads_of_keys_on_eight_ranks_are_held_in_groups_and_never_cut():
    sizes = {"width": 2048, "heads": 16, "kv_heads": 2, "hidden": 11008, "vocab": 512, "layers": 1, "context": 4096}
    grouped = planned("kv=2,g=4", held=(("*keys", "-,kv,-,-"), ("*values", "-,kv,-,-"), ("*wq.weight", "kv*g,-")), **sizes)
    assert kept(grouped) == {(1, -1)} and not any(c.kind == "all_to_all" for c in grouped.collectives)
    assert all(3 not in spec and not any(c.kind == "all_to_all" for c in plan.collectives) for plan in
               (planned("tp=8", batch=n, **sizes) for n in (1, 64)) for spec in kept(plan))
