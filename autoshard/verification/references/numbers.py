"""What the model's random ops draw from torch's generator, as they read it whose program has micro-batches or padded dims.

In padded lengths, and micro-batch by micro-batch, torch's generator gives other numbers than the model gets. So the program of the batch, with
nothing padded, draws them; a micro-batch takes its samples, and zeros lie behind the true length.
"""
from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from autoshard.base.graph import TensorMeta
from autoshard.base.pads import longer
from autoshard.pipeline.microbatches.relations import Cut
from autoshard.pipeline.microbatches.walk import by_shape
from autoshard.program.calling import Traced
from autoshard.verification.references.microbatches import key_of


@dataclass(frozen=True, eq=False)
class Forerunners:
    """Programs that the one which is run was made of. `whole`: of the batch; `part`: of a micro-batch, before dims were padded. The same objects as
    what is run where nothing was cut, and nothing padded."""

    whole: Traced
    part: Traced

    def draw_as(self, own: Traced) -> bool:
        """Whether the program `own` draws what the model does."""
        return own is self.whole

    def numbers(self, own: Traced, random: Collection[str], values: Mapping[str, tuple[Any, ...]]) -> dict[str, tuple[Any, ...]]:
        """Of the random ops of `own`, from all values of the batch. Ops are left out that the batch lacks, and those of which a micro-batch has
        no samples of its own."""
        graph, found = own.graph, {}
        for name in random:
            programs = [p.graph.by_name.get(name) for p in (self.whole, self.part, own)]
            if any(op is None or op.target != programs[0].target for op in programs):
                continue
            metas = list(zip(*(op.outputs for op in programs), strict=True))
            for m in range(graph.microbatches):
                drawn = tuple(t if t is None else _read(t, *of, m, graph.microbatches) for t, of in zip(values[name], metas, strict=True))
                if all(t is not None or given is None for t, given in zip(drawn, values[name], strict=True)):
                    found[key_of(graph, name, m)] = drawn
        return found


def _read(t: torch.Tensor, whole: TensorMeta, part: TensorMeta, own: TensorMeta, m: int, count: int) -> torch.Tensor | None:
    """What micro-batch `m` of `count` has of it."""
    if count > 1:
        relation = by_shape(whole, part, count)
        if not isinstance(relation, Cut):
            return None
        rows = part.logical_shape[relation.dim]
        t = t.reshape(whole.logical_shape).narrow(relation.dim, m * rows, rows).reshape(part.shape)
    return longer(t, own.shape)
