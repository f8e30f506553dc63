"""How a simulated step differs from what its profile says: slow ranks and links, uneven loads, devices that are not equally fast, jitter; and whether
collectives share links."""
from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import isfinite, log, prod, sqrt

import numpy as np

from autoshard.base.mesh import Mesh
from autoshard.collectives.phases import Phases, alone
from autoshard.cost.cluster import Cluster
from autoshard.errors import UsageError

ROUNDING = 1e-9
"""Of loads that add up to the number of ranks."""
SPEEDS = 1
"""Beside a seed: speeds are no draws of the jitter."""


@dataclass(frozen=True)
class Conditions:
    """slow_ranks  rank -> how many times as long as others it takes for work
    slow_links     "nvlink", or "nvlink@3" for the ranks of node 3 -> the share of its bandwidth that is left
    expert_load    rank -> tokens' rows that come to its experts, over those of an even load. The other ranks of its group share what is left evenly
    jitter         relative standard deviation of the seconds of every stretch of work between two collectives, drawn per rank (log-normal,
                   mean 1)
    varied         relative standard deviation of how long ranks take for the same work: devices of one kind are not equally fast. Drawn once per
                   rank, and the same for all its work (log-normal, mean 1)
    seed           of jitter and speeds: the same seed, the same numbers
    shared_links   collectives that run at the same time share the links they use (events.py); else each has all of them (replay.py)

    Raises UsageError for numbers that make no sense; `check` for ranks, links and nodes that are not there."""

    slow_ranks: Mapping[int, float] = field(default_factory=dict)
    slow_links: Mapping[str, float] = field(default_factory=dict)
    expert_load: Mapping[int, float] = field(default_factory=dict)
    jitter: float = 0.0
    seed: int = 0
    shared_links: bool = False
    varied: float = 0.0

    def __post_init__(self) -> None:
        for rank, factor in self.slow_ranks.items():
            if not (isfinite(factor) and factor > 0):
                raise UsageError(f"slow rank {rank}: {factor:g} times as long makes no sense; give a positive number, 1.5 for half as long again")
        for link, share in self.slow_links.items():
            if not 0 < share <= 1:
                raise UsageError(f"slow link {link}: {share:g} is no share of its bandwidth; give more than 0 and at most 1, 0.5 for half "
                                 "(over a link that is gone no step ends: simulate the mesh that is left)")
        for rank, load in self.expert_load.items():
            if not (isfinite(load) and load >= 0):
                raise UsageError(f"expert load of rank {rank}: {load:g} makes no sense; give its rows over those of an even load, 1.5 for half "
                                 "as many again")
        if not (isfinite(self.jitter) and 0 <= self.jitter <= 10):
            raise UsageError(f"jitter {self.jitter:g}: give the relative standard deviation of work, 0 to 10: 0.05 for 5 %")
        if not (isfinite(self.varied) and 0 <= self.varied <= 10):
            raise UsageError(f"varied {self.varied:g}: give the relative standard deviation of the ranks' speeds, 0 to 10: 0.02 for 2 %")

    def check(self, mesh: Mesh, cluster: Cluster) -> None:
        """Raises UsageError for a rank, a link or a node that is not there."""
        for rank in (*self.slow_ranks, *self.expert_load):
            check_rank(rank, mesh)
        names = [link.name for link in cluster.links]
        for text in self.slow_links:
            name, node = _link(text)
            if name not in names:
                raise UsageError(f"slow link {text!r}: cluster {cluster.name} has no link {name!r}; its links are {', '.join(names)}")
            nodes = _nodes(mesh, cluster)
            if node is not None and node > nodes[-1]:
                raise UsageError(f"slow link {text!r}: there is no node {node}; the {mesh.size} ranks of mesh {mesh} fill nodes 0 to {nodes[-1]}")

    @property
    def ideal(self) -> bool:
        """Whether the machine is as its profile says."""
        return not (self.slow_ranks or self.slow_links or self.expert_load or self.jitter or self.varied)

    def work(self, mesh: Mesh) -> np.ndarray | float:
        """Per rank, how many times as long work takes."""
        if not (self.slow_ranks or self.varied):
            return 1.0
        out = log_normal(np.random.default_rng((self.seed, SPEEDS)), self.varied, mesh.sizes).ravel() if self.varied else np.ones(mesh.size)
        for rank, factor in self.slow_ranks.items():
            out[rank] *= factor
        return out.reshape(mesh.sizes)

    def load(self, mesh: Mesh, axes: tuple[int, ...]) -> np.ndarray:
        """Per rank, its rows over those of an even load, where experts lie on the ranks along `axes`. Raises UsageError where ranks of one group
        would get more than there is."""
        given = np.full(mesh.size, np.nan)
        given[list(self.expert_load)] = list(self.expert_load.values())
        given = given.reshape(mesh.sizes)
        open_ = np.isnan(given).sum(axis=axes, keepdims=True)
        left = prod(mesh.sizes[a] for a in axes) - np.nansum(given, axis=axes, keepdims=True)
        if (left < -ROUNDING).any() or (left > ROUNDING)[open_ == 0].any():
            names = ", ".join(f"{mesh.names[a]}={mesh.sizes[a]}" for a in axes)
            raise UsageError(f"expert loads {dict(self.expert_load)}: those of a group ({names}) are over an even load, so they add up to the number "
                             "of its ranks; give less, or leave a rank out, which gets what is left")
        return np.where(np.isnan(given), np.maximum(left, 0.0) / np.maximum(open_, 1), given)

    def links(self, mesh: Mesh, cluster: Cluster) -> dict[str, np.ndarray]:
        """Per slow link, the share of its bandwidth that each rank has."""
        out: dict[str, np.ndarray] = {}
        for text, share in self.slow_links.items():
            name, node = _link(text)
            here = np.ones(mesh.size, bool) if node is None else _nodes(mesh, cluster) == node
            out[name] = out.get(name, np.ones(mesh.sizes)) * np.where(here, share, 1.0).reshape(mesh.sizes)
        return out

    def describe(self) -> tuple[str, ...]:
        """In words, a line each."""
        ranks = [f"rank {r} takes {f:g} times as long for its work" for r, f in sorted(self.slow_ranks.items())]
        links = [f"{_words(name)} has {100 * share:g} % of its bandwidth" for name, share in sorted(self.slow_links.items())]
        loads = [f"{x:g} times an even load comes to the experts of rank {r}" for r, x in sorted(self.expert_load.items())]
        shared = ["collectives share the links that they use at the same time"] if self.shared_links else []
        varies = [f"work varies by {100 * self.jitter:g} % per rank and stretch, seed {self.seed}"] if self.jitter else []
        speeds = [f"ranks differ in speed by {100 * self.varied:g} %, seed {self.seed}"] if self.varied else []
        return (*ranks, *links, *loads, *shared, *speeds, *varies)


