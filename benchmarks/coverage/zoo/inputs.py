"""Random example inputs for any transformers model, from the names its forward takes and the sizes its config has.

A name does not fix a shape (`input_features` is (batch, mel, frames) or (batch, frames, mel)), so a name has several
proposals and the caller takes the first combination that the model runs with."""
from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from itertools import islice, product
from typing import Any

import torch

BATCH, SEQ, LABELS = 4, 16, 4
MOST = 24
"""Combinations of shapes to propose."""
OPTIONAL = ("input_ids", "pixel_values", "input_features", "input_values", "decoder_input_ids", "bbox", "input_boxes")
"""Inputs given where the model takes them, required or not; others only when required."""


def proposals(model: Any, config: Any) -> Iterator[dict[str, torch.Tensor]]:
    """Keyword inputs without labels, the likeliest first."""
    accepted = inspect.signature(model.forward).parameters
    required = [n for n, p in accepted.items() if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD]
    main = [model.main_input_name] if model.main_input_name in accepted else []
    text = ["input_ids"] if "input_ids" in accepted and "inputs_embeds" in accepted else []
    decoder = ["decoder_input_ids"] if "decoder_input_ids" in accepted and config.is_encoder_decoder else []
    extra = [n for n in ("pixel_values", "input_features", "bbox") if n in accepted]
    wanted = [*dict.fromkeys([*required, *main, *text, *decoder, *extra])]
    fewer = [*dict.fromkeys([*required, *main, *text, *decoder])]
    least = [*dict.fromkeys([*required, *text])] if text else fewer
    bare = [*dict.fromkeys([*required, *main])]
    seen: list[list[str]] = []
    for names in (wanted, fewer, least, bare, required):
        if names and names not in seen:
            seen.append(names)
            yield from islice(_combinations(names, config, model), MOST)


def _combinations(names: list[str], config: Any, model: Any) -> Iterator[dict[str, torch.Tensor]]:
    options = [list(_values(n, config, model)) for n in names]
    if all(options):
        for chosen in product(*options):
            yield _agreeing(dict(zip(names, (make() for make in chosen), strict=True)), config, model)


def labels(model: Any, config: Any, inputs: Mapping[str, torch.Tensor]) -> Iterator[dict[str, torch.Tensor]]:
    """Proposals for what the loss compares with; nothing for a model without a loss of its own."""
    accepted, name = inspect.signature(model.forward).parameters, type(model).__name__
    rng = torch.Generator().manual_seed(2)

    def ints(high: int, *shape: int) -> torch.Tensor:
        return torch.randint(high, shape, generator=rng)

    if "start_positions" in accepted:
        yield {k: ints(SEQ, BATCH) for k in ("start_positions", "end_positions")}
    if "labels" not in accepted and "next_sentence_label" not in accepted:
        return
    vocab = _sized(config, "vocab_size") or 2
    length = next((inputs[k].shape[1] for k in ("decoder_input_ids", "input_ids") if k in inputs), SEQ)
    per_class, per_token = {"labels": ints(LABELS, BATCH)}, {"labels": ints(vocab, BATCH, length)}
    if "pixel_values" in inputs and inputs["pixel_values"].ndim == 4:
        side = inputs["pixel_values"].shape[-2:]
    else:
        side = (16, 16)
    maps = [{"labels": ints(LABELS, BATCH, *side)}, {"labels": torch.rand(BATCH, *side, generator=rng)},
            {"labels": torch.rand(BATCH, 3, *side, generator=rng)}]
    if "next_sentence_label" in accepted:
        yield {**({"labels": per_token["labels"]} if "labels" in accepted else {}), "next_sentence_label": ints(2, BATCH)}
    if "sentence_order_label" in accepted:
        yield {"labels": per_token["labels"], "sentence_order_label": ints(2, BATCH)}
    if "ForCTC" in name:
        yield {"labels": ints(20, BATCH, 4) + 1}
    first = [per_class] if name.endswith(("Classification", "MultipleChoice", "NextSentencePrediction")) else [per_token]
    if "TokenClassification" in name or "FrameClassification" in name:
        first = [{"labels": ints(LABELS, BATCH, length)}]
    yield from first
    if "pixel_values" in inputs:
        yield from maps
    if inputs.get("bool_masked_pos") is not None:
        return
    yield from (per_class, {"labels": torch.rand(BATCH, LABELS, generator=rng)},
                {"labels": torch.randn(BATCH, SEQ, 80, generator=rng)})


