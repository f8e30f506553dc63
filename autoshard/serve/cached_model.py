"""A model of transformers with its caches as buffers, so that a step over them is an ordinary program with state.

transformers passes a cache object into the model, and every layer hands it what it computed and gets back what it needs of earlier tokens.
Here the object is made anew in every call, and its layers look at the buffers.
"""
from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn
from transformers.cache_utils import Cache

from autoshard.errors import ModelError
from autoshard.serve.layers import kept_by, layer_over, probed

CACHE_ARGUMENTS = ("past_key_values", "cache_params", "cache")
"""How models name the argument for their caches: the first two until transformers 5.23, by kind of model, the last one from 5.24 on."""

Masks = torch.Tensor | Mapping[str, torch.Tensor | None] | None
"""One for all layers, or one per kind of layer. None: a layer of states sees no padding."""


@dataclass(frozen=True)
class Caches:
    """What callers know of the caches: the name of the model's argument for them, how many tokens they hold, and of how many layers.
    `has_rows`: some layer keeps keys and values, one row per token; `has_states`: some layer keeps a state that replaces the one
    of the token before."""

    argument: str
    length: int
    layers: int
    has_rows: bool
    has_states: bool


class CachedModel(nn.Module):
    """One call of `model` for `batch` sequences over caches of `length` tokens. Buffers of layer i: keys_i and values_i of [batch, heads,
    length, head size], conv_i and recurrent_i with what a recurrent layer keeps. Raises ModelError for a model whose layers keep
    anything else."""

    def __init__(self, model: nn.Module, batch: int, length: int) -> None:
        super().__init__()
        self.model = model
        self.takes = frozenset(inspect.signature(model.forward).parameters)
        argument = next((name for name in CACHE_ARGUMENTS if name in self.takes), "")
        if not argument:
            raise ModelError(f"{type(model).__name__}.forward takes no cache (none of {', '.join(CACHE_ARGUMENTS)}); generation works with decoders "
                             "of transformers that take one, and other state can be in buffers of your own model (docs/inference.md)")
        layers = [kept_by(model, i, layer) for i, layer in enumerate(probed(model, argument).layers)]
        self.kept = [tuple(kept) for kept in layers]
        names = {name for kept in self.kept for name in kept}
        self.caches = Caches(argument, length, len(layers), "keys" in names, bool(names - {"keys", "values"}))
        if not names:
            raise ModelError(f"no layer of {type(model).__name__} keeps anything from token to token; hold its state in buffers of your own model "
                             "(docs/inference.md)")
        for i, kept in enumerate(layers):
            for name, t in kept.items():
                shape = (batch, t.shape[1], length, t.shape[3]) if name in ("keys", "values") else (batch, *t.shape[1:])
                self.register_buffer(f"{name}_{i}", torch.zeros(shape, dtype=t.dtype, device=t.device), persistent=False)

    def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor, rows: torch.Tensor, attention_mask: Masks,
                fresh: bool = False) -> torch.Tensor:
        """Logits [batch, 1, vocabulary] of the last token. `input_ids`, `position_ids`: [batch, new]; `rows` [new]: where in the
        caches the new tokens are; `attention_mask`: [batch, 1, new, length], what each new token sees, of recurrent layers [batch, new];
        `fresh`: recurrent layers begin anew."""
        layers = [layer_over({name: self.get_buffer(f"{name}_{i}") for name in kept}, rows, fresh) for i, kept in enumerate(self.kept)]
        given = {"position_ids": position_ids, "logits_to_keep": 1}
        logits = self.model(input_ids=input_ids, attention_mask=attention_mask, use_cache=True, **{self.caches.argument: Cache(layers=layers)},
                            **{name: value for name, value in given.items() if name in self.takes}).logits
        return logits[:, -1:]

    def _init_weights(self, module: nn.Module) -> None:
        """Of a model on the meta device, module by module: caches are empty, the rest is up to the model."""
        if isinstance(module, CachedModel):
            for cache in module.buffers(recurse=False):
                cache.zero_()
        else:
            self.model._init_weights(module)
