"""Text from a folder with a decoder of transformers, as `autoshard generate` prints it."""
from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from typing import Any

import torch

from autoshard.errors import ModelError, UsageError
from autoshard.program.load import DTYPES
from autoshard.program.load_hf import seeded_model
from autoshard.serve.api import generator

WEIGHTS = ("*.safetensors", "pytorch_model*.bin")
"""Files of weights that `save_pretrained` writes."""


@dataclass(frozen=True)
class Written:
    """What was generated. Seconds: measured on this rank, prompts to first token, and per later token; predicted ones beside them. Bytes: of the
    caches that this rank holds, and of all of them. `texts`: None without a tokenizer."""

    tokens: list[list[int]]
    texts: list[str] | None
    first_s: float
    token_s: float
    predicted_first_s: float
    predicted_token_s: float
    cache_bytes: int
    whole_cache_bytes: int


@dataclass
class Clock:
    """A streamer that notes when prompts (first) and tokens come."""

    at: list[float] = field(default_factory=list)

    def put(self, value: torch.Tensor) -> None:
        self.at.append(time.perf_counter())

    def end(self) -> None:
        """Nothing is held back."""

    @property
    def seconds(self) -> tuple[float, float]:
        """To the first token, and per later one."""
        later = len(self.at) - 2
        return self.at[1] - self.at[0], (self.at[-1] - self.at[1]) / later if later else 0.0


def write(folder: Path, mesh: str, *, prompts: Sequence[str] = (), tokens: Sequence[Sequence[int]] = (), new: int = 32, context: int | None = None,
          random: bool = False, dtype: str | None = None, sampling: Mapping[str, Any] | None = None, **options: Any) -> Written:
    """Continue `prompts` (or `tokens`, where the folder has no tokenizer) by up to `new` tokens on `mesh`. Every rank calls this.

    context     tokens that the caches hold; default: as many as are needed
    random      random weights, equal on every rank, in place of those of the folder
    sampling    settings of `generate` (temperature, top_k, top_p); without any, the likeliest token is taken
    options     those of `autoshard.generator`

    Raises ModelError for a folder that cannot be used, UsageError, and what `autoshard.generator` raises."""
    if new < 1:
        raise UsageError(f"new={new}: give a positive number of tokens")
    _check_sampling(sampling or {})
    if bool(prompts) == bool(tokens):
        raise UsageError("give the text to continue, with --prompt, or its tokens, with --tokens" + (", not both" if prompts else ""))
    model, tokenizer = load_model(folder, random, dtype), _tokenizer(folder) if prompts else None
    ids, mask = _encoded(tokenizer, prompts) if tokenizer is not None else _padded(tokens, model.config)
    length = int(ids.shape[1])
    served = generator(model, mesh, batch=len(ids), max_cache_len=context or length + new - 1, prompt=length, new=new, **options)
    clock = Clock()
    how = {"do_sample": True, **sampling} if sampling else {"do_sample": False}
    made = served.generate(ids.to(served.device), attention_mask=mask.to(served.device), max_new_tokens=new, streamer=clock,
                           pad_token_id=_pad(tokenizer or model.generation_config, model.config), **how)
    phases, buffers = served.phases, [b for name, b in served.compiled.named_buffers() if not name.startswith("model.")]
    return Written(made.tolist(), None if tokenizer is None else tokenizer.batch_decode(made, skip_special_tokens=True), *clock.seconds,
                   phases.prompt.objective_s, phases.token.objective_s, sum(getattr(b, "_local_tensor", b).nbytes for b in buffers),
                   sum(b.numel() * b.element_size() for b in buffers))


def _check_sampling(given: Mapping[str, Any]) -> None:
    """transformers raises a traceback for some of these, and takes others for no limit at all."""
    temperature, top_k, top_p = (given.get(name, good) for name, good in (("temperature", 1.0), ("top_k", 0), ("top_p", 1.0)))
    if not 0 < temperature < inf:
        raise UsageError(f"temperature={temperature}: give a positive number; for the likeliest token, give neither temperature, top_k nor top_p")
    if top_k < 0:
        raise UsageError(f"top_k={top_k}: give a number of tokens, or 0 for all of them")
    if not 0 < top_p <= 1:
        raise UsageError(f"top_p={top_p}: give a share above 0 and up to 1")


def load_model(folder: Path, random: bool, dtype: str | None) -> Any:
    """The decoder of a folder, in eval mode. Raises ModelError, UsageError."""
    if dtype is not None and dtype not in DTYPES:
        raise UsageError(f"unknown dtype {dtype!r}; choose one of {', '.join(DTYPES)}")
    if not folder.is_dir():
        raise ModelError(f"there is no folder {folder}; give one that save_pretrained() of a transformers model wrote (config.json, weights, "
                         "tokenizer)")
    if not random and not any(found for pattern in WEIGHTS for found in folder.glob(pattern)):
        raise ModelError(f"{folder} has no weights ({', '.join(WEIGHTS)}); save_pretrained() writes them, and --random takes random ones")
    if random:
        model = seeded_model(folder)
    else:
        from transformers import AutoModelForCausalLM
        from transformers.utils.logging import disable_progress_bar

        disable_progress_bar()  # every rank would draw one
        try:
            model = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True)
        except Exception as e:
            raise ModelError(f"transformers cannot load a decoder from {folder}: {type(e).__name__}: {str(e)[:300]}") from e
    return (model if dtype is None else model.to(DTYPES[dtype])).eval()


def _tokenizer(folder: Path) -> Any:
    from transformers import AutoTokenizer

    try:
        found = AutoTokenizer.from_pretrained(folder, local_files_only=True, padding_side="left")
    except Exception as e:
        raise ModelError(f"{folder} has no tokenizer that transformers can load ({type(e).__name__}: {str(e)[:200]}); give the prompt as tokens: "
                         "--tokens 5,17,4") from e
    if found.pad_token_id is None:
        found.pad_token = found.eos_token or found.convert_ids_to_tokens(0)  # masked, so any will do
    return found


def _encoded(tokenizer: Any, prompts: Sequence[str]) -> tuple[torch.Tensor, torch.Tensor]:
    made = tokenizer(list(prompts), return_tensors="pt", padding=True)
    if not made.input_ids.shape[1]:
        raise UsageError("the prompt has no token; give some text")
    return made.input_ids, made.attention_mask


def _padded(tokens: Sequence[Sequence[int]], config: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids [prompts, longest] and their mask, padded on the left."""
    vocabulary, longest = config.get_text_config(decoder=True).vocab_size, max(map(len, tokens))
    for token in (t for row in tokens for t in row):
        if not 0 <= token < vocabulary:
            raise UsageError(f"token {token} is not in the vocabulary of {vocabulary} tokens")
    ids = torch.tensor([[0] * (longest - len(row)) + list(row) for row in tokens])
    return ids, torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in tokens])


def _pad(source: Any, config: Any) -> int:
    """What sequences that have ended are filled up with."""
    for found in (source.pad_token_id, config.get_text_config(decoder=True).eos_token_id):
        if found is not None:
            return int(found[0] if isinstance(found, (list, tuple)) else found)
    return 0
