"""transformers' own `generate` over a compiled model: prompt and next token are two variants of it over one stored state.

The object has the class of the model, so that the loop, sampling, padding and stopping are those of the library; its `forward` calls the
compiled model instead. What it passes as a cache only counts tokens: keys and values are buffers of the compiled model, split as planned.
"""
from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import wraps
from inspect import signature
from typing import Any, NoReturn

import torch
from torch import nn
from transformers.cache_utils import Cache
from transformers.generation.configuration_utils import GenerationMode
from transformers.utils import ModelOutput

from autoshard.base.plan import Plan
from autoshard.errors import UsageError
from autoshard.runtime.module import CompiledModule
from autoshard.serve.agreement import Turns
from autoshard.serve.cached_model import CACHE_ARGUMENTS, CachedModel, Caches, Masks
from autoshard.serve.layers import Rows
from autoshard.serve.phases import Phases

MODES = (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE)
OWN_CODE = ("logits_processor", "stopping_criteria", "prefix_allowed_tokens_fn", "streamer", "custom_generate")
"""Arguments of `generate` that run code of the user's."""
LOGITS_ALONE = ("output_hidden_states", "output_attentions")
"""Settings that ask a model for more than logits."""
INSIDE = "model."
"""What names of the model begin with in the compiled one."""
RECURRENT = ("linear_attention", "conv")
"""Kinds of layers whose mask only says what is padding."""


@dataclass
class Output(ModelOutput):
    """Logits of the last token. What counts the tokens is put beside them, under the name that the model has for caches."""

    logits: torch.Tensor | None = None


