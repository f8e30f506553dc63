"""Random decoders of transformers with a vocabulary of 251."""
from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

SPECIAL: dict[str, Any] = {"vocab_size": 251, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
LIKE_LLAMA = {**SPECIAL, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
              "max_position_embeddings": 128}
LIKE_FALCON = {**SPECIAL, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 128}
LIKE_MAMBA = {**SPECIAL, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 4, "time_step_rank": 4, "tie_word_embeddings": False}
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", LIKE_LLAMA),
    "qwen2": ("Qwen2Config", LIKE_LLAMA),
    "gpt2": ("GPT2Config", {**SPECIAL, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128}),
    "mistral": ("MistralConfig", {**LIKE_LLAMA, "sliding_window": 8}),
    "mixtral": ("MixtralConfig", {**LIKE_LLAMA, "num_local_experts": 4, "num_experts_per_tok": 2, "experts_implementation": "batched_mm"}),
    "gemma": ("GemmaConfig", {**LIKE_LLAMA, "head_dim": 8, "tie_word_embeddings": False}),
    "phi3": ("Phi3Config", LIKE_LLAMA),
    "falcon": ("FalconConfig", LIKE_FALCON),
    "falcon-groups": ("FalconConfig", {**LIKE_FALCON, "num_kv_heads": 2, "new_decoder_architecture": True}),
    "falcon-alibi": ("FalconConfig", {**LIKE_FALCON, "alibi": True}),
    "mamba": ("MambaConfig", LIKE_MAMBA),
    "mamba2": ("Mamba2Config", {**LIKE_MAMBA, "num_heads": 4, "head_dim": 16, "n_groups": 2, "chunk_size": 8}),
    "jamba": ("JambaConfig", {**LIKE_LLAMA, "attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "num_experts": 1,
                              "mamba_d_state": 4, "mamba_dt_rank": 4}),
    "bamba": ("BambaConfig", {**LIKE_LLAMA, "attn_layer_indices": [1], "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 4,
                              "mamba_n_groups": 2, "mamba_chunk_size": 8}),
    "lfm2": ("Lfm2Config", {**LIKE_LLAMA, "layer_types": ["conv", "full_attention"]}),
}
SINGLE = frozenset({"mamba", "mamba2", "jamba", "bamba"})
"""Families of which the library computes states, and some the logits, in float32 whatever the dtype of the weights."""


def tiny(family: str, dtype: torch.dtype = torch.float64, **changes: Any) -> Any:
    """The model in eval mode, with equal weights in every process. Weights are large, so that tokens differ."""
    import transformers

    torch.manual_seed(0)
    name, fields = CONFIGS[family]
    config = getattr(transformers, name)(**{**fields, **changes})
    model = transformers.AutoModelForCausalLM.from_config(config).to(dtype).eval()
    with torch.no_grad():
        for p in model.parameters():
            if p.ndim > 1:
                p.normal_(0.0, 0.2)
    model.generation_config.eos_token_id = None
    return model


def prompt(batch: int = 2, length: int = 5) -> torch.Tensor:
    return torch.randint(3, 251, (batch, length), generator=torch.Generator().manual_seed(3))


@contextmanager
def kept_logits(module: nn.Module) -> Iterator[list[torch.Tensor]]:
    """Logits of the last token at every call of a model, or of a compiled one. `generate` itself gives them in float32 only."""
    kept: list[torch.Tensor] = []
    hook = module.register_forward_hook(lambda module, args, out: kept.append(getattr(out, "logits", out)[:, -1].detach().clone()))
    try:
        yield kept
    finally:
        hook.remove()


def save_llama(folder: Any) -> None:
    """A tiny llama with a tokenizer of one token per character, as a model folder."""
    import transformers
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    characters = ["<pad>", "<s>", "</s>", *map(chr, range(32, 127)), *(f"<{i}>" for i in range(153))]
    tokenizer = Tokenizer(models.WordLevel({c: i for i, c in enumerate(characters)}, unk_token="<pad>"))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Split("", "isolated"), decoders.Fuse()
    model = tiny("llama", torch.float32)
    model.generation_config.max_length = None
    model.save_pretrained(folder)
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>").save_pretrained(folder)
