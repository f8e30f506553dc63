"""Stage prices of a made-up transformer: an embedding, equal layers and a head, on devices of given speed."""
from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

import numpy as np

from autoshard.pipeline.shapes.floors import Floor
from autoshard.pipeline.shapes.meshes import Slot
from autoshard.pipeline.shapes.needs import Needs
from autoshard.pipeline.shapes.price import StagePrice

LEAN_SECONDS, LEAN_BYTES = 4 / 3, 0.2


@dataclass
class Synthetic:
    """Work in seconds of one row on one device. A layer on tp devices pays for its exchange, per row; lean stages compute forward again. With the
    memory of a rank and the rows of the batch, floors know memory."""

    layers: int
    head: float = 2.3
    exchange: float = 0.02
    overhead: float = 0.01
    hop: float = 0.01
    state: float = 4.0
    saved: float = 0.5
    limit: float = np.inf
    batch: int = 0
    asked: list[tuple] = field(default_factory=list)

    @property
    def labels(self) -> Sequence[Hashable]:
        return ("embedding", *["layer"] * self.layers, "head")

    @property
    def main(self) -> Hashable:
        return "layer"

    def work(self, block: int) -> float:
        return {"embedding": 0.1, "layer": 1.0, "head": self.head}[self.labels[block]]

    @property
    def weights(self) -> list[float]:
        return [self.work(k) for k in range(len(self.labels))]

    def ideal(self, slot: Slot) -> float:
        return 3 * sum(self.work(k) for k in range(len(self.labels))) * slot.rows / (slot.dp * slot.tp)

    def price(self, first: int, end: int, slot: Slot, lean: int, split: bool) -> StagePrice:
        self.asked.append((first, end, slot, lean))
        rows = slot.rows / slot.dp
        work = sum(self.work(k) for k in range(first, end))
        each = work * rows / slot.tp + (end - first) * (self.overhead + self.exchange * rows * (slot.tp > 1))
        saved = self.saved * work * rows / slot.tp
        return StagePrice(
            each, each * (1 + (LEAN_SECONDS - 1) * lean), each, once=0.05 * work / slot.tp * (slot.dp > 1), update=0.02 * work / slot.tp / slot.dp,
            stored=self.state * work / slot.tp, saved=saved * (LEAN_BYTES if lean else 1), between=saved * 0.1,
            wire_out=self.hop * rows, wire_in=self.hop * rows)

    def corners(self) -> Sequence[int]:
        return (0, 1)

    def rate(self, tried: object) -> float:
        return 0.0

    def floor(self, slot: Slot, look: int) -> Floor:
        work = np.array([self.work(k) for k in range(len(self.labels))]) * slot.rows / (slot.dp * slot.tp)
        needs = self._needs().on(slot.dp * slot.tp) if np.isfinite(self.limit) else None
        return Floor(work, 3 * work, np.zeros(len(work)), needs=needs)

    def _needs(self) -> Needs:
        """On one device: what a lean stage goes without, for the seconds that it takes more, and the rest."""
        count, work = len(self.labels), np.array(self.weights)
        seconds = np.concatenate([(LEAN_SECONDS - 1) * work, np.full(count, np.inf)]) * self.batch
        nbytes = np.concatenate([(1 - LEAN_BYTES) * work, LEAN_BYTES * work]) * self.saved * self.batch
        return Needs(np.tile(np.arange(count), 2), seconds, nbytes, np.zeros(2 * count, dtype=bool), self.state * work, np.zeros(count), self.limit)
