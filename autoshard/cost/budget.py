"""The memory that a plan may take on one rank. The allocator's slack enters here and nowhere else."""
from __future__ import annotations

import math
from dataclasses import dataclass, replace

from autoshard.cost.cluster import Device


@dataclass(frozen=True)
class Budget:
    """Bytes a rank may use at any moment. `limit`: with what the allocator takes on top, a fraction `slack` of the live bytes
    (inf: no limit)."""

    limit: float = math.inf
    slack: float = 0.0

    @staticmethod
    def of(device: Device, limit: float | None) -> Budget:
        """The budget of a device. `limit` None: any memory."""
        return Budget(math.inf if limit is None else limit, device.allocator_slack)

    @property
    def peak(self) -> float:
        """The most live bytes that a timeline, or a memory row of the search, may reach."""
        return self.limit / (1.0 + self.slack)

    def taken(self, live: float) -> float:
        """What so many live bytes take from the limit."""
        return live * (1.0 + self.slack)

    def holds(self, live: float) -> bool:
        """Whether so many live bytes stay within the limit."""
        return live <= self.peak

    def of_peak(self, live: float) -> Budget:
        """The budget that is just enough for a peak of so many live bytes."""
        return replace(self, limit=self.taken(live))
