"""Random decoders of transformers with a vocabulary of 251."""
from __future__ import annotations

from typing import Any

import torch

SPECIAL: dict[str, Any] = {"vocab_size": 251, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
LIKE_LLAMA = {**SPECIAL, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
              "max_position_embeddings": 128}
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", LIKE_LLAMA),
    "qwen2": ("Qwen2Config", LIKE_LLAMA),
    "gpt2": ("GPT2Config", {**SPECIAL, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128}),
    "mistral": ("MistralConfig", {**LIKE_LLAMA, "sliding_window": 8}),
}


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
