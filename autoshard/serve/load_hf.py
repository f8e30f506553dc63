"""A decoder of transformers from its config, with caches, on the meta device."""
from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from autoshard.errors import ModelError
from autoshard.program.load_hf import causal_model


def decoder_of_config(path: str | Path, batch: int, context: int, dtype: torch.dtype | None) -> tuple[torch.nn.Module, Any]:
    """(model with caches, inputs). Raises ModelError."""
    try:
        from autoshard.serve.cached_model import CachedModel
        from autoshard.serve.generator import example_step
    except ImportError as e:
        raise ModelError(f"a Hugging Face config needs transformers ({e}); pip install 'autoshard[hf]'") from e
    model = causal_model(path)
    cached = CachedModel(model if dtype is None else model.to(dtype), batch, context).eval()
    return cached, lambda new, start: example_step(cached, batch, new, start)