class Generator:
    """Comes before the class of a model of transformers, see `generator_of`. `compiled`: what runs, over such `caches`, for
    `batch` sequences; `phases`: prompt and token as they were planned together, if they were."""

    compiled: CompiledModule
    caches: Caches
    batch: int
    phases: Phases | None
    _dtype: torch.dtype
    _table: tuple[str, int] | None
    _seen: Counted | None = None
    _turns: Turns | None = None
    _settings: dict[str, Any]

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

    # --- weights, by the names that the model has ---

    def named_parameters(self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True) -> Iterator[tuple[str, nn.Parameter]]:
        for name, p in self.compiled.named_parameters(remove_duplicate=remove_duplicate) if recurse else ():
            yield ".".join(filter(None, (prefix, name.removeprefix(INSIDE)))), p

    def state_dict(self, *, keep_vars: bool = False) -> dict[str, Any]:
        """That of the compiled model: DTensors."""
        return {name.removeprefix(INSIDE): t for name, t in self.compiled.state_dict(keep_vars=keep_vars).items()}

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Whole tensors are cut to this rank's placement."""
        return self.compiled.load_state_dict({f"{INSIDE}{name}": t for name, t in state_dict.items()}, strict, assign)

    def save_pretrained(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise UsageError("this model has pieces of the weights; call save_pretrained() or push_to_hub() on the model that it was made of, with "
                         "state_dict=... where this one has other weights (docs/hugging-face.md)")

    push_to_hub = save_pretrained

    # --- generation ---

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """As transformers' `generate`, on every rank with the same arguments; all ranks draw the random numbers of the first one."""
        given = signature(super().generate).bind_partial(*args, **kwargs).arguments
        ids = given.get("inputs", kwargs.get("input_ids"))
        if ids is None and kwargs.get("inputs_embeds") is not None:
            raise UsageError("inputs_embeds without tokens: the model was compiled for token ids; pass input_ids")
        self._settings = {"input_shape": tuple(ids.shape)} if isinstance(ids, torch.Tensor) else {}
        turns = Turns(self.compiled.place, self.compiled.options.running.timeout, any(given.get(name) not in (None, []) for name in OWN_CODE))
        before, self._turns = self._turns, turns
        try:
            with self.compiled.in_step(), turns:
                made = super().generate(*args, **kwargs)
        finally:
            self._turns = before
        turns.compare(getattr(made, "sequences", made))
        return made

    def _validate_generation_mode(self, generation_mode: Any, generation_config: Any, generation_mode_kwargs: Any) -> None:
        if generation_mode not in MODES:
            raise UsageError(f"generation by {str(getattr(generation_mode, 'value', generation_mode)).replace('_', ' ')} is not supported over split "
                             "caches, whose rows it reorders or gives back; use greedy search or sampling (num_beams=1, no assistant)")
        super()._validate_generation_mode(generation_mode, generation_config, generation_mode_kwargs)

    def _prepare_cache_for_generation(self, generation_config: Any, model_kwargs: dict[str, Any], generation_mode: Any, batch_size: int,
                                      max_cache_length: int) -> None:
        if generation_config.use_cache is False:
            raise UsageError("use_cache=False: the model was compiled for generation with caches; leave it out")
        for name in LOGITS_ALONE:
            if getattr(generation_config, name, None):
                raise UsageError(f"{name}=True: the compiled model returns logits alone; leave it out")
        name, length = self.caches.argument, self.caches.length
        if max_cache_length > length and self.caches.has_rows:
            raise UsageError(f"prompt and new tokens are {max_cache_length + 1} in all, and the caches hold {length}, which is enough for "
                             f"{length + 1}; ask for fewer new tokens, or give a larger max_cache_len")
        self._check_positions(model_kwargs.get("attention_mask"), max_cache_length)
        given = model_kwargs.get(name)
        if given is None:
            self._seen = model_kwargs[name] = Counted(self.caches)
        elif given is not self._seen:
            raise UsageError(f"{name} is a {type(given).__name__} that does not count what is in the caches now; leave it out, or pass the "
                             "one that the last generate(return_dict_in_generate=True) returned")
        self._settings |= {name: value for name, value in vars(generation_config).items() if not name.startswith("_")}
        self._settings |= {"cached_tokens": self._seen.get_seq_length(), "batch_size": batch_size, "max_length": max_cache_length + 1}

    def _check_positions(self, mask: torch.Tensor | None, tokens: int) -> None:
        """Raises UsageError where tokens would be read behind a table of learned positions. On one device that is an error of torch's; of a table
        that is split it would be zeros, and other text."""
        if self._table is None or tokens <= self._table[1]:
            return
        padding = int((mask == 0).sum(1).min()) if mask is not None and mask.dim() == 2 else 0
        where, most = self._table
        if tokens - padding > most:
            raise UsageError(f"prompt and new tokens are {tokens - padding + 1} in all, and {where} has {most} positions, which is enough for "
                             f"{most + 1}; ask for fewer new tokens, or shorten the prompt")

    def _valid_auto_compile_criteria(self, model_kwargs: Any, generation_config: Any) -> bool:
        return False

    def _has_unfinished_sequences(self, this_peer_finished: bool, synced_gpus: bool, device: torch.device) -> bool:
        return not this_peer_finished if self._turns is None else self._turns.go_on(not this_peer_finished)

    def _run(self, input_ids: torch.Tensor, attention_mask: Masks, position_ids: torch.Tensor | None, seen: Counted) -> Any:
        """One call of the compiled model, after which `new` more tokens are in the caches."""
        batch, new = input_ids.shape
        start = seen.get_seq_length()
        if batch != self.batch:
            raise UsageError(f"there are {batch} sequences, and the model was compiled for {self.batch}; compile it for {batch}, or fill up the "
                             "batch (num_return_sequences counts too)")
        if self.caches.has_rows and start + new > self.caches.length:
            raise UsageError(f"{new} more tokens after {start} outgrow the caches, which hold {self.caches.length}; give a larger max_cache_len")
        inputs = step_inputs(self.caches, input_ids, position_ids, start, attention_mask)
        with torch.no_grad():
            if start == 0:
                self._empty()
            logits = self.compiled(*inputs) if self._turns is None else self._turns.in_model(lambda: self.compiled(*inputs), self._settings)
        seen.add(new)
        made = Output(logits=logits)
        made[self.caches.argument] = seen
        return made


    def _empty(self) -> None:
        """Caches as they were made. A mask hides rows of an earlier prompt, but for numbers that are not finite: 0 times those is not 0."""
        for name, cache in self.compiled.named_buffers():
            if name.startswith(("keys_", "values_")):
                getattr(cache, "_local_tensor", cache).zero_()


class Counted(Cache):
    """What transformers takes for the cache: it counts the tokens, and says how long the caches are."""

    def __init__(self, caches: Caches) -> None:
        nothing = torch.empty(1, 0, caches.length, 0)
        super().__init__(layers=[_Counted(nothing, nothing, torch.zeros(1, dtype=torch.int64)) for _ in range(caches.layers)])

    def add(self, new: int) -> None:
        for layer in self.layers:
            layer.count += new


class _Counted(Rows):
    count = 0

    def get_seq_length(self) -> int:
        return self.count


def step_inputs(caches: Caches, ids: torch.Tensor, position_ids: torch.Tensor | None, start: int, mask: Masks) -> tuple[Any, ...]:
    """What a CachedModel is called with for `ids` [batch, new] after `start` tokens."""
    batch, new = ids.shape
    rows = torch.arange(start, start + new, device=ids.device)
    position_ids = rows[None] if position_ids is None else position_ids
    if caches.has_rows:
        mask = whole_mask(mask, rows, batch, caches.length)
    else:
        mask = padding_mask(one_of(mask), ids)
    return ids, position_ids.expand(batch, new).contiguous(), rows, mask, *((start == 0,) if caches.has_states else ())


def whole_mask(mask: Masks, rows: torch.Tensor, batch: int, length: int, kind: str = "") -> Masks:
    """Masks [batch, 1, new, length]; where the library leaves one out, every token sees those before it."""
    if isinstance(mask, Mapping):
        return {kind: whole_mask(mask[kind], rows, batch, length, kind) for kind in sorted(mask)}  # the library's order differs between processes
    if kind in RECURRENT:
        return padding_mask(mask, rows.expand(batch, -1))
    if mask is None:
        mask = torch.arange(length, device=rows.device) <= rows[:, None]
    return mask.expand(batch, 1, rows.shape[0], length).contiguous()


def one_of(mask: Masks) -> torch.Tensor | None:
    """Layers of states alone: the masks of all kinds say the same, what is padding."""
    return next((m for m in mask.values() if m is not None), None) if isinstance(mask, Mapping) else mask


def padding_mask(mask: Masks, ids: torch.Tensor) -> torch.Tensor | None:
    """A mask like `ids` [batch, new] that is 0 at padding. A single token is never padding, and needs none."""
    if ids.shape[1] == 1:
        return None
    if mask is None:
        return torch.ones(ids.shape, dtype=torch.int64, device=ids.device)
    return mask[:, -ids.shape[1]:].to(torch.int64).contiguous()


def example_step(cached: CachedModel, batch: int, new: int, start: int = 0) -> tuple[Any, ...]:
    """Inputs of `cached` for `new` tokens after `start` others, as `Generator._run` passes them."""
    model, seen = cached.model, Counted(cached.caches)
    ids = torch.zeros(batch, new, dtype=torch.int64, device=model.device)
    counted = {cached.caches.argument: seen}
    given = model.prepare_inputs_for_generation(ids, position_ids=ids, use_cache=True, is_first_iteration=start == 0, **counted)
    return step_inputs(cached.caches, ids, ids, start, given.get("attention_mask"))


def learned_positions(model: nn.Module) -> tuple[str, int] | None:
    """The table of learned positions, if there is one, and how many it has. Some families put two rows before them."""
    most = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    found = (name for name, m in model.named_modules() if most is not None and isinstance(m, nn.Embedding)
             and most <= m.num_embeddings <= most + 2 and m is not model.get_input_embeddings())
    return next(((name, most) for name in found), None)


def generator_of(model: nn.Module, compiled: CompiledModule, cached: CachedModel, batch: int, phases: Phases | None = None) -> Any:
    """An object of the model's class, and of `Generator` before it, without weights of its own."""
    kind = type(model)

    @wraps(kind.forward)  # the library looks at its arguments
    def forward(self: Any, input_ids: torch.Tensor | None = None, attention_mask: Any = None, position_ids: Any = None,
                **others: Any) -> Any:
        seen = next((others[name] for name in CACHE_ARGUMENTS if others.get(name) is not None), None)
        if not isinstance(seen, Counted):
            what = "missing" if seen is None else f"a {type(seen).__name__}"
            raise UsageError(f"{cached.caches.argument} is {what}: this model runs over its split caches; call generate(), or pass the cache that "
                             "generate(return_dict_in_generate=True) returned")
        return self._run(input_ids, attention_mask, position_ids, seen)

    made = object.__new__(type(f"Sharded{kind.__name__}", (Generator, kind), {"forward": forward, "__doc__": kind.__doc__}))
    nn.Module.__init__(made)
    tables = set(vars(made))
    made.__dict__.update({name: value for name, value in vars(model).items() if name not in tables})
    made.__dict__.update(compiled=compiled, caches=cached.caches, batch=batch, phases=phases, _dtype=model.dtype,
                         _table=learned_positions(model))
    return made.eval()