# ---- values by name

def _values(name: str, config: Any, model: Any) -> Iterator[Callable[[], torch.Tensor]]:
    """Ways to make one input; none when the name is not known."""
    rng = torch.Generator().manual_seed(sum(map(ord, name)))
    text = _text(config)

    def floats(*shape: int) -> Callable[[], torch.Tensor]:
        return lambda: torch.randn(shape, generator=rng)

    def ints(high: int, *shape: int) -> Callable[[], torch.Tensor]:
        return lambda: torch.randint(high, shape, generator=rng)

    def ones(*shape: int) -> Callable[[], torch.Tensor]:
        return lambda: torch.ones(shape, dtype=torch.int64)

    width = _sized(text, "hidden_size", "d_model") or 64
    if name in ("input_ids", "decoder_input_ids"):
        high = min(40, _sized(text, "vocab_size") or 40)
        low = 5 if high > 10 else 0
        books = _sized(config, "num_codebooks", "n_codebooks")
        yield lambda: torch.randint(low, high, (BATCH, SEQ), generator=rng)
        if books:
            yield ints(16, BATCH, SEQ, books)
            yield ints(16, BATCH * books, SEQ)
            yield ints(16, BATCH, books, SEQ)
        yield ints(high, BATCH, 2, SEQ)
    elif name == "pixel_values":
        yield from (floats(*shape) for shape in image_shapes(config))
    elif name in ("pixel_values_videos", "video"):
        yield from (floats(BATCH, 4, *shape[1:]) for shape in image_shapes(config) if len(shape) == 4)
    elif name in ("input_features", "audio_features", "input_values", "waveform", "spectrogram", "audio_values"):
        yield from (floats(*shape) for shape in audio_shapes(config, name))
    elif name == "inputs":   # perceiver, image gpt
        yield ints(40, BATCH, SEQ)
        yield floats(BATCH, SEQ, _sized(config, "d_model", "hidden_size") or 64)
    elif name in ("bbox", "boxes"):
        yield lambda: torch.tensor([10, 20, 30, 40]).expand(BATCH, SEQ, 4).contiguous()
    elif "attention_mask" in name or name in ("input_mask", "audio_mask"):
        yield ones(BATCH, SEQ)
    elif name in ("token_type_ids", "langs"):
        yield lambda: torch.zeros(BATCH, SEQ, dtype=torch.int64)
    elif name == "position_ids":
        yield lambda: torch.arange(SEQ).expand(BATCH, SEQ).contiguous()
    elif name in ("inputs_embeds", "decoder_inputs_embeds", "hidden_states", "encoder_hidden_states", "image_embeds"):
        yield floats(BATCH, SEQ, width)
    elif name in ("visual_feats",):
        yield floats(BATCH, 8, _sized(config, "visual_feat_dim") or width)
    elif name in ("visual_pos",):
        yield floats(BATCH, 8, 4)
    elif name in ("past_values", "past_observed_mask", "past_time_features", "future_values", "future_time_features"):
        yield from _series(name, config, floats)
    elif name == "bool_masked_pos":
        yield lambda: torch.rand(BATCH, 16, generator=rng) < 0.5
    elif name in ("decoder_input_values",):
        yield floats(BATCH, SEQ, 80)
    elif name in ("states", "actions", "returns_to_go", "rewards", "timesteps"):
        n = {"states": _sized(config, "state_dim") or 17, "actions": _sized(config, "act_dim") or 4}.get(name, 1)
        yield ints(16, BATCH, SEQ) if name == "timesteps" else floats(BATCH, SEQ, n)
    elif name.endswith("_ids"):
        yield ints(16, BATCH, SEQ)


def _series(name: str, config: Any, floats: Callable[..., Any]) -> Iterator[Callable[[], torch.Tensor]]:
    context = _sized(config, "context_length") or 32
    lags = max(getattr(config, "lags_sequence", None) or [0])
    channels = _sized(config, "num_input_channels", "input_size") or 1
    features = _sized(config, "num_time_features") or 0
    length = _sized(config, "prediction_length") or 4
    if name == "past_values":
        yield floats(BATCH, context + lags, *([channels] if channels > 1 else []))
        yield floats(BATCH, context + lags, channels)
    elif name == "past_observed_mask":
        yield lambda: torch.ones(BATCH, context + lags)
    elif name == "past_time_features":
        yield floats(BATCH, context + lags, max(features, 1))
        yield floats(BATCH, context + lags, features)
    elif name == "future_values":
        yield floats(BATCH, length)
        yield floats(BATCH, length, channels)
    else:
        yield floats(BATCH, length, max(features, 1))
        yield floats(BATCH, length, features)


