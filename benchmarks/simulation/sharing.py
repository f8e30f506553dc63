"""How much longer ops take while all processes of a machine compute than for one alone: a calibration's own cases, taken both ways in the same rounds. No
plan and no step that is predicted has a part in it. It is a function of the op and of how long it takes: what stays in a core's own caches shares nothing
(an update of 34 us takes 1.06 times as long), what goes through memory does (one of 3 ms takes 1.7 times)."""
from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

import numpy as np
import torch.distributed as dist

from autoshard import Plan
from autoshard.base.graph import Graph
from autoshard.calibrate.measure import Rounds, timed
from autoshard.cost.cluster import Cluster
from autoshard.cost.compute import op_name
from autoshard.rules.family import Family
from autoshard.rules.registry import rule_of
from autoshard.runtime.execute.watched import Doing
from autoshard.simulation.program import UPDATE
from autoshard.simulation.simulate import program_for

Cases = Sequence[tuple[float, float]]
"""(seconds alone, seconds together over seconds alone)."""
Ratios = Mapping[str, Cases]
"""By op, by family of ops, of updates ("optimizer") and of views ("view"); "": all that was timed."""
NEAR = 1.0
"""Of logarithms of seconds: a case so much shorter or longer weighs 0.6 of one of the same length. By itself a case differs from run to run by more than
it does from its neighbours."""


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
        samples = [w.sample for w in self.work]
        return ratios([(s.key, str(s.family or s.kind)) for s in samples], together, np.array(self.table))


def ratios(names: Sequence[tuple[str, str]], together: np.ndarray, single: np.ndarray) -> Ratios:
    """Of cases of these ops and families, timed in the same rounds [rounds, cases]: medians over rounds."""
    found: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for (op, family), ratio, seconds in zip(names, np.median(together / single, axis=0).tolist(), np.median(single, axis=0).tolist(), strict=True):
        for name in (op, family, ""):
            found[name].append((seconds, ratio))
    return found


def ratio_at(cases: Cases, seconds: float) -> float:
    """Of an op that takes so long alone: the median over cases, where those of about that length weigh most. Nothing shorter than the shortest case or
    longer than the longest is told from it."""
    alone, more = np.array(sorted(cases, key=lambda case: case[1])).T
    far = np.log(alone / np.clip(seconds, alone.min(), alone.max()))
    upto = np.cumsum(np.exp(-0.5 * (far / NEAR) ** 2))
    return float(more[np.searchsorted(upto, upto[-1] / 2)])


def factors(doings: Sequence[Doing], seconds: Sequence[float], graph: Graph, plan: Plan, profile: Cluster, found: Ratios) -> list[float]:
    """Of each call of a step, which takes so many seconds alone, and of the rest, which is the update and Python by their prices."""
    rest = more = 0.0
    for work in program_for(graph, plan, profile, executed=True).works:
        if work.window == UPDATE:
            rest += work.seconds
            more += work.seconds * ratio_at(found["optimizer" if work.kind == "update" else "view"], work.seconds)
    of_rest = more / rest if rest else ratio_at(found[""], seconds[-1])
    return [*(ratio_at(cases_of(doing, graph, found), s) for doing, s in zip(doings, seconds, strict=False)), of_rest]


def cases_of(doing: Doing, graph: Graph, found: Ratios) -> Cases:
    """Of the op itself if it was timed, else of its family, else of all."""
    names = [str(Family.COPY)] if doing.kind == "copy" else []
    if doing.kind == "op" and doing.name in graph.calls and not getattr(graph.calls[doing.name].target, "inside", ()):
        target = graph.calls[doing.name].target
        family = rule_of(target).family
        names = ["view"] if family.free else [op_name(target), str(family.priced_as)]
    return next((found[name] for name in names if name in found), found[""])
