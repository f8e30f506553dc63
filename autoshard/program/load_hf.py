"""A model and example inputs from a Hugging Face config JSON; no weights are loaded or fetched."""
from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from autoshard.errors import ModelError

BATCH = 8
SEQ = 4096
"""Tokens when the user gives no seq; fewer where the config has fewer positions."""
IMAGE = 224
"""Pixels a side where the config does not say."""


def config_factory(path: str | Path) -> Callable[..., Any]:
    """-> factory(batch, seq) returning (model, keyword inputs). Raises ModelError for a config that cannot be used."""
    config = _read_config(Path(path))
    model_class = _model_class(config, path)

    def factory(batch: int | None = None, seq: int | None = None) -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
        model = model_class(config)
        return _in_config_dtype(model, config, _inputs(model, config, batch or BATCH, seq, path))

    return factory


def causal_model(path: str | Path) -> torch.nn.Module:
    """The decoder that a config describes, in eval mode and in the config's dtype, with random weights. Raises ModelError."""
    config = _read_config(Path(path))
    try:
        model = _transformers().AutoModelForCausalLM.from_config(config)
    except Exception as error:
        raise ModelError(f"{path} describes a {config.model_type}, and transformers makes no decoder of it: {str(error)[:300]}") from error
    config.use_cache = model.generation_config.use_cache = True
    return _in_config_dtype(model, config, {})[0].eval()


def seeded_model(path: str | Path) -> torch.nn.Module:
    """The decoder that a config describes, as `causal_model`, with the same random weights in every process."""
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(0)
        return causal_model(path)


def _transformers() -> Any:
    try:
        import transformers
    except ImportError:
        raise ModelError("a Hugging Face config needs transformers; install it with: "
                         "pip install autoshard[hf]") from None
    return transformers


def _read_config(path: Path) -> Any:
    """The config object. Caches are off: they are outputs that training does not want."""
    path = path / "config.json" if path.is_dir() else path
    try:
        raw = json.loads(path.read_text())
    except OSError as error:
        raise ModelError(f"cannot read the config {path}: {error.strerror}") from None
    except ValueError as error:
        raise ModelError(f"{path} is not JSON: {error}") from None
    transformers = _transformers()
    kind = raw.pop("model_type", None) if isinstance(raw, dict) else None
    if kind is None:
        raise ModelError(f"{path} has no \"model_type\", so it is not a Hugging Face model config")
    try:
        config = transformers.AutoConfig.for_model(kind, **raw)
    except Exception as error:
        raise ModelError(f"transformers {transformers.__version__} does not accept {path}: "
                         f"{str(error)[:300]}") from error
    config.use_cache = False
    return config


def _model_class(config: Any, path: str | Path) -> type:
    """The first of `architectures`, else the usual head of this kind of model."""
    transformers = _transformers()
    names = config.architectures or []
    if names:
        found = getattr(transformers, names[0], None)
        if found is None:
            raise ModelError(f"{path} asks for {names[0]}, which transformers {transformers.__version__} does not have")
        return found
    for head in ("SEQ_TO_SEQ_CAUSAL_LM", "MASKED_LM", "CAUSAL_LM", "IMAGE_CLASSIFICATION"):
        mapping = getattr(transformers, f"MODEL_FOR_{head}_MAPPING")
        if type(config) in mapping:
            return mapping[type(config)]
    raise ModelError(f"{path} names no \"architectures\"; add the class to build, e.g. [\"LlamaForCausalLM\"]")


def _in_config_dtype(model: torch.nn.Module, config: Any, inputs: dict[str, torch.Tensor]) -> tuple[Any, dict]:
    """Weights as the config stores them; a dtype the user gives is applied later and wins."""
    dtype = config.dtype
    if dtype is None:
        return model, inputs
    return model.to(dtype), {k: v.to(dtype) if v.is_floating_point() else v for k, v in inputs.items()}


def _inputs(model: Any, config: Any, batch: int, seq: int | None, path: str | Path) -> dict[str, torch.Tensor]:
    """Main input and labels, both random."""
    if model.main_input_name == "pixel_values":
        if seq is not None:
            raise ModelError(f"{path} is an image model and takes no seq; leave --seq out")
        main = {"pixel_values": torch.randn(batch, config.num_channels, *_pair(getattr(config, "image_size", IMAGE)))}
        return main | _labels(model, config, (batch,))
    if model.main_input_name == "input_ids":
        text = config.get_text_config()
        shape = (batch, _length(text, seq, path))
        return {"input_ids": torch.randint(text.vocab_size, shape)} | _labels(model, text, shape)
    raise ModelError(f"{type(model).__name__} takes {model.main_input_name!r}, for which no example input is known; "
                     f"write a factory and give it as package.module:factory")


def _pair(size: Any) -> tuple[int, int]:
    return (size, size) if isinstance(size, int) else tuple(size)


def _length(config: Any, seq: int | None, path: str | Path) -> int:
    most = getattr(config, "max_position_embeddings", None)
    if seq is not None and most is not None and seq > most:
        raise ModelError(f"--seq {seq} is more than the {most} positions of {path}")
    return seq if seq is not None else min(SEQ, most or SEQ)


def _labels(model: Any, config: Any, shape: tuple[int, ...]) -> dict[str, torch.Tensor]:
    """Labels of the head's shape; none for a model without a loss."""
    accepted, name = inspect.signature(model.forward).parameters, type(model).__name__
    if "start_positions" in accepted:
        return {k: torch.randint(shape[1], shape[:1]) for k in ("start_positions", "end_positions")}
    if "labels" not in accepted:
        return {}
    if name.endswith(("ForSequenceClassification", "ForImageClassification")):
        return {"labels": torch.randint(config.num_labels, shape[:1])}
    if name.endswith("ForTokenClassification"):
        return {"labels": torch.randint(config.num_labels, shape)}
    return {"labels": torch.randint(config.vocab_size, shape)}
