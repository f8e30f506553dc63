"""transformers' `generate` on two processes, over caches that are split: its tokens, logits and random numbers."""
from __future__ import annotations

import sys
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parent))

from harness import on_ranks  # noqa: E402

import autoshard  # noqa: E402
from tests.support.tiny_decoders import SINGLE, kept_logits, prompt, tiny  # noqa: E402

pytest.importorskip("transformers")
pytestmark = pytest.mark.dist

NEW, HELD = 64, 72
HEADS, SEQUENCE = "-,tp,-,-", "-,-,tp,-"
FEW = {"gpt2": "tp,...", "mixtral": HEADS, "jamba": SEQUENCE}
MANY = {**dict.fromkeys(("llama", "gpt2", "qwen2", "mistral", "mixtral", "gemma", "phi3", "falcon", "falcon-groups", "jamba"), SEQUENCE), "mamba": ""}
CACHES = ("keys", "values", "conv", "recurrent")
GREEDY, SAMPLED = {"do_sample": False}, {"do_sample": True, "top_k": 20, "temperature": 1.5}


def caches(served) -> dict[str, int]:
    """Address of every cache."""
    return {name: b.to_local().data_ptr() for name, b in served.compiled.named_buffers() if name.startswith(CACHES)}


def split_by(split: str, family: str) -> dict[str, str]:
    """Seeds: how keys and values lie; states of recurrences by their channels."""
    rows = {"keys_*": split, "values_*": split} if split else {}
    return rows | ({"conv_*": "-,tp,-", "recurrent_*": "-,tp,..."} if family in SINGLE else {})


def generated(splits: dict[str, str]) -> list[str]:
    ranks = dist.get_world_size()
    for family, split in splits.items():
        model, ids = tiny(family), prompt()
        served = autoshard.generator(model, f"tp={ranks}", batch=2, max_cache_len=HELD, cluster="cpu-gloo", cache=False, seeds=split_by(split, family))
        places = caches(served)
        for how, new in ((GREEDY, NEW), (SAMPLED, 12)):
            torch.manual_seed(5)
            with kept_logits(model) as want:
                tokens = model.generate(ids, max_new_tokens=new, **how)
            torch.manual_seed(5 + 100 * dist.get_rank())  # ranks that would draw differently
            with kept_logits(served.compiled) as got:
                mine = served.generate(ids, max_new_tokens=new, **how)
            assert torch.equal(mine, tokens), f"{family}, {how}: {mine.tolist()} for {tokens.tolist()}"
            off = (torch.stack(got) - torch.stack(want)).abs().max().item()
            assert off < (1e-5 if family in SINGLE else 1e-9), f"{family}: logits off by {off}"
        assert caches(served) == places, f"{family}: a cache has moved"
        kept = [b for name, b in served.compiled.named_buffers() if name.startswith(CACHES)]
        assert kept and all(b.to_local().numel() * ranks == b.numel() for b in kept), family
    return list(splits)


def few() -> list[str]:
    generated(FEW)
    return disagreeing()


def test_tokens_of_three_families_and_ranks_that_do_not_agree():
    for settings, lengths, prompts, processors in on_ranks(2, few, timeout=900.0):
        assert "rank 1 generates with temperature=2.0 and rank 0 with 1.0" in settings
        assert "rank 1 generates with input_shape=(2, 6) and rank 0 with (2, 5)" in lengths
        assert "rank 1 passes other numbers than rank 0" in prompts
        assert "rank 1 chose other tokens than rank 0" in processors


@pytest.mark.slow
def test_tokens_of_all_families_on_four_ranks():
    assert on_ranks(4, generated, MANY, timeout=1800.0) == [list(MANY)] * 4


def disagreeing() -> list[str]:
    """What ranks are told that do not do the same."""
    rank, ids = dist.get_rank(), prompt()
    served = autoshard.generator(tiny("llama"), "tp=2", batch=2, max_cache_len=24, prompt=5, new=4, cluster="cpu-gloo", cache=False)

    def never(found, scores):  # on rank 1 alone: the token that rank 0 chooses
        return scores.scatter(1, scores.argmax(1, keepdim=True), -torch.inf) if rank and found.shape[1] == 8 else scores

    assert served.phases.steps == 3 and served.phases.gap <= 0.01
    first = served.generate(ids, max_new_tokens=4, **GREEDY)
    with patch("autoshard.runtime.module.share", side_effect=AssertionError("ranks that do the same need not ask at every change of variant")):
        assert torch.equal(served.generate(ids, max_new_tokens=4, **GREEDY), first)
    told = []
    for ids_here, how in ((ids, {**SAMPLED, "temperature": 1.0 + rank}), (torch.cat([ids, ids[:, :rank]], 1), GREEDY), (ids + rank, GREEDY),
                          (ids, {**GREEDY, "logits_processor": [never]})):
        with pytest.raises(autoshard.AutoshardError) as caught:
            served.generate(ids_here, max_new_tokens=4, **how)
        told.append(str(caught.value))
    return told
