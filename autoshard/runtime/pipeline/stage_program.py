"""One stage on this rank: its windows, and the shapes of what it exchanges."""
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import torch

from autoshard.base.graph import BACKWARD, WEIGHT
from autoshard.base.plan import Plan
from autoshard.base.spec import Spec, local_tensor_shape
from autoshard.base.windows import END, START, batch_dim_of
from autoshard.lower.lower import Lowered
from autoshard.pipeline.cutting.cut import Hop, Stage
from autoshard.program.calling import Calling
from autoshard.runtime.microbatches import Windows
from autoshard.runtime.params.stored import Stored
from autoshard.runtime.ranks.place import Place
from autoshard.runtime.step import Backend, Function, locals_of


@dataclass(frozen=True, eq=False)
class StageProgram:
    """`place`: this rank on the stage's submesh."""

    stage: Stage
    plan: Plan
    place: Place
    windows: Windows

    @staticmethod
    def of(stage: Stage, plan: Plan, lowered: Lowered, place: Place, stored: Stored, calling: Calling, backend: Backend) -> StageProgram:
        functions = {w.window: Function.of(w, place, backend, f"stage{stage.index}_{w.window}") for w in lowered.windows}
        return StageProgram(stage, plan, place, Windows(stage.graph, place, locals_of(calling, plan, place, stored), functions))

    def begin(self) -> None:
        if START in self.windows.functions:
            self.windows.begin()

    def finish(self) -> Mapping[str, torch.Tensor]:
        """Gradients that were added up over micro-batches; none where there is one micro-batch."""
        return self.windows.finish() if END in self.windows.functions else {}

    @property
    def grad_names(self) -> tuple[str, ...]:
        return tuple(p.name for w in (BACKWARD, WEIGHT, END) if w in self.windows.functions
                     for p in self.windows.functions[w].gives if p.kind == "grad")

    @cached_property
    def reads(self) -> tuple[tuple[int, str, int | None, Spec], ...]:
        """Inputs of the model that the stage reads: the number in the call, the name, the batch dim, the placement."""
        return tuple((int(op.target.removeprefix("input:")), op.target, batch_dim_of(op), self.plan.ops[op.name].outputs[0])
                     for op in self.stage.graph.of_kind("input") if not op.is_port)

    def wire_shape(self, hop: Hop) -> tuple[int, ...]:
        """Of the piece that crosses a wire, at either of its ends here."""
        spec = self.plan.ops[hop.recv].outputs[0] if hop.target == self.stage.index else self.plan.ops[hop.send].inputs[0]
        return local_tensor_shape(hop.meta, spec, self.place.mesh)
