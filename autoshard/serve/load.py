"""From what a user writes (`llama:8b`, `package.module:factory`, a Hugging Face config) to decoders with caches, on the meta device."""
from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from autoshard._torch import pytree
from autoshard.errors import AutoshardError, ModelError, UsageError
from autoshard.program.load import DTYPES, decoder_factory, describe
from autoshard.serve.sweep import Decoder, MakeDecoder


def load_decoders(reference: str | None, *, hf: str | Path | None = None, dtype: str | None = None) -> tuple[MakeDecoder, str]:
    """What makes decoders of this model, and its name. `reference`: name:size of `models/` where the file has `decoder`, or
    package.module:factory, with factory(batch=, context=) returning (model, inputs); or else `hf`, a config of a decoder of transformers.
    Raises ModelError, UsageError."""
    if (reference is None) == (hf is None):
        raise UsageError("give a model such as llama:8b, or --hf config.json" + (", not both" if reference else ""))
    if dtype is not None and dtype not in DTYPES:
        raise UsageError(f"unknown dtype {dtype!r}; choose one of {', '.join(DTYPES)}")
    if hf is not None:
        from autoshard.serve.load_hf import decoder_of_config

        return _made(lambda batch, context: decoder_of_config(hf, batch, context, DTYPES.get(dtype)), None), f"hf:{Path(hf).name}"
    factory, name = decoder_factory(str(reference))
    return _made(lambda batch, context: factory(batch=batch, context=context), DTYPES.get(dtype)), name


def _made(factory: Callable[[int, int], Any], dtype: torch.dtype | None) -> MakeDecoder:
    def make(batch: int, context: int) -> Decoder:
        try:
            with torch.device("meta"):
                made = factory(batch, context)
        except AutoshardError:
            raise
        except Exception as e:
            raise ModelError(f"making the decoder failed: {describe(e)}") from e
        if not (isinstance(made, tuple) and len(made) == 2 and isinstance(made[0], nn.Module) and callable(made[1])):
            raise ModelError("a decoder for serving is (model, inputs): a module with its caches as buffers, and inputs(new, start), which returns "
                             f"the inputs of `new` tokens after `start` others; got {type(made).__name__}")
        model, inputs = made

        def cast(new: int, start: int) -> tuple[Any, ...]:
            with torch.device("meta"):
                return pytree.tree_map(lambda t: t.to(dtype) if dtype and _floats(t) else t, inputs(new, start))

        return Decoder((model if dtype is None else model.to(dtype)).eval(), cast)

    return make


def _floats(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.is_floating_point()
