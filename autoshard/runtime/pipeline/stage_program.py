"""One stage on this rank: its windows as bound functions, run one micro-batch at a time."""
from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from autoshard.base.plan import Plan
from autoshard.lower.lower import Lowered, Port, local_tensor_shape
from autoshard.pipeline.cut import Hop, Stage
from autoshard.program.calling import Calling, as_stored
from autoshard.runtime.params.stored import Stored
from autoshard.runtime.ranks.place import Place
from autoshard.runtime.step import Backend, Function


@dataclass(eq=False)
class StageProgram:
    """`place`: this rank on the stage's submesh. What forward saves is kept per micro-batch until the last window that reads it."""

    stage: Stage
    plan: Plan
    place: Place
    stored: Stored
    calling: Calling
    functions: Mapping[str, Function]
    saved: dict[int, dict[Any, torch.Tensor]] = field(default_factory=dict)

    @staticmethod
    def of(stage: Stage, plan: Plan, lowered: Lowered, place: Place, stored: Stored, calling: Calling, backend: Backend) -> StageProgram:
        functions = {w.window: Function.of(w, place, backend, f"stage{stage.index}_{w.window}") for w in lowered.windows}
        return StageProgram(stage, plan, place, stored, calling, functions)

    @cached_property
    def own(self) -> dict[str, torch.Tensor]:
        """Constants of the program, as this rank holds them."""
        return {name: as_stored(self.place.slice(value.to(self.place.device), self.plan.placements[name]))
                for name, value in self.calling.constants.items() if name in self.plan.placements}

    @cached_property
    def _last_reader(self) -> dict[Any, str]:
        return {port.name: window for window, f in self.functions.items() for port in f.takes if port.kind == "saved"}

    def local(self, name: str) -> torch.Tensor:
        return self.own[name] if name in self.own else self.stored.local(name)

    def wire_shape(self, hop: Hop) -> tuple[int, ...]:
        """Of the piece that crosses a wire, at either of its ends here."""
        spec = self.plan.ops[hop.recv].outputs[0] if hop.target == self.stage.index else self.plan.ops[hop.send].inputs[0]
        return local_tensor_shape(hop.meta, spec, self.place.mesh)

    def run(self, window: str, m: int, given: Callable[[Port], Any], hand_out: Callable[[Port, torch.Tensor], None]) -> None:
        """One window of micro-batch m. `given`: inputs, tangents and the seed; `hand_out`: takes users, gradients and what is sent."""
        function = self.functions.get(window)
        if function is None:
            return
        kept = self.saved.setdefault(m, {})
        arguments = [self._argument(port, kept, given) for port in function.takes]
        for held in [h for h in kept if self._last_reader.get(h) == window]:
            del kept[held]
        for port, value in zip(function.gives, function.call(arguments), strict=True):
            if port.kind == "saved":
                kept[port.name] = value
            elif port.kind == "mutation":
                self.stored.write(port.name, value)
            else:
                hand_out(port, value)
        if not kept:
            del self.saved[m]

    def _argument(self, port: Port, kept: Mapping[Any, torch.Tensor], given: Callable[[Port], Any]) -> Any:
        if port.kind == "saved":
            return kept[port.name]
        return self.local(port.name) if port.kind in ("param", "buffer") else given(port)
