"""Gradients that backward passes under `no_sync()` leave unreduced, until one pass reduces them for all."""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from autoshard.runtime.step import Step


@dataclass(frozen=True, eq=False)
class Kept:
    """Of one variant, from all of its passes: local sums as `Step.deferred` gives them, and the names of the parameters to which no pass had a
    gradient. Their sums are zeros, and on one device they have no gradient at all, so that an optimizer leaves them alone."""

    sums: Sequence[torch.Tensor]
    without: frozenset[str]

    def added(self, sums: Sequence[torch.Tensor], without: frozenset[str]) -> Kept:
        """With those of one more pass."""
        return Kept([a + b for a, b in zip(self.sums, sums, strict=True)], self.without & without)


class KeptGradients:
    """Of all variants."""

    def __init__(self) -> None:
        self._of: dict[Step, Kept] = {}

    def __bool__(self) -> bool:
        return bool(self._of)

    def add(self, step: Step, sums: Sequence[torch.Tensor], without: frozenset[str]) -> None:
        held = self._of.get(step)
        self._of[step] = Kept(sums, without) if held is None else held.added(sums, without)

    def reduced(self) -> dict[str, torch.Tensor]:
        """Final local gradients by name, and nothing is kept any more. The variants reduce in the order of their first passes, on all ranks."""
        done: dict[str, torch.Tensor] = {}
        for step, kept in self._of.items():
            for name, g in step.reduce(kept.sums).items():
                if name not in kept.without:
                    done[name] = done[name] + g if name in done else g
        self._of.clear()
        return done
