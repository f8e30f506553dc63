"""A model of transformers with its caches as buffers, so that a step over them is an ordinary program with state.

transformers passes a cache object into the model, and every attention layer hands it new keys and values and gets all of them back. Here the
object is made anew in every call, and its layers look at the buffers.
"""
from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache

from autoshard.errors import ModelError

Masks = torch.Tensor | Mapping[str, torch.Tensor]
"""One for all layers, or one per kind of layer."""


class CachedModel(nn.Module):
    """One call of `model` for `batch` sequences over caches of `length` tokens: buffers keys_0, values_0, keys_1 ... of
    [batch, heads, length, head size]. Raises ModelError for a model whose layers keep anything else."""

    def __init__(self, model: nn.Module, batch: int, length: int) -> None:
        super().__init__()
        self.model, self.length = model, length
        self.takes = frozenset(inspect.signature(model.forward).parameters)
        self.layers = 0
        for keys, values in _kept_by_layers(model):
            for name, t in (("keys", keys), ("values", values)):
                shape = (batch, t.shape[1], length, t.shape[3])
                self.register_buffer(f"{name}_{self.layers}", torch.zeros(shape, dtype=t.dtype, device=t.device), persistent=False)
            self.layers += 1

    def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor, rows: torch.Tensor, attention_mask: Masks) -> torch.Tensor:
        """Logits [batch, 1, vocabulary] of the last token. `input_ids`, `position_ids`: [batch, new]; `rows` [new]: where in the
        caches the new tokens are; `attention_mask`: [batch, 1, new, length], what each new token sees."""
        layers = [Rows(self.get_buffer(f"keys_{i}"), self.get_buffer(f"values_{i}"), rows) for i in range(self.layers)]
        given = {"position_ids": position_ids, "logits_to_keep": 1}
        logits = self.model(input_ids=input_ids, attention_mask=attention_mask, past_key_values=Cache(layers=layers), use_cache=True,
                            **{name: value for name, value in given.items() if name in self.takes}).logits
        return logits[:, -1:]

    def _init_weights(self, module: nn.Module) -> None:
        """Of a model on the meta device, module by module: caches are empty, the rest is up to the model."""
        if isinstance(module, CachedModel):
            for cache in module.buffers(recurse=False):
                cache.zero_()
        else:
            self.model._init_weights(module)


class Rows(CacheLayerMixin):
    """The cache of a layer while a call runs: new keys and values are put into rows of the buffers."""

    is_compileable, is_sliding = True, False

    def __init__(self, keys: torch.Tensor, values: torch.Tensor, rows: torch.Tensor) -> None:
        super().__init__()
        self.keys, self.values, self.rows, self.is_initialized = keys, values, rows, True

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """The buffers are there."""

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        self.keys.index_copy_(2, self.rows, key_states)
        self.values.index_copy_(2, self.rows, value_states)
        return self.keys, self.values

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.keys.shape[2], 0

    def get_seq_length(self) -> Any:
        return self.rows[0]

    def get_max_length(self) -> int:
        return int(self.keys.shape[2])


@torch.no_grad()
def _kept_by_layers(model: nn.Module) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The keys and values that every layer of the model keeps of one token."""
    name, cache = type(model).__name__, DynamicCache(config=model.config.get_text_config(decoder=True))
    training = model.training
    try:
        model.eval()(input_ids=torch.zeros(1, 1, dtype=torch.int64, device=model.device), past_key_values=cache, use_cache=True)
    except Exception as e:
        raise ModelError(f"{name} does not take a cache of keys and values ({type(e).__name__}: {e}); generation works with decoders of "
                         "transformers that do") from e
    finally:
        model.train(training)
    kept = [(getattr(layer, "keys", None), getattr(layer, "values", None)) for layer in cache.layers]
    odd = [i for i, pair in enumerate(kept) if any(t is None or t.ndim != 4 for t in pair)]
    if odd or not kept:
        what = f"layer {odd[0]} keeps a {type(cache.layers[odd[0]]).__name__}" if odd else "no layer keeps any"
        raise ModelError(f"the layers of {name} must keep keys and values [batch, heads, tokens, size], and {what}; hold such state in buffers of "
                         "your own model (docs/inference.md)")
    return kept
