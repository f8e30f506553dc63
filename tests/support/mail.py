"""A process group of the pipeline's axis for ranks that are threads of one process: what `Wires` calls of c10d, with memory that nobody counts."""
from __future__ import annotations

import queue
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch

PATIENCE = 300.0
Boxes = dict[tuple[int, int, int], "queue.Queue[np.ndarray]"]


@dataclass(frozen=True)
class Work:
    wait: Callable[[], None]


@dataclass(frozen=True)
class Mail:
    """This rank's end; `boxes` of all ranks, one per sender, receiver and tag, first in, first out."""

    me: int
    boxes: Boxes = field(default_factory=dict)

    def send(self, tensors: list[torch.Tensor], target: int, tag: int) -> Work:
        self._box(self.me, target, tag).put(tensors[0].detach().numpy().copy())
        return Work(lambda: None)

    def recv(self, tensors: list[torch.Tensor], source: int, tag: int) -> Work:
        return Work(lambda: tensors[0].numpy().__setitem__(..., self._box(source, self.me, tag).get(timeout=PATIENCE)))

    def _box(self, *key: int) -> queue.Queue[np.ndarray]:
        """Made by whichever end comes first; `setdefault` is atomic, a defaultdict is not."""
        return self.boxes.setdefault(key, queue.Queue())
