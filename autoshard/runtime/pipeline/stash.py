"""Weight stashing (Narayanan et al., PipeDream, SOSP 2019): one rank of a pipeline whose optimizer runs inside the schedule.

A rank updates its stage right behind each backward. A mini-batch that went forward before that goes backward later, with the weights of its
forward: they are kept until then. In 1F1B order stage s of n (from 1) goes forward with the weights after t - n + s updates for mini-batch t (from
0), so

    w(t + 1) = w(t) - lr grad f(w_1(t - n + 1), w_2(t - n + 2), ..., w_n(t)),   w(t) = w(0) for t < 0

which is not what one process computes on these mini-batches: gradients are of older weights, and of different ages by stage.
"""
from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from autoshard.base.graph import FORWARD
from autoshard.base.turns import Turn
from autoshard.runtime.params.stored import Stored
from autoshard.runtime.pipeline.runner import Run, Runner
from autoshard.runtime.pipeline.stage_program import StageProgram


class Stash:
    """Weights of one stage for the mini-batches that are under way. Versions are tensors, not copies: before an update that would
    write into memory which an older mini-batch still reads, the parameters get memory of their own (`Stored.renew`). So what forward saved as a
    view of a weight stays right too."""

    def __init__(self, program: StageProgram, stored: Stored) -> None:
        later = [f for name, f in program.windows.functions.items() if name != FORWARD]
        self._names = tuple(dict.fromkeys(p.name for f in later for p in f.takes if p.kind in ("param", "buffer")))
        self._trained, self._stored = program.grad_names, stored
        self._newest = program.windows.local
        self._kept: dict[int, tuple[int, Mapping[str, torch.Tensor]]] = {}
        self._reading: Mapping[str, torch.Tensor] = {}
        self.updates, self.most = 0, 1
        program.windows.local = self.read

    def read(self, name: str) -> torch.Tensor:
        """A parameter, a buffer or a constant, for the window that runs."""
        found = self._reading.get(name)
        return self._newest(name) if found is None else found

    def keep(self, m: int) -> None:
        """Mini-batch `m` goes forward with the newest weights."""
        self._kept[m] = self.updates, {name: self._newest(name).detach() for name in self._names}
        self.most = max(self.most, len({self.updates, *(version for version, _ in self._kept.values())}))

    def go_back(self, m: int) -> None:
        """What is read until `drop` is what `m` went forward with."""
        self._reading = self._kept[m][1]

    def drop(self, m: int) -> None:
        """Mini-batch `m` is done."""
        self._reading = {}
        self._kept.pop(m, None)

    def before_update(self) -> None:
        """Leave the newest weights to the mini-batches that went forward with them."""
        if any(version == self.updates for version, _ in self._kept.values()):
            for name in self._trained:
                self._stored.renew(name)
        self.updates += 1


@dataclass(frozen=True, eq=False)
class StashingRunner(Runner):
    """`Runner` for mini-batches instead of micro-batches. `update`: the optimizer's step, with the local gradients of a stage by name."""

    stashes: Mapping[int, Stash]
    update: Callable[[Mapping[str, torch.Tensor]], None]

    def _compute(self, run: Run, turn: Turn) -> None:
        stash, m = self.stashes[turn.stage], turn.microbatch
        if turn.window == FORWARD:
            stash.keep(m)
        else:
            stash.go_back(m)
        super()._compute(run, turn)
        if turn.window == self._last[turn.stage]:
            stash.drop(m)
            stash.before_update()
            self.update({name: run.grads.pop((stage, name)) for stage, name in list(run.grads) if stage == turn.stage})
