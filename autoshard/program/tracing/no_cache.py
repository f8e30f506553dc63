"""Models of transformers are traced without their decoding cache, and a cache that the call passes is refused.

Most of their configs say `use_cache=True`, which is for `generate()`: the forward pass then returns the keys and values of all
layers in an object of theirs. A captured graph does not generate, so a config's flag counts as False, in training and in inference, and
the output has no `past_key_values`. A flag that the call itself passes is left as it is. A cache that the model makes itself (the prefix of
peft's prefix tuning) is part of the graph, and only left out of what is returned.
"""
from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn

from autoshard.errors import UsageError


@contextmanager
def without_decoding_cache(model: nn.Module) -> Iterator[None]:
    """`use_cache` is False in every transformers config of `model`, nested ones included, inside the block."""
    before = [(config, config.use_cache) for config in _configs(model) if getattr(config, "use_cache", False)]
    for config, _ in before:
        config.use_cache = False
    try:
        yield
    finally:
        for config, value in before:
            config.use_cache = value


def without_cache(out: Any, kwargs: Mapping[str, Any]) -> Any:
    """An output of transformers, without the cache in it that the call has not asked for."""
    library = sys.modules.get("transformers.cache_utils")
    if library is None or kwargs.get("use_cache") or not isinstance(out, sys.modules["transformers.utils.generic"].ModelOutput):
        return out
    kept = {name: value for name, value in out.items() if not isinstance(value, library.Cache)}
    return out if len(kept) == len(out) else type(out)(**kept)


def refuse_cache(value: Any, name: str) -> None:
    """Raises UsageError for a cache object of transformers among the arguments of a call."""
    library = sys.modules.get("transformers.cache_utils")
    if library is not None and isinstance(value, library.Cache):
        raise UsageError(f"{name} is a {type(value).__name__}: a captured program keeps its state in buffers, not in objects that are passed in; use "
                         "autoshard.generator(model, mesh, batch=..., max_cache_len=...), or make keys and values buffers of the model "
                         "(docs/inference.md)")


def _configs(model: nn.Module) -> list[Any]:
    """A flag of that name in a config of the user's own may mean anything, so only those of transformers."""
    library = sys.modules.get("transformers.configuration_utils")
    if library is None:
        return []
    kind, found = library.PreTrainedConfig, {}
    left = [value for module in model.modules() for value in vars(module).values() if isinstance(value, kind)]
    while left:
        config = left.pop()
        if id(config) not in found:
            found[id(config)] = config
            left += [value for value in vars(config).values() if isinstance(value, kind)]
    return list(found.values())
