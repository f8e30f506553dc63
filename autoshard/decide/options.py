"""What the user may set about planning, in one frozen place shared by `plan` and `compile`."""
from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

from autoshard.base.precision import Precision
from autoshard.errors import UsageError

if TYPE_CHECKING:
    from autoshard.cost.cluster import Cluster

UNITS = {"": 1, "b": 1, "kb": 1e3, "mb": 1e6, "gb": 1e9, "tb": 1e12,
         "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}
MODES = {"inputs": ("global", "local"), "outputs": ("replicate", "dtensor", "local"),
         "fallback": ("error", "replicate"), "offload": ("none", "optimizer")}
CHECKS = ("first", "always", "never")
"""When ranks compare the numbers of their inputs."""

PROPAGATE = "propagate"
"""In place of a search backend: spread the seeds, search nothing."""

Progress = Callable[[str, str], None]


@dataclass(frozen=True)
class Options:
    """Planning options; see `autoshard.plan` for their meaning. Raises UsageError for unusable values."""

    optimizer: str = "adamw"
    precision: Precision | None = None
    seeds: Mapping[str, Any] = field(default_factory=dict)
    inputs: str = "global"
    outputs: str = "replicate"
    memory_budget: float | None = None
    cluster: str = "h100-dgx"
    time_limit: float = 60.0
    search: str = "auto"
    fallback: str = "error"
    offload: str = "none"

    def __post_init__(self) -> None:
        from autoshard.search import BACKENDS  # loads the solvers

        if self.search not in (known := (*BACKENDS, PROPAGATE)):
            raise UsageError(f"no search backend {self.search!r}; there are {', '.join(known)}")
        for name, allowed in MODES.items():
            if getattr(self, name) not in allowed:
                raise UsageError(f"{name}={getattr(self, name)!r} is not one of {', '.join(allowed)}")
        if not self.time_limit > 0:
            raise UsageError(f"time_limit={self.time_limit!r}: give a positive number of seconds")
        if self.memory_budget is not None and not self.memory_budget > 0:
            raise UsageError(f"memory_budget={self.memory_budget!r}: give a positive number of bytes")

    @property
    def marks(self) -> dict[str, str]:
        """The seeds as text by key; `trace` takes those that name modules."""
        from autoshard.seeds.grammar import seed_text

        return {key: seed_text(value) for key, value in self.seeds.items()}

    @property
    def text(self) -> str:
        """All options but the cluster, whose numbers count and not its name; equal for equal options in every process."""
        values = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in ("cluster", "seeds")}
        return f"{values}, seeds {sorted(self.marks.items())}"

    def memory_limit(self, cluster: Cluster) -> float:
        """Bytes a rank may use: the budget, else what the device has."""
        return self.memory_budget or cluster.device.memory_capacity

    def check_offload(self, cluster: Cluster, training: bool) -> None:
        """Raises UsageError where optimizer state is to lie on the host, and there is none, or no link to the host."""
        if self.offload == "none":
            return
        if not training:
            raise UsageError("offload='optimizer': inference has no optimizer state; leave offload out")
        from autoshard.cost.compute import host_link

        host_link(self.optimizer, cluster.device)

    def settings(self, training: bool, has_loss: bool) -> dict[str, Any]:
        """The part that belongs to a plan."""
        p = self.precision
        return {**({"fallback": self.fallback} if self.fallback != "error" else {}),
                **({"offload": self.offload} if training and self.offload != "none" else {}),
                "optimizer": self.optimizer if training else "none", "training": training, "loss_in_graph": has_loss,
                "inputs": self.inputs, "outputs": self.outputs,
                "precision": None if p is None else {"param": p.param, "master": p.master, "reduce": p.reduce}}


def parse_bytes(text: str | float | None) -> float | None:
    """`"70GiB"`, `"80e9"`, `12345` to bytes. Raises UsageError."""
    if text is None or isinstance(text, (int, float)):
        return None if text is None else float(text)
    match = re.fullmatch(r"\s*([0-9.]+(?:[eE][+-]?[0-9]+)?)\s*([A-Za-z]*)\s*", text)
    if not match or match[2].lower() not in UNITS:
        raise UsageError(f"cannot read the amount of memory {text!r}; write for example 70GiB or 80e9")
    try:
        return float(match[1]) * UNITS[match[2].lower()]
    except ValueError:
        raise UsageError(f"cannot read the amount of memory {text!r}; write for example 70GiB or 80e9") from None
