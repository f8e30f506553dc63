"""Parameters that several stages read: every stage has them, most with a part of their gradient; parts are summed once a step."""
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import torch

from autoshard.pipeline.pipelined import Pipelined
from autoshard.runtime.params.stored import Stored
from autoshard.runtime.pipeline.wires import ONCE, STEP, Message, Wires


@dataclass(frozen=True, eq=False)
class Tied:
    """Of all ranks of the pipeline's axis; they call the same methods in the same order."""

    made: Pipelined
    wires: Wires
    stored: Stored

    @cached_property
    def _held(self) -> tuple[tuple[str, tuple[int, ...], list[int]], ...]:
        """(name, stages with a part of its gradient, other ranks that have it) of parameters that this rank shares."""
        me, found = self.wires.me, ((name, stages, self.made.holders(name)) for name, stages in self.made.cut.tied)
        return tuple((name, stages, [r for r in ranks if r != me]) for name, stages, ranks in found if me in ranks)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(name for name, _, _ in self._held)

    def _part(self, name: str, stage: int, target: int) -> Message:
        return Message(f"grad:{name}@{stage}", ONCE, self.made.table.rank_of[stage], target, STEP)

    def summed(self, grads: Mapping[tuple[int, str], torch.Tensor]) -> dict[str, torch.Tensor]:
        """Gradients by name, from those of this rank's stages. Every rank sums parts in the order of stages, so all get the same numbers.
        All receives are posted before anything is sent: nobody waits in a circle."""
        tied, me, rank_of = dict(self.made.cut.tied), self.wires.me, self.made.table.rank_of
        out = {name: g for (_, name), g in grads.items() if name not in tied}
        for name, stages, others in self._held:
            like = self.stored.local(name)
            for stage in stages:
                if rank_of[stage] in others:
                    self.wires.post(self._part(name, stage, me), like.shape, like.dtype)
        for name, stages, others in self._held:
            for stage in stages:
                for other in others if rank_of[stage] == me else ():
                    self.wires.send(self._part(name, stage, other), grads[stage, name])
        for name, stages, _ in self._held:
            parts = [grads[s, name] if rank_of[s] == me else self.wires.take(self._part(name, s, me)) for s in stages]
            out[name] = sum(parts[1:2], parts[0])
            for part in parts[2:]:  # into the sum: no second one is planned
                out[name] += part
        self.wires.flush()
        return out

    def make_equal(self) -> None:
        """Give every stage the numbers of the first one that has the parameter: ranks may have initialised the model differently."""
        rank_of = self.made.table.rank_of
        for name, stages, others in self._held:
            first, local = rank_of[stages[0]], self.stored.local(name)
            if self.wires.me == first:
                for other in others:
                    self.wires.send(Message(name, ONCE, first, other, STEP), local.detach())
            else:
                message = Message(name, ONCE, first, self.wires.me, STEP)
                self.wires.post(message, local.shape, local.dtype)
                with torch.no_grad():
                    local.copy_(self.wires.take(message))
        self.wires.flush()
