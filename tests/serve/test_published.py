"""Seconds of single tokens and of prompts beside bounds and published measurements."""
from __future__ import annotations

import pytest

from autoshard.cost.cluster import load_cluster
from tests.support.one_token import seconds_of

LLAMA_7B = {"width": 4096, "heads": 32, "kv_heads": 32, "hidden": 11008, "vocab": 32000}
LLAMA_70B = {"width": 8192, "heads": 64, "kv_heads": 8, "hidden": 28672, "vocab": 128256}
QWQ_32B = {"width": 5120, "heads": 40, "kv_heads": 8, "hidden": 27648, "vocab": 152064}
MS = 1e-3


def matrices(layers, width=4096, heads=32, kv_heads=8, hidden=14336, vocab=128256):
    """Elements of the weights that every token is multiplied by."""
    return layers * (2 * width**2 + 2 * width**2 * kv_heads // heads + 3 * width * hidden) + vocab * width


def test_a_token_of_one_gpu_takes_longer_than_reading_its_weights():
    least = 2 * matrices(32) / load_cluster("h100-dgx").device.memory_bandwidth
    assert least == pytest.approx(4.48 * MS, rel=0.01)
    assert least < seconds_of(32, "tp=1", cluster="h100-dgx:captured") < seconds_of(32, "tp=1") < 2.5 * least


@pytest.mark.parametrize(("cluster", "ranks", "layers", "sizes", "how", "measured"), [
    pytest.param("h200-dgx", 1, 32, {}, {"batch": 8, "context": 160}, 6.51, id="8B H200"),
    pytest.param("h200-dgx", 4, 80, LLAMA_70B, {"batch": 8, "context": 160}, 16.2, id="70B 4 H200"),
    *(pytest.param("a100-dgx", n, 64, QWQ_32B, {"batch": b}, ms, id=f"32B {n} A100 batch {b}") for b, times in (
        (1, {2: 27.5, 4: 19.6, 8: 15.75}), (16, {2: 30.4, 4: 23.9, 8: 21.3})) for n, ms in times.items()),
])
def test_a_token_takes_longer_than_reading_weights_and_no_longer_than_was_measured(cluster, ranks, layers, sizes, how, measured):
    """vLLM, bfloat16: its nightly benchmark (batch 8, prompts of 32 tokens, 128 new ones), and issue 16300 (batches 1 and 16)."""
    least = 2 * matrices(layers, **sizes) / ranks / load_cluster(cluster).device.memory_bandwidth
    assert least < seconds_of(layers, f"tp={ranks}", cluster=f"{cluster}:captured", **sizes, **how) < measured * MS


@pytest.mark.parametrize(("ranks", "layers", "sizes", "measured"), [(1, 32, LLAMA_7B, 133), (4, 80, {**LLAMA_70B, "vocab": 32000}, 377)])
def test_a_prompt_takes_longer_than_its_flops_and_no_longer_than_was_measured(ranks, layers, sizes, measured):
    """TensorRT-LLM 0.5 and 0.6, llama 2, first token of 2,048 on A100s, float16. Logits are of the last token alone."""
    head = sizes["vocab"] * sizes["width"]
    least = 2 * (2048 * (matrices(layers, **sizes) - head) + head) / ranks / load_cluster("a100-dgx").device.peak["bfloat16"]
    assert least < seconds_of(layers, f"tp={ranks}", cluster="a100-dgx:captured", context=2048, new=2048, **sizes) < measured * MS


def test_what_tensor_parallelism_saves_is_what_was_measured():
    """QwQ-32B on A100s, batch 1, vLLM issue 16300: 27.5, 19.6 and 15.75 ms a token on 2, 4 and 8, which is proportional to 1/tp but for a
    constant. That constant is of other kernels than those of eager PyTorch; what remains is bandwidth."""
    found = {tp: seconds_of(64, f"tp={tp}", cluster="a100-dgx", **QWQ_32B) for tp in (2, 4, 8)}
    assert (found[2] - found[8]) / (1 / 2 - 1 / 8) == pytest.approx((27.5 - 15.75) * MS / (1 / 2 - 1 / 8), rel=0.1)
    assert (found[2] - found[4]) / (found[4] - found[8]) == pytest.approx(2, rel=0.1), "proportional to 1/tp"
