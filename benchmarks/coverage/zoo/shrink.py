"""A small random config from a family's default config: the same structure, everything a size made small.

Sizes are known by the names transformers uses for them. No scheme fits all 500 families, so there are several
(`SCHEMES`), tried in order until a model builds and runs."""
from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import transformers

VOCABULARY, POSITIONS, IMAGE, HEAD_DIM, LABELS = 128, 256, 64, 16, 4


@dataclass(frozen=True)
class Scheme:
    """How widths shrink: to one value everywhere, by a factor, or not at all."""

    name: str
    width: Callable[[int], int]
    inner: Callable[[int], int]
    head: Callable[[int], int]
    heads: Callable[[int], int]
    layers: int = 2
    image: int = IMAGE
    vocabulary: int = VOCABULARY


def _at_most(n: int) -> Callable[[int], int]:
    return lambda v: min(v, n)


SCHEMES = (
    Scheme("uniform", _at_most(64), _at_most(128), _at_most(HEAD_DIM), _at_most(4)),
    Scheme("one per eight", lambda v: max(v // 8, 1), lambda v: max(v // 8, 1), lambda v: max(v // 8, 1), lambda v: v),
    Scheme("uniform, larger images", _at_most(64), _at_most(128), _at_most(HEAD_DIM), _at_most(4), 4, 224),
    Scheme("few layers", lambda v: v, lambda v: v, lambda v: v, lambda v: v, 2, 224),
)

ODD_VOCABULARY, ODD_HEADS = 251, 6


def _sixths(n: int) -> Callable[[int], int]:
    """At most n, and so that 6 heads divide it."""
    return lambda v: v if v < 12 else min(v, n) // ODD_HEADS * ODD_HEADS


ODD = (Scheme("vocabulary 251, 6 heads", _sixths(96), _at_most(192), _at_most(HEAD_DIM), lambda v: ODD_HEADS if v > 1 else v,
              vocabulary=ODD_VOCABULARY),)
"""Sizes that neither 2 nor 4 ranks divide. (96 features are 6 heads of 16.)"""
NEITHER = "its config has neither a vocabulary nor heads to change"

# name pattern -> what the scheme does with an int of that name; the first match counts
PATTERNS: tuple[tuple[str, Callable[[Scheme, int], int]], ...] = tuple((re.compile(p), f) for p, f in (
    (r"vocab_size|^num_embeddings$|codebook_size$|^vocab_offset$", lambda s, v: min(v, s.vocabulary)),
    (r"type_vocab|num_labels|num_channels|_token_id$|_token_index$", lambda s, v: v),
    (r"(num|n)_(hidden_|encoder_|decoder_|hidden_encoder_|hidden_decoder_)?layers?$|^(encoder|decoder)_layers$|"
     r"layers$|^depth$|^n_layer$|_depth$|num_blocks|num_hidden_layers|num_res_blocks|num_.*_layers",
     lambda s, v: min(v, s.layers)),
    (r"mamba_(n|num)_heads", lambda s, v: 8 if s.head(64) == HEAD_DIM else v // 8),
    (r"key_value_heads|kv_heads|n_kv|num_key_value", lambda s, v: min(v, s.heads(v), 4) if v < 4 else s.heads(v) // 2 or 1),
    (r"^(?!d_head$).*heads?$|_heads_|num_head", lambda s, v: s.heads(v)),
    (r"num_experts|num_local_experts|routed_experts|moe_num_experts|n_experts", lambda s, v: min(v, 2 if "per_tok" in s.name else 4)),
    (r"lora_rank|time_step_rank|dt_rank|_rank$", lambda s, v: min(v, 16)),
    (r"qk_rope_head_dim|rotary_dim|rope_dim", lambda s, v: min(v, 8) if s.head(64) != 64 else v),
    (r"qk_head_dim", lambda s, v: 24 if s.head(192) == 16 else s.head(v)),
    (r"head_dim|^d_kv$|head_size|dim_head|d_head|query_pre_attn_scalar|attention_key_channels|dim_per_head",
     lambda s, v: s.head(v)),
    (r"max_2d", lambda s, v: v),
    (r"max_position|n_positions|max_(source|target)_positions|n_ctx|max_seq_len|context_length|num_position_embeddings|max_pos",
     lambda s, v: min(v, POSITIONS)),
    (r"sliding_window|attention_window|local_attention|chunk_size$", lambda s, v: min(v, 8)),
    (r"image_size|input_size$|img_size", lambda s, v: min(v, s.image) if v > 16 else v),
    (r"patch_size", lambda s, v: v if v <= 8 else 16 if s.image == IMAGE else v),
    (r"^window_size", lambda s, v: min(v, 4) if s.image == IMAGE else v),
    (r"num_frames", lambda s, v: min(v, 4)),
    (r"intermediate|ffn|d_ff$|mlp_dim|inner|feedforward|_units$|mlp_hidden", lambda s, v: s.inner(v)),
    (r"num_queries|n_latents|num_latents|query_length|num_query_tokens", lambda s, v: min(v, 8)),
    (r"index_topk", lambda s, v: min(v, 8)),
    (r"upsample_groups", lambda s, v: s.width(v)),
    (r"hidden_size|d_model|n_embd|embed_dim|^dim$|hidden_dim|embedding_(size|dim)|proj.*_dim|_dim$|_channels$|_filters$|"
     r"^emb_dim|_width$|proj_size|_hidden$|output_size|embed_size|_features$|coordinate_size|shape_size|d_embed|d_latents|"
     r"^width$|^channels$|lru_width|state_size|num_filters", lambda s, v: s.width(v)),
))
WIDTH_LISTS = re.compile(r"hidden_sizes|dims?$|channels|embed_dim|widths?|feature_sizes|channel_list|hidden_size|n_embd|_dim_per_stage")
INDEX_LISTS = re.compile(r"ind(ex|ic)|feature_layer|out_features|global_attn|attn_layers|mlp_only|_blocks$|layers_to|skip_")
OFF = re.compile(r"drop(?!_)|dropout|mask_(time|feature)_prob|jitter|noise")
ABSENT = tuple((re.compile(p), n) for p, n in (
    (r"^prediction_length$", 4), (r"^context_length$", 16), (r"image_token_index|image_token_id", 41), (r"per_tok$|top_k_experts", 2),
    (r"^n_routed_experts$|^num_experts$", 4)))
"""Sizes that some configs leave out and their models need."""
NOT_SIZES = re.compile(r"stride|kernel|dilation|padding|ratio|groups|token|temperature|coefficient|cost|grid|expansion|factor|_in_channels$|^(in|out)_channels$|bucket|distance|class|mel|sampling|rate")


def small_config(config_class: type, scheme: Scheme) -> Any:
    """A shrunk config. Raises whatever the config class raises for values it does not take."""
    default = composite(config_class, scheme) or config_class()
    return rebuilt(config_class, default.to_dict(), scheme)


def rebuilt(config_class: type, values: Mapping[str, Any], scheme: Scheme) -> Any:
    layers = next((values[k] for k in ("num_hidden_layers", "num_layers", "n_layer", "depth", "encoder_layers")
                   if isinstance(values.get(k), int)), None)
    known = config_class.__dataclass_fields__ if hasattr(config_class, "__dataclass_fields__") else \
        inspect.signature(config_class.__init__).parameters
    names = [k for k in values if k in known] if len(known) > 3 else list(values)
    new = {k: shrunk(k, values[k], scheme, layers) for k in names if k not in ("transformers_version", "id2label", "label2id")}
    for name, sub_class in getattr(config_class, "sub_configs", {}).items():
        if isinstance(values.get(name), Mapping):
            new[name] = sub_config(sub_class, values[name], scheme)
    for kv, heads in (("num_key_value_heads", "num_attention_heads"), ("n_kv_heads", "n_heads")):
        if values.get(kv) is not None and values[kv] == values.get(heads):
            new[kv] = new[heads]
    new = token_ids(new)
    new.pop("num_labels", None)
    if new.get("use_timm_backbone") or type(values.get("backbone_config")) is dict and "timm" in str(values["backbone_config"].get("model_type")):
        new |= {"use_timm_backbone": False, "backbone": None, "use_pretrained_backbone": False, "backbone_kwargs": None}
        new["backbone_config"] = transformers.ResNetConfig(
            embedding_size=16, hidden_sizes=[16, 32, 32, 64], depths=[1, 1, 1, 1], out_features=["stage2", "stage3", "stage4"])
        new = {k: v for k, v in new.items() if k in known}
    return config_class(**new, num_labels=LABELS)


def odd_sizes(values: Any) -> set[str]:
    """Which of "vocabulary" and "heads" a config (as a dict) or one inside of it has the odd size of."""
    found: set[str] = set()
    for name, value in values.items() if isinstance(values, Mapping) else ():
        if isinstance(value, Mapping):
            found |= odd_sizes(value)
        elif "vocab_size" in str(name) and value == ODD_VOCABULARY:
            found.add("vocabulary")
        elif str(name).endswith(("heads", "n_head", "num_head")) and value == ODD_HEADS:
            found.add("heads")
    return found


def sub_config(sub_class: type, values: Mapping[str, Any], scheme: Scheme) -> Any:
    if sub_class is transformers.AutoConfig:
        sub_class = transformers.CONFIG_MAPPING[values["model_type"]]
    return rebuilt(sub_class, values, scheme)


def shrunk(name: str, value: Any, scheme: Scheme, layers: int | None) -> Any:
    """One config value made small."""
    if name == "use_cache":
        return False
    if name == "apply_spec_augment":
        return False
    if value is None:
        return next((n for p, n in ABSENT if p.search(name)), None)
    if name in ("width_coefficient", "depth_coefficient"):
        return min(value, 0.25)
    if OFF.search(name) and isinstance(value, (int, float)) and not isinstance(value, bool):
        return 0.0 if isinstance(value, float) else 0
    if isinstance(value, Mapping):
        return rope(value, scheme) if "rope" in name else {k: shrunk(k, v, scheme, layers) for k, v in value.items()} \
            if "config" in name else value
    if isinstance(value, (list, tuple)):
        return shrunk_list(name, list(value), scheme, layers)
    if isinstance(value, int) and not isinstance(value, bool):
        return shrunk_int(name, value, scheme)
    return value


def shrunk_int(name: str, value: int, scheme: Scheme) -> int:
    if "per_tok" in name or "topk" in name and "group" not in name or name == "moe_k":
        return min(value, 2) if "index" not in name else min(value, 8)
    if name in ("n_group", "topk_group", "num_expert_group"):
        return 1
    if NOT_SIZES.search(name) and name != "upsample_groups":
        return value
    return next((f(scheme, value) for p, f in PATTERNS if p.search(name)), value)


def shrunk_list(name: str, value: list[Any], scheme: Scheme, layers: int | None) -> list[Any]:
    keep = scheme.layers
    if INDEX_LISTS.search(name) and all(isinstance(v, int) for v in value):
        return sorted({v if v < keep else keep - 1 for v in value}) if layers else value
    if layers and len(value) == layers and layers > keep:
        return spread(value, keep)
    if name in ("depths", "layers", "num_layers", "blocks_per_stage", "num_blocks") or name.endswith(("_depths", "num_blocks")):
        return [min(v, scheme.layers) if isinstance(v, int) else v for v in value]
    if not value or not all(isinstance(v, int) and not isinstance(v, bool) for v in value) or NOT_SIZES.search(name):
        return value
    if "image_size" in name or "patch_size" in name or "window" in name:
        return [shrunk_int(name, v, scheme) for v in value]
    if "heads" in name:
        return value if max(value) <= 4 else [min(v, 4) for v in value]
    if WIDTH_LISTS.search(name) and scheme.width(64 * 64) != 64 * 64:
        return [max(16 * v // min(value), 1) for v in value]
    return value


def spread(kinds: list[Any], n: int) -> list[Any]:
    """`n` entries of a per-layer list that show as many kinds as possible, in order."""
    first = {str(k): i for i, k in reversed(list(enumerate(kinds)))}
    chosen = sorted(sorted(first.values())[:n])
    return [kinds[i] for i in sorted((chosen + [i for i in range(len(kinds)) if i not in chosen])[:n])]


def rope(value: Mapping[str, Any], scheme: Scheme) -> Any:
    """Rotary sections add up to half a head."""
    out = {k: rope(v, scheme) if isinstance(v, Mapping) else v for k, v in value.items()}
    for key in ("mrope_section",):
        if key in out and scheme.head(128) == HEAD_DIM:
            out[key] = [2, 3, 3] if len(out[key]) == 3 else out[key]
    if isinstance(out.get("original_max_position_embeddings"), int):
        out["original_max_position_embeddings"] = min(out["original_max_position_embeddings"], POSITIONS)
    return out


def token_ids(values: dict[str, Any]) -> dict[str, Any]:
    """Special tokens fall into the vocabulary, each its own."""
    out, free = dict(values), iter(range(VOCABULARY - 1, 40, -1))
    for name, value in values.items():
        if not re.search(r"_token_id$|_token_index$|_id$|_token_ids$|_ids$", name):
            continue
        if isinstance(value, int) and not isinstance(value, bool) and value >= 40:
            out[name] = next(free)
        elif isinstance(value, (list, tuple)) and value and all(isinstance(v, int) for v in value) and max(value) >= 40:
            out[name] = [next(free) for _ in value]
    return out


def composite(config_class: type, scheme: Scheme) -> Any:
    """Configs that join two others and have no default."""
    t = transformers
    pairs = {"EncoderDecoderConfig": (t.BertConfig, t.BertConfig), "VisionEncoderDecoderConfig": (t.ViTConfig, t.BertConfig),
             "SpeechEncoderDecoderConfig": (t.Wav2Vec2Config, t.BertConfig)}
    name = config_class.__name__
    if name in pairs:
        encoder, decoder = pairs[name]
        config = config_class.from_encoder_decoder_configs(encoder(), decoder(is_decoder=True, add_cross_attention=True))
        config.decoder_start_token_id = config.pad_token_id = 0
        return config
    if name == "VisionTextDualEncoderConfig":
        return config_class.from_vision_text_configs(t.CLIPVisionConfig(), t.BertConfig())
    return None
