"""What the layers of a model keep from token to token, and the cache of one layer over buffers that hold it."""
from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from transformers.cache_utils import Cache, CacheLayerMixin, DummyLayer, DynamicCache, LinearAttentionLayer

from autoshard.errors import ModelError

Kept = Mapping[str, torch.Tensor]
"""What one layer keeps of one token of one sequence: keys and values, or conv and recurrent (conv1, recurrent1 ... where it has
several), or all of them."""


class Rows(CacheLayerMixin):
    """The cache of an attention layer while a call runs: new keys and values are put into rows of the buffers."""

    is_compileable, is_sliding = True, False

    def __init__(self, keys: torch.Tensor, values: torch.Tensor, rows: torch.Tensor) -> None:
        super().__init__()
        self.keys, self.values, self.rows, self.is_initialized = keys, values, rows, True

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
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


class States(LinearAttentionLayer):
    """The cache of a recurrent layer while a call runs: the library's, which replaces states by copying into them. `fresh`: there is no
    token before this call."""

    def __init__(self, states: Kept, fresh: bool) -> None:
        conv, recurrent = _by_number(states, "conv"), _by_number(states, "recurrent")
        LinearAttentionLayer.__init__(self, max(*conv, *recurrent, 0, 0) + 1)
        self.conv_states.update(conv)
        self.recurrent_states.update(recurrent)
        self.is_conv_states_initialized.update(dict.fromkeys(conv, True))
        self.is_recurrent_states_initialized.update(dict.fromkeys(recurrent, True))
        self.conv_kernel_size.update({i: t.shape[-1] for i, t in conv.items()})
        self.has_previous_state = dict.fromkeys(self.has_previous_state, not fresh)


class RowsAndStates(States, Rows):
    """Of a layer that has both."""

    is_compileable, get_max_length = True, Rows.get_max_length

    def __init__(self, kept: Kept, rows: torch.Tensor, fresh: bool) -> None:
        Rows.__init__(self, kept["keys"], kept["values"], rows)
        States.__init__(self, kept, fresh)


def layer_over(kept: Kept, rows: torch.Tensor, fresh: bool) -> Any:
    """The cache of a layer that keeps this."""
    if not kept:
        return DummyLayer()
    if "keys" not in kept:
        return States(kept, fresh)
    return Rows(kept["keys"], kept["values"], rows) if len(kept) == 2 else RowsAndStates(kept, rows, fresh)


def _by_number(states: Kept, kind: str) -> dict[int, torch.Tensor]:
    return {int(name[len(kind):] or 0): t for name, t in states.items() if name.startswith(kind)}


@torch.no_grad()
def probed(model: nn.Module, cache_name: str) -> Cache:
    """The library's own cache after one token. Raises ModelError."""
    name, cache = type(model).__name__, DynamicCache(config=model.config.get_text_config(decoder=True))
    training = model.training
    try:
        model.eval()(input_ids=torch.zeros(1, 1, dtype=torch.int64, device=model.device), use_cache=True, **{cache_name: cache})
    except Exception as e:
        raise ModelError(f"one token with an empty cache does not go through {name} ({type(e).__name__}: {e}); generation works with decoders of "
                         "transformers that take a cache") from e
    finally:
        model.train(training)
    return cache


def kept_by(model: nn.Module, index: int, layer: Any) -> Kept:
    """What the layer keeps. Raises ModelError for what has no buffer here."""
    kept = {name: t for name in ("keys", "values") if (t := getattr(layer, name, None)) is not None}
    for kind in ("conv", "recurrent"):
        kept |= {f"{kind}{i or ''}": t for i, t in getattr(layer, f"{kind}_states", {}).items() if t is not None}
    known = isinstance(layer, (CacheLayerMixin, LinearAttentionLayer, DummyLayer)) and not hasattr(layer, "update_indexer")
    if known and ("keys" in kept) == ("values" in kept) and all(kept[name].ndim == 4 for name in ("keys", "values") if name in kept):
        return kept
    raise ModelError(f"layer {index} of {type(model).__name__} keeps a {type(layer).__name__}, and layers must keep keys and values [batch, heads, "
                     "tokens, size], or states of a convolution or recurrence; hold such state in buffers of your own model (docs/inference.md)")