class Jitter:
    """Factors of work, a fresh array for every stretch."""

    def __init__(self, conditions: Conditions, mesh: Mesh) -> None:
        self.rng, self.deviation, self.sizes = np.random.default_rng(conditions.seed), conditions.jitter, mesh.sizes

    def __call__(self) -> np.ndarray | float:
        return log_normal(self.rng, self.deviation, self.sizes) if self.deviation else 1.0


def log_normal(rng: np.random.Generator, deviation: float, sizes: tuple[int, ...]) -> np.ndarray:
    """Factors with mean 1 and this standard deviation."""
    sigma = sqrt(log(1 + deviation**2))
    drawn: np.ndarray = rng.standard_normal(sizes)
    drawn *= sigma
    drawn -= 0.5 * sigma**2
    return np.exp(drawn, out=drawn)


def check_rank(rank: int, mesh: Mesh) -> None:
    """Raises UsageError for a rank that the mesh does not have."""
    if not 0 <= rank < mesh.size:
        raise UsageError(f"there is no rank {rank}: mesh {mesh} has ranks 0 to {mesh.size - 1}")


def seconds_of(groups: Phases, seconds: float, axes: tuple[int, ...], links: Mapping[str, np.ndarray]) -> np.ndarray | float:
    """Of a call with these phases over `axes`, which takes `seconds` alone: the slowest link among the ranks of a group counts."""
    if not any(phase.link in links for group in groups for phase in group):
        return seconds
    least = {name: share.min(axis=axes, keepdims=True) for name, share in links.items()}
    total = np.zeros(())
    for group in groups:
        total = total + np.maximum.reduce(np.broadcast_arrays(*(phase.seconds(least.get(phase.link, 1.0)) for phase in group)))
    return total if total.ndim else alone(groups)


def _link(text: str) -> tuple[str, int | None]:
    name, at, node = text.partition("@")
    if at and not re.fullmatch(r"\d+", node):
        raise UsageError(f"slow link {text!r}: after @ comes the number of a node, as in {name}@3")
    return name, int(node) if at else None


def _nodes(mesh: Mesh, cluster: Cluster) -> np.ndarray:
    """The node of every rank: ranks fill nodes in order."""
    inside = cluster.links[0].devices if len(cluster.links) > 1 else mesh.size
    return np.arange(mesh.size) // int(min(inside, mesh.size))


def _words(link: str) -> str:
    name, node = _link(link)
    return name if node is None else f"{name} of node {node}"
