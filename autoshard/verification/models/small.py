"""Smaller models to verify in place of one that does not fit into this machine's memory.

Rules, strategies and redistributions are the same at every size, so a small copy tests them. It cannot test the plan of
the big model, whose shapes divide in other ways."""
from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from autoshard._torch import pytree
from autoshard.base.memory import free_memory
from autoshard.base.quantities import size
from autoshard.errors import ModelError, UsageError
from autoshard.program.load import ModelSpec, load_model, sizes_of
from autoshard.verification.models.shrink import shrunk

BATCH, SEQ = 8, 32
COPIES = 12
"""Times the weights exist in float64: the model, the reference, both sides' gradients, momenta and results, and the pieces."""


@dataclass(frozen=True)
class Source:
    """What `load_model` builds a model from; plain data, so that processes can build the same."""

    reference: str | None
    hf: str | None = None
    batch: int | None = None
    seq: int | None = None
    dtype: str | None = None
    inference: bool = False

    def load(self, fake: bool = False) -> ModelSpec:
        """The same weights and inputs at every call. Raises ModelError, UsageError."""
        with torch.random.fork_rng(devices=()):
            torch.manual_seed(0)
            spec = load_model(self.reference, batch=self.batch, seq=self.seq, dtype=self.dtype, hf=self.hf, fake=fake)
        spec.model.train(not self.inference)
        return spec.for_inference if self.inference else spec


def fitting(source: Source, ranks: int, folder: str, whole: bool = False,
            budget: float | None = None) -> tuple[Source, tuple[str, ...]]:
    """The source, with a small batch and short sequences where the user gave none, and a smaller size of the model where
    its weights do not fit into `budget` bytes (default: half of the memory that is free). With it what was changed.
    A config made smaller is written into `folder`. `whole`: it is to be run as it is.

    Raises UsageError for a model too big that cannot be made smaller."""
    budget = free_memory() / 2 if budget is None else budget
    source, notes = (source, ()) if whole else _short(source, ranks)
    needed = memory_needed(source)
    if needed <= budget:
        return source, notes
    if whole:
        raise UsageError(f"a plan runs on the very model it was made for, which takes about {size(needed)} of memory here, and "
                         f"{size(budget)} may be used; leave --plan out to verify such plans on a smaller copy")
    smaller, how = _smaller(source, folder, f"verifying {source.reference or source.hf} takes about {size(needed)} of memory, of "
                                            f"which {size(budget)} may be used")
    return smaller, (*notes, how)


def memory_needed(source: Source) -> float:
    """Bytes, estimated from the weights in float64; built without memory."""
    spec = source.load(fake=True)
    weights = sum(t.numel() for t in (*spec.model.parameters(), *spec.model.buffers()))
    inputs = sum(t.numel() for t in pytree.tree_leaves((spec.example_inputs, spec.example_kwargs)) if isinstance(t, torch.Tensor))
    return 8.0 * COPIES * (weights + inputs)


def _short(source: Source, ranks: int) -> tuple[Source, tuple[str, ...]]:
    wanted = {name: value for name, value in (("batch", max(BATCH, ranks)), ("seq", SEQ)) if getattr(source, name) is None}
    for names in (tuple(wanted), *((n,) for n in wanted)):  # a model may take only one of them
        small = replace(source, **{n: wanted[n] for n in names})
        if names and _builds(small):
            said = " and ".join(f"{n} {wanted[n]}" for n in names)
            return small, (f"{said}; give {' and '.join('--' + n for n in names)} for another size of the example inputs",)
    return source, ()


def _builds(source: Source) -> bool:
    try:
        source.load(fake=True)
    except ModelError:
        return False
    return True


def _smaller(source: Source, folder: str, why: str) -> tuple[Source, str]:
    if source.hf is not None:
        return _smaller_config(source, folder, why)
    name, _, _ = (source.reference or "").partition(":")
    sizes = sizes_of(name)
    if not sizes or f"{name}:{sizes[0]}".lower() == (source.reference or "").lower():
        raise UsageError(f"{why}; give a smaller model (a factory with fewer layers and narrower ones has the same ops)")
    return replace(source, reference=f"{name}:{sizes[0]}"), f"{why}: {name}:{sizes[0]} was run instead, which has the same ops"


def _smaller_config(source: Source, folder: str, why: str) -> tuple[Source, str]:
    path = Path(source.hf)
    raw = json.loads((path / "config.json" if path.is_dir() else path).read_text())
    small, changed = shrunk(raw)
    file = Path(folder, path.name)
    file.write_text(json.dumps(small))
    smaller = replace(source, hf=str(file))
    if not _builds(smaller):
        raise UsageError(f"{why}, and its config could not be made smaller; give a config with fewer layers and narrower ones")
    return smaller, f"{why}: a smaller copy was run instead ({changed})"
