"""What the search problem is collected in while it is formulated."""
from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from autoshard.base.graph import WEIGHT, Ref
from autoshard.base.spec import Spec
from autoshard.formulate.copies import CopyNode
from autoshard.formulate.values import local_bytes, storage_root
from autoshard.recompute.rewrite import is_source
from autoshard.search.problem import Edge
from autoshard.space.cost_table import CostTable
from autoshard.space.decision_units import DecisionUnits
from autoshard.space.strategies import SpecIndex

MEMORY, FIRST_WINDOW = 0, 1


@dataclass(eq=False)
class Builder:
    """Collects nodes, edges and items; `memo` shares arrays between equal edges."""

    table: CostTable
    units: DecisionUnits
    eta: float
    kappa: float
    in_flight: tuple[int, int] = (1, 0)
    costs: list[np.ndarray] = field(default_factory=list)
    edges: list[Edge] = field(default_factory=list)
    items: list[tuple[int, np.ndarray, int, np.ndarray]] = field(default_factory=list)
    copies: list[CopyNode] = field(default_factory=list)
    groups: list[int] = field(default_factory=list)
    saved: list[tuple[int, np.ndarray, np.ndarray]] = field(default_factory=list)
    memo: dict = field(default_factory=dict)

    @property
    def lengths(self) -> tuple[int, int, int, int, int]:
        """How much there is of costs, copy nodes, edges, items and bytes saved."""
        return len(self.costs), len(self.copies), len(self.edges), len(self.items), len(self.saved)

    @property
    def overlaps(self) -> bool:
        return self.eta > 0 and self.table.mesh.size > 1

    @property
    def update_row(self) -> int:
        """The row of memory at the optimizer's update."""
        return FIRST_WINDOW + (len(self.table.graph.windows) if self.overlaps else 0)

    def window_row(self, op: str) -> int:
        """The row of what may hide in the window in which the op runs; only where it may."""
        return FIRST_WINDOW + self.table.graph.window_of(op)

    def shared(self, key: object, make) -> object:
        if key not in self.memo:
            self.memo[key] = make()
        return self.memo[key]

    def priced(self, ref: Ref, src: SpecIndex, dst: SpecIndex, runs: int) -> np.ndarray:
        """Seconds of a step for redistributing a value so often."""
        once = self.table.table(ref, src, dst)
        return once if runs == 1 else self.shared(("runs", id(once), runs), lambda: runs * once)

    def nbytes(self, ref: Ref, spec: Spec) -> float:
        """Bytes of a value on one rank: `local_bytes`, once for equal values."""
        meta = self.table.graph.meta(ref)
        return self.shared(("bytes", meta.logical_shape, meta.dtype, spec), lambda: local_bytes(self.table, ref, spec))

    def add_items(self, node: int, row: int, amounts: np.ndarray) -> None:
        hit = np.flatnonzero(amounts)
        if len(hit):
            self.items.append((node, hit, row, amounts[hit]))

    def has_bytes(self, name: str) -> bool:
        """Whether the bytes of what the op makes are surely those of this program: not where it is a part of one, and others may have them too."""
        free = self.table.training.floor
        return free is None or not (name in free or self.table.graph.op(name).is_port)

    def add_saved(self, node: int, amounts: np.ndarray, late: np.ndarray | bool) -> None:
        """Bytes that a micro-batch keeps at the turn. `late`: until its weight part, so that those have them too which wait for that alone."""
        flying, waiting = self.in_flight
        others = np.broadcast_to(np.where(late, flying - 1, flying - 1 - waiting), amounts.shape)
        self.add_items(node, MEMORY, (1 + others) * amounts)
        if flying > 1:
            self.saved.append((node, amounts, others))

    def is_read_late(self, ref: Ref) -> bool:
        """Whether the weight part of a split backward surely reads the value, or one in its buffer."""
        graph = self.table.graph
        return storage_root(graph, ref) in self.shared("late", lambda: frozenset(
            storage_root(graph, r) for op in graph.ops if op.phase == WEIGHT and not is_source(op) for r in op.refs))
