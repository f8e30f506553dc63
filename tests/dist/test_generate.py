"""transformers' `generate` on two processes, over caches that are split: its tokens, logits and random numbers."""
from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parent))

from harness import on_ranks  # noqa: E402

import autoshard  # noqa: E402
from tests.support.tiny_decoders import prompt, tiny  # noqa: E402

pytest.importorskip("transformers")
pytestmark = pytest.mark.dist

NEW = 12
SPLITS = {"llama": "-,tp,-,-", "gpt2": "tp,...", "qwen2": "-,-,tp,-"}


def caches(served) -> dict[str, int]:
    """Address of every cache."""
    return {name: b.to_local().data_ptr() for name, b in served.compiled.named_buffers() if name.startswith(("keys", "values"))}


def generated() -> list[str]:
    for family, split in SPLITS.items():
        model, ids = tiny(family), prompt()
        served = autoshard.generator(model, "tp=2", batch=2, max_cache_len=24, cluster="cpu-gloo", cache=False,
                                     seeds={"keys_*": split, "values_*": split})
        places = caches(served)
        for how in ({"do_sample": False}, {"do_sample": True, "top_k": 20, "temperature": 1.5}):
            asked = {"max_new_tokens": NEW, "return_dict_in_generate": True, "output_logits": True, **how}
            torch.manual_seed(5)
            want = model.generate(ids, **asked)
            torch.manual_seed(5 + 100 * dist.get_rank())  # ranks that would draw differently
            got = served.generate(ids, **asked)
            assert torch.equal(got.sequences, want.sequences), f"{family}, {how}: {got.sequences.tolist()} for {want.sequences.tolist()}"
            off = (torch.stack(got.logits) - torch.stack(want.logits)).abs().max().item()
            assert off < 1e-9, f"{family}: logits off by {off}"
        assert caches(served) == places, f"{family}: a cache has moved"
        kept = [b for name, b in served.compiled.named_buffers() if name.startswith("keys")]
        assert all(b.to_local().numel() * 2 == b.numel() for b in kept), family
    return list(SPLITS)


def test_tokens_of_three_families():
    assert on_ranks(2, generated, timeout=900.0) == [list(SPLITS)] * 2
