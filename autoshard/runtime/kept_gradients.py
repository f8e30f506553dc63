"""Gradients that backward passes under `no_sync()` leave unreduced, until one pass reduces them for all."""
from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any
from weakref import WeakSet

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from autoshard.errors import UsageError
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

    def zeroed(self, names: Sequence[str], gone: Collection[str]) -> Kept:
        """Without those of `gone`; `names` of all sums."""
        return Kept([torch.zeros_like(s) if n in gone else s for n, s in zip(names, self.sums, strict=True)], self.without | frozenset(gone))


class KeptGradients:
    """Of all variants. They are zeroed and checked as `.grad` is: `zero_grad()` of an optimizer or of the model lets go of them, and an optimizer
    that would step without them raises."""

    def __init__(self) -> None:
        self._of: dict[Step, Kept] = {}
        _alive().add(self)

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

    def clear(self) -> None:
        self._of.clear()

    def of(self, params: Collection[int]) -> dict[Step, list[str]]:
        """By variant the names of parameters (given by id) whose gradients it keeps."""
        return {step: found for step in self._of if (found := [n for n in _names(step) if id(step.stored.params[n]) in params])}

    def let_go(self, params: Collection[int]) -> None:
        """Of the gradients of these parameters, by id."""
        for step, gone in self.of(params).items():
            names, kept = _names(step), self._of.pop(step)
            if len(gone) < len(names):
                self._of[step] = kept.zeroed(names, gone)


def _names(step: Step) -> list[str]:
    """Of the parameters, in the order of their kept sums."""
    return [n for n in step.grad_names if n in step.stored.params]


@cache
def _alive() -> WeakSet[KeptGradients]:
    """Those of this process; from the first on torch's optimizers know of them."""
    alive: WeakSet[KeptGradients] = WeakSet()
    theirs = torch.optim.Optimizer.zero_grad

    def zero_grad(self: torch.optim.Optimizer, set_to_none: bool = True) -> None:
        theirs(self, set_to_none)
        for kept in filter(None, alive):
            kept.let_go(_ids(self))

    def check(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        for kept in filter(None, alive):
            for name in (n for names in kept.of(_ids(optimizer)).values() for n in names):
                raise UsageError(f"step() of {type(optimizer).__name__} would leave out the gradient of {name} that backward() kept inside no_sync; "
                                 "run the last backward() before a step outside of no_sync(), which reduces for all")

    torch.optim.Optimizer.zero_grad = zero_grad  # type: ignore[method-assign]
    register_optimizer_step_pre_hook(check)
    return alive


def _ids(optimizer: torch.optim.Optimizer) -> set[int]:
    return {id(p) for group in optimizer.param_groups for p in group["params"]}