def image_shapes(config: Any) -> list[tuple[int, ...]]:
    """Shapes of `pixel_values`: images, videos, several images a sample, patches cut beforehand."""
    vision = next((c for n in ("vision_config", "image_config", "backbone_config", "encoder", "vision_encoder_config")
                   if hasattr(c := getattr(config, n, None), "to_dict")), config)
    channels = _sized(vision, "num_channels", "in_channels", "in_chans") or 3
    channels = channels if channels < 32 else 3
    size = getattr(vision, "image_size", None) or getattr(config, "image_size", None) or 64
    if isinstance(size, Mapping):
        size = [size.get("height", 64), size.get("width", 64)]
    h, w = (size, size) if isinstance(size, int) else tuple(size)[-2:]
    frames = _sized(vision, "num_frames", "frames_per_clip") or 4
    images = [(BATCH, channels, h, w), (BATCH, frames, channels, h, w), (BATCH, 1, channels, h, w)]
    return images + ([] if (h, w) == (64, 64) else [(BATCH, channels, 64, 64)])


def audio_shapes(config: Any, name: str) -> list[tuple[int, ...]]:
    """Shapes of sound: samples, or spectra of so many bins over so many frames."""
    audio = next((c for n in ("audio_config", "encoder_config", "encoder") if hasattr(c := getattr(config, n, None), "to_dict")), config)
    bins = _sized(audio, "num_mel_bins", "feature_projection_input_dim", "input_feat_per_channel", "input_dim",
                  "feature_size", "n_mels", "mel_dim") or 80
    positions = _sized(audio, "max_source_positions") or 64
    frames = _sized(audio, "max_length", "spec_size") or 64
    spectra = [(BATCH, bins, 2 * positions), (BATCH, 64, bins), (BATCH, frames, bins), (BATCH, bins, 64), (BATCH, 1, frames, bins),
               (BATCH, 1, 64, 64)]
    samples = [(BATCH, 4000), (BATCH, 1, 4000), (BATCH, 16000)]
    return samples + spectra if name != "input_features" else spectra + samples


def _agreeing(inputs: dict[str, torch.Tensor], config: Any, model: Any) -> dict[str, torch.Tensor]:
    """Text with as many image (or sound) tokens as the model makes of what it sees, where it can say how many."""
    ids = inputs.get("input_ids")
    for kind, source in (("image", "pixel_values"), ("audio", "input_features")):
        token = next((t for n in (f"{kind}_token_id", f"{kind}_token_index") if isinstance(t := getattr(config, n, None), int)), None)
        get = getattr(model, f"get_{kind}_features", None) or getattr(getattr(model, "model", None), f"get_{kind}_features", None)
        if ids is None or ids.ndim != 2 or source not in inputs or token is None or get is None:
            continue
        count = _count(get, inputs[source])
        if count and count % BATCH == 0 and count // BATCH <= 512:
            seen = torch.full((BATCH, count // BATCH), token)
            inputs["input_ids"] = ids = torch.cat([ids[:, :4], seen, ids[:, 4:]], 1)
    return inputs


def _count(get: Callable[..., Any], value: torch.Tensor) -> int:
    """How many feature vectors the model makes of `value`; 0 when it does not say."""
    try:
        with torch.no_grad():
            out = get(value)
    except Exception:  # it wants more than this one input: then the text goes alone
        return 0
    out = getattr(out, "pooler_output", out)
    parts = out if isinstance(out, (list, tuple)) else [out]
    return sum(p.shape[:-1].numel() for p in parts if isinstance(p, torch.Tensor))


def _text(config: Any) -> Any:
    try:
        return config.get_text_config()
    except Exception:  # ambiguous: several text parts
        return config


def _sized(config: Any, *names: str) -> int | None:
    """The first of the config's ints with one of these names, looked up in its text part too."""
    for holder in (config, _text(config) if hasattr(config, "get_text_config") else config):
        for name in names:
            value = getattr(holder, name, None)
            if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                return value
    return None
