"""Generates text with a decoder of transformers whose weights and caches are split over the ranks.

    python examples/generate.py
    python -m torch.distributed.run --standalone --nproc-per-node 2 examples/generate.py --split heads
    python -m torch.distributed.run --standalone --nproc-per-node 2 examples/generate.py --model FOLDER --prompt "Once upon a time"

Without --model it is a tiny llama with random weights, whose tokens are printed as numbers. Without --split the search decides how
caches lie; those of a tiny model are not worth splitting.
"""
from __future__ import annotations

import argparse
import os

import torch
import transformers

import autoshard

SPLITS = {"batch": "tp,-,-,-", "heads": "-,tp,-,-", "sequence": "-,-,tp,-"}


def tiny() -> tuple[transformers.PreTrainedModel, torch.Tensor]:
    """A random model, and two prompts."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(vocab_size=251, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
                                      num_key_value_heads=2, pad_token_id=0, bos_token_id=1, eos_token_id=2)
    return transformers.LlamaForCausalLM(config).eval(), torch.randint(3, 251, (2, 5))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="folder of a model and its tokenizer, as save_pretrained() writes them")
    parser.add_argument("--prompt", default="Once upon a time", help="what the text begins with")
    parser.add_argument("--new", type=int, default=16, help="tokens to generate")
    parser.add_argument("--split", choices=SPLITS, help="the dim of the caches that the ranks share")
    asked = parser.parse_args()

    tokenizer = None
    if asked.model:
        model = transformers.AutoModelForCausalLM.from_pretrained(asked.model)
        tokenizer = transformers.AutoTokenizer.from_pretrained(asked.model)
        ids = tokenizer(asked.prompt, return_tensors="pt").input_ids
    else:
        model, ids = tiny()
    ranks, rank = (int(os.environ.get(name, default)) for name, default in (("WORLD_SIZE", 1), ("RANK", 0)))
    served = autoshard.generator(model, f"tp={ranks}", batch=len(ids), max_cache_len=ids.shape[1] + asked.new, prompt=ids.shape[1], new=asked.new,
                                 cluster="cpu-gloo", seeds={name: SPLITS[asked.split] for name in ("keys_*", "values_*") if asked.split})
    tokens = served.generate(ids, max_new_tokens=asked.new, do_sample=False)
    if rank == 0:
        cut = {name: tuple(b.to_local().shape) if ranks > 1 else tuple(b.shape) for name, b in served.compiled.named_buffers() if name == "keys_0"}
        print(f"a rank holds {cut['keys_0']} of the first layer's keys, {tuple(served.compiled.get_buffer('keys_0').shape)} in all")
        print(f"predicted: first token after {served.phases.prompt.objective_s:.2e} s, then {served.phases.token.objective_s:.2e} s a token, "
              f"gap {served.phases.gap:.2%}")
        for row in tokens:
            print(tokenizer.decode(row) if tokenizer else row.tolist())


if __name__ == "__main__":
    main()
