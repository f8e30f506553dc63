"""`autoshard.generator`: a model of transformers that generates over a mesh."""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import torch
from torch import nn

from autoshard import api
from autoshard.errors import ModelError, TraceError, UsageError
from autoshard.serve.sweep import Decoder
from autoshard.serve.workload import Workload


def generator(model: nn.Module, mesh: Any, *, batch: int, max_cache_len: int, prompt: int | None = None, new: int | None = None,
              **options: Any) -> Any:
    """The model, sharded over `mesh`, with transformers' own `generate`.

    model          a decoder of transformers (`AutoModelForCausalLM`)
    batch          number of sequences
    max_cache_len  tokens that the caches hold: prompt and new tokens, but for the last one
    prompt         plan now for prompts of this length, too; else at the first call
    new            with `prompt`: tokens of a request; the two programs are planned together for it (docs/inference.md), and `phases` of the
                   result has seconds, bound and gap
    options        those of `autoshard.compile`; none of them may be about training

    Every rank calls `generate` with the same arguments. Without `new` the step of one token is planned first and decides where weights and
    caches lie; prompts keep that. Raises ModelError for a model without keys and values, UsageError, and what `autoshard.compile` raises."""
    try:
        from transformers import GenerationMixin

        from autoshard.serve.cached_model import CachedModel
        from autoshard.serve.generator import example_step, generator_of
        from autoshard.serve.together import plan_together
    except ImportError as e:
        raise UsageError(f"autoshard.generator needs transformers ({e}); pip install 'autoshard[hf]'") from e
    if not isinstance(model, GenerationMixin):
        raise UsageError(f"{type(model).__name__} has no generate() of transformers; write a loop over autoshard.compile(model, mesh), with caches "
                         "as buffers (docs/inference.md)")
    if new is not None and prompt is None:
        raise UsageError("new= is about requests of one prompt length; give prompt= too")
    for name, value in (("batch", batch), ("max_cache_len", max_cache_len), *((("prompt", prompt),) if prompt is not None else ())):
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise UsageError(f"{name}={value!r}: give a positive number")
    if model.config.is_encoder_decoder:
        raise UsageError(f"{type(model).__name__} has an encoder, whose results generation keeps beside the caches; only decoders are supported")
    modes = [(module, module.training) for module in model.modules()]
    if isinstance(seeds := options.get("seeds"), Mapping):
        names = [name for name, _ in (*model.named_parameters(), *model.named_buffers(), *model.named_modules())]
        options["seeds"] = {_inside(key, names): layout for key, layout in seeds.items()}
    try:
        cached, phases = CachedModel(model, batch, max_cache_len).eval(), None
        if prompt is not None and new is not None:
            decoder = Decoder(cached, partial(example_step, cached, batch))
            phases, mesh = plan_together(decoder, mesh, Workload(prompt, new, max_cache_len), options)
            options = {**options, "plan": phases.token}
        compiled = api.compile(cached, mesh, example_step(cached, batch, 1, start=1), training=False, **options)
    except TraceError as e:
        raise ModelError(f"a step of {type(model).__name__} over caches of {max_cache_len} tokens, with masks [batch, 1, new, {max_cache_len}], "
                         f"cannot be traced. Models that take no such masks (ALiBi) cannot generate over static caches. {e}") from e
    finally:
        for module, training in modes:
            module.training = training
    if prompt is not None:
        with torch.no_grad():
            compiled.prepare(*example_step(cached, batch, prompt))
    return generator_of(model, compiled, cached, batch, phases)


def _inside(key: Any, names: Sequence[str]) -> Any:
    """A seed's key about `names` of the user's model as one about the model with caches, where they begin with "model."; that is also taken."""
    if not isinstance(key, str) or any(fnmatchcase(f"model.{name}", key) for name in names):
        return key
    return f"model.{key}" if any(fnmatchcase(name, key) for name in names) else key
