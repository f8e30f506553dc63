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

NEW, HELD = 64, 72
FEW = {"llama": "-,tp,-,-", "gpt2": "tp,...", "qwen2": "-,-,tp,-", "mixtral": "-,tp,-,-", "mamba": "", "jamba": "-,-,tp,-"}
ALL = {**dict.fromkeys(("llama", "gpt2", "qwen2", "mistral", "mixtral", "gemma", "phi3", "falcon-groups", "jamba"), "-,-,tp,-"), "falcon": "-,-,tp,-",
       "mamba": "", "mamba2": ""}
SINGLE = ("mamba", "mamba2", "jamba")
"""Families of which the library computes states and logits in float32, whatever the dtype of the weights."""


def caches(served) -> dict[str, int]:
    """Address of every cache."""
    return {name: b.to_local().data_ptr() for name, b in served.compiled.named_buffers() if name.startswith(CACHES)}


CACHES = ("keys", "values", "conv", "recurrent")


def seeds_of(split: str) -> dict[str, str]:
    """How caches are to lie; states of recurrences by their channels."""
    return {**({"keys_*": split, "values_*": split} if split else {})}


def generated(splits: dict[str, str], ways: tuple[dict, ...], new: int) -> list[str]:
    ranks = dist.get_world_size()
    for family, split in splits.items():
        model, ids = tiny(family), prompt()
        served = autoshard.generator(model, f"tp={ranks}", batch=2, max_cache_len=HELD, cluster="cpu-gloo", cache=False, seeds=seeds_of(split, family))
        places = caches(served)
        for how in ways:
            asked = {"max_new_tokens": new, "return_dict_in_generate": True, "output_logits": True, **how}
            torch.manual_seed(5)
            want = model.generate(ids, **asked)
            torch.manual_seed(5 + 100 * dist.get_rank())  # ranks that would draw differently
            got = served.generate(ids, **asked)
            assert torch.equal(got.sequences, want.sequences), f"{family}, {how}: {got.sequences.tolist()} for {want.sequences.tolist()}"
            off = (torch.stack(got.logits) - torch.stack(want.logits)).abs().max().item()
            assert off < (1e-4 if family in SINGLE else 1e-9), f"{family}: logits off by {off}"
        assert caches(served) == places, f"{family}: a cache has moved"
        kept = [b for name, b in served.compiled.named_buffers() if name.startswith(CACHES)]
        assert all(b.to_local().numel() * ranks == b.numel() for b in kept), family
    return list(splits)
