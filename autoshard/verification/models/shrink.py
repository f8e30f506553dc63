"""A Hugging Face config -> a small one of the same family: two layers, narrow, a small vocabulary."""
from __future__ import annotations

from typing import Any

LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers", "num_decoder_layers",
          "num_encoder_layers")
HIDDEN = ("hidden_size", "n_embd", "d_model", "dim")
HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads", "encoder_attention_heads", "decoder_attention_heads")
KV_HEADS = ("num_key_value_heads", "n_head_kv", "num_kv_heads")
HEAD_DIM = ("head_dim", "d_kv", "attention_head_dim")
WIDTHS = ("intermediate_size", "n_inner", "d_ff", "ffn_dim", "encoder_ffn_dim", "decoder_ffn_dim", "moe_intermediate_size",
          "shared_expert_intermediate_size", "ffn_hidden_size", "hidden_dim", "embedding_size", "word_embed_proj_dim")
MOST_LAYERS, MOST_HEADS, HEAD, WORDS = 2, 8, 16, 512


def shrunk(raw: dict[str, Any]) -> tuple[dict[str, Any], str]:
    """The config, made small, and what was changed. Ratios are kept: of heads to key-value heads, of widths to each other."""
    changed: dict[str, str] = {}
    return _shrunk(raw, changed), ", ".join(f"{k} {v}" for k, v in changed.items())


def _shrunk(raw: dict[str, Any], changed: dict[str, str]) -> dict[str, Any]:
    out = {k: _shrunk(v, changed) if isinstance(v, dict) else v for k, v in raw.items()}

    def put(key: str, value: int) -> None:
        if isinstance(raw.get(key), int) and value < raw[key]:
            out[key] = value
            changed[key] = f"{raw[key]} -> {value}"

    layers = [raw[k] for k in LAYERS if isinstance(raw.get(k), int)]
    for key in LAYERS:
        put(key, MOST_LAYERS)
    for key, value in raw.items():
        if isinstance(value, list) and len(value) in layers:  # one entry per layer
            out[key] = value[:MOST_LAYERS]
    _narrow(raw, put)
    put("vocab_size", WORDS)
    if "vocab_size" in changed:
        for key in raw:
            if key.endswith("_token_id"):
                put(key, WORDS - 1)
    return out


def _narrow(raw: dict[str, Any], put: Any) -> None:
    heads = next((raw[k] for k in HEADS if isinstance(raw.get(k), int)), None)
    hidden = next((raw[k] for k in HIDDEN if isinstance(raw.get(k), int)), None)
    if not heads or not hidden:
        return
    few = next((n for n in (MOST_HEADS, 4, 2) if heads % n == 0), heads)
    narrow = few * HEAD
    for key in HEADS:
        put(key, few)
    for key in KV_HEADS:
        if isinstance(raw.get(key), int):
            put(key, max(1, raw[key] * few // heads))
    for key in HEAD_DIM:
        put(key, HEAD)
    for key in HIDDEN:
        put(key, narrow)
    for key in WIDTHS:
        if isinstance(raw.get(key), int):
            put(key, max(HEAD, raw[key] * narrow // hidden // HEAD * HEAD))
