"""transformers' own `generate` over a compiled model: prompt and next token are two variants of it over one stored state.

The object has the class of the model, so that the loop, sampling, padding and stopping are those of the library; its `forward` calls the
compiled model instead. What it passes as a cache only counts tokens: keys and values are buffers of the compiled model, split as planned.
"""
from __future__ import annotations

from collections.abc import Mapping
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from transformers.cache_utils import Cache
from transformers.generation.configuration_utils import GenerationMode
from transformers.modeling_outputs import CausalLMOutputWithPast

from autoshard.base.plan import Plan
from autoshard.errors import UsageError
from autoshard.runtime.module import CompiledModule
from autoshard.runtime.ranks.place import Place
from autoshard.serve.cached_model import CachedModel, Masks, Rows

MODES = (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE)


class Generator:
    """Comes before the class of a model of transformers, see `generator_of`. `compiled`: what runs; `batch` sequences over caches of
    `length` tokens in `layers` layers."""

    compiled: CompiledModule
    batch: int
    length: int
    layers: int
    _dtype: torch.dtype
    _seen: Counted | None = None

    @property
    def plan(self) -> Plan | None:
        """The plan of the variant built last."""
        return self.compiled.plan

    @property
    def device(self) -> torch.device:
        return self.compiled.place.device

    @property
    def dtype(self) -> torch.dtype:
        return self._dtype

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """As transformers' `generate`, on every rank with the same arguments; all ranks draw the random numbers of the first one."""
        share_random_state(self.compiled.place)
        return super().generate(*args, **kwargs)

    def _validate_generation_mode(self, generation_mode: Any, generation_config: Any, generation_mode_kwargs: Any) -> None:
        if generation_mode not in MODES:
            raise UsageError(f"generation by {str(getattr(generation_mode, 'value', generation_mode)).replace('_', ' ')} is not supported over split "
                             "caches, whose rows it reorders or gives back; use greedy search or sampling (num_beams=1, no assistant)")
        super()._validate_generation_mode(generation_mode, generation_config, generation_mode_kwargs)

    def _prepare_cache_for_generation(self, generation_config: Any, model_kwargs: dict[str, Any], generation_mode: Any, batch_size: int,
                                      max_cache_length: int) -> None:
        if generation_config.use_cache is False:
            raise UsageError("use_cache=False: the model was compiled for generation with caches; leave it out")
        if max_cache_length > self.length:
            raise UsageError(f"prompt and new tokens are {max_cache_length + 1} in all, and the caches hold {self.length}, which is enough for "
                             f"{self.length + 1}; ask for fewer new tokens, or give a larger max_cache_len")
        given = model_kwargs.get("past_key_values")
        if given is None:
            self._seen = model_kwargs["past_key_values"] = Counted(self.length, self.layers)
        elif given is not self._seen:
            raise UsageError(f"past_key_values is a {type(given).__name__} that does not count what is in the caches now; leave it out, or pass the "
                             "one that the last generate(return_dict_in_generate=True) returned")

    def _valid_auto_compile_criteria(self, model_kwargs: Any, generation_config: Any) -> bool:
        return False

    def _run(self, input_ids: torch.Tensor, attention_mask: Masks | None, position_ids: torch.Tensor | None, seen: Cache) -> Any:
        """One call of the compiled model, after which `new` more tokens are in the caches."""
        batch, new = input_ids.shape
        start = seen.get_seq_length()
        if batch != self.batch:
            raise UsageError(f"there are {batch} sequences, and the model was compiled for {self.batch}; compile it for {batch}, or fill up the "
                             "batch (num_return_sequences counts too)")
        rows = torch.arange(start, start + new, device=input_ids.device)
        mask = whole_mask(attention_mask, rows, batch, self.length)
        position_ids = rows[None] if position_ids is None else position_ids
        with torch.no_grad():
            logits = self.compiled(input_ids, position_ids.expand(batch, new).contiguous(), rows, mask)
        seen.add(new)
        return CausalLMOutputWithPast(logits=logits, past_key_values=seen)


class Counted(Cache):
    """What transformers takes for the cache: it counts the tokens, and says how long the caches are."""

    def __init__(self, length: int, layers: int) -> None:
        nothing = torch.empty(1, 0, length, 0)
        super().__init__(layers=[_Counted(nothing, nothing, torch.zeros(1, dtype=torch.int64)) for _ in range(layers)])

    def add(self, new: int) -> None:
        for layer in self.layers:
            layer.count += new


class _Counted(Rows):
    count = 0

    def get_seq_length(self) -> int:
        return self.count


def whole_mask(mask: Masks | None, rows: torch.Tensor, batch: int, length: int) -> Masks:
    """Masks [batch, 1, new, length]; where the library leaves one out, every token sees those before it."""
    if isinstance(mask, Mapping):
        return {kind: whole_mask(one, rows, batch, length) for kind, one in mask.items()}
    if mask is None:
        mask = torch.arange(length, device=rows.device) <= rows[:, None]
    return mask.expand(batch, 1, rows.shape[0], length).contiguous()


def example_step(cached: CachedModel, batch: int, new: int) -> tuple[Any, ...]:
    """Inputs of `cached` for `new` tokens, as `Generator._run` passes them."""
    ids, rows = torch.zeros(batch, new, dtype=torch.int64), torch.arange(new)
    model, seen = cached.model, Counted(cached.length, cached.layers)
    given = model.prepare_inputs_for_generation(ids.to(model.device), past_key_values=seen, position_ids=ids, is_first_iteration=True)
    mask = given.get("attention_mask")
    return ids, ids, rows, whole_mask(mask, rows if mask is None else rows.to(model.device), batch, cached.length)


def share_random_state(place: Place) -> None:
    """Every rank continues with the random numbers of the first one."""
    if place.mesh.size == 1:
        return
    state = torch.get_rng_state().to(place.device)
    for axis in place.mesh.names:
        dist.broadcast(state, group=place.device_mesh.get_group(axis), group_src=0)
    torch.set_rng_state(state.cpu())
    if place.device.type == "cuda":
        torch.cuda.manual_seed(int(torch.randint(2**62, ())))


def generator_of(model: nn.Module, compiled: CompiledModule, cached: CachedModel, batch: int) -> Any:
    """An object of the model's class, and of `Generator` before it, without weights of its own."""
    kind = type(model)

    @wraps(kind.forward)  # the library looks at its arguments
    def forward(self: Any, input_ids: torch.Tensor | None = None, attention_mask: Any = None, position_ids: Any = None,
                past_key_values: Any = None, **others: Any) -> Any:
        return self._run(input_ids, attention_mask, position_ids, past_key_values)

    made = object.__new__(type(f"Sharded{kind.__name__}", (Generator, kind), {"forward": forward, "__doc__": kind.__doc__}))
    nn.Module.__init__(made)
    tables = set(vars(made))
    made.__dict__.update({name: value for name, value in vars(model).items() if name not in tables})
    made.__dict__.update(compiled=compiled, batch=batch, length=cached.length, layers=cached.layers, _dtype=model.dtype)
    return made.eval()
