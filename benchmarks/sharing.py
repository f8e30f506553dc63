"""How much longer ops take while all processes of a machine compute than for one alone: a calibration's own cases, taken both ways in the same rounds. No
plan and no step that is predicted has a part in it."""
from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

import numpy as np
import torch.distributed as dist

from autoshard import Plan
from autoshard.base.graph import Graph
from autoshard.calibrate.measure import Rounds, timed
from autoshard.cost.cluster import Cluster
from autoshard.rules.family import Family
from autoshard.rules.registry import rule_of
from autoshard.runtime.execute.watched import Doing
from autoshard.simulation.program import UPDATE
from autoshard.simulation.simulate import program_for

Ratios = Mapping[str, float]
"""Seconds together over seconds alone, by family of ops, of updates ("optimizer") and of views ("view"); "": of all that was timed."""


class OneByOne(Rounds):
    """The ops, updates and views of a calibration that its curves are made of, by one rank after the other, while the others rest."""

    def __init__(self, together: Rounds) -> None:
        self.at = [i for i, w in enumerate(together.work) if not w.together and not w.sample.held_out and w.sample.dtype == "float32"]
        super().__init__([together.work[i] for i in self.at], together.watch)
        self.others = together

    def go(self) -> None:
        """Right after a round of all ranks together."""
        own: list[float] = []
        for rank in range(dist.get_world_size()):
            dist.barrier()
            if rank == dist.get_rank():
                own = timed(self.work, self.repeats, self.watch)
        dist.barrier()
        self.table.append(self.watch.slowest(own))

    def ratios(self) -> Ratios:
        together = np.array(self.others.table[-len(self.table):])[:, self.at]
        return ratios([w.sample.family or w.sample.kind for w in self.work], together, np.array(self.table))


def ratios(kinds: Sequence[str], together: np.ndarray, single: np.ndarray) -> Ratios:
    """Of cases of these kinds, timed in the same rounds [rounds, cases]: the median of a kind's cases, each of which is a median over rounds and counts by its
    seconds, as steps consist of large ops. Sizes of one kind differ less than a case by itself does from run to run."""
    found: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for kind, ratio, seconds in zip(kinds, np.median(together / single, axis=0).tolist(), np.median(single, axis=0).tolist(), strict=True):
        found[str(kind)].append((ratio, seconds))
        found[""].append((ratio, seconds))
    return {kind: weighted_median(of) for kind, of in found.items()}


def weighted_median(values: Sequence[tuple[float, float]]) -> float:
    """The least of (value, weight) up to which half of the weight lies."""
    ordered = sorted(values)
    upto = np.cumsum([weight for _, weight in ordered])
    return ordered[int(np.searchsorted(upto, upto[-1] / 2))][0]


def factors(doings: Sequence[Doing], graph: Graph, plan: Plan, profile: Cluster, found: Ratios) -> list[float]:
    """Of each call of a step, and of the rest, which is the update and Python by their prices."""
    rest = {"update": 0.0, "rest": 0.0}
    for work in program_for(graph, plan, profile, executed=True).works:
        if work.window == UPDATE:
            rest[work.kind] += work.seconds
    total = sum(rest.values())
    of_rest = (rest["update"] * found["optimizer"] + rest["rest"] * found["view"]) / total if total else found[""]
    return [*(found.get(kind_of(doing, graph), found[""]) for doing in doings), of_rest]


def kind_of(doing: Doing, graph: Graph) -> str:
    """The family whose ops were timed for it."""
    if doing.kind == "copy":
        return str(Family.COPY)
    if doing.kind != "op" or doing.name not in graph.calls or getattr(graph.calls[doing.name].target, "inside", ()):
        return ""
    family = rule_of(graph.calls[doing.name].target).family
    return "view" if family.free else str(family.priced_as)
