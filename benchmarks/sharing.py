"""How much longer ops take while all processes of a machine compute than for one alone: a calibration's own cases, taken both ways. No plan and no step
that is predicted has a part in it."""
from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

import torch.distributed as dist

from autoshard import Plan
from autoshard.base.graph import Graph
from autoshard.calibrate.measure import Rounds, timed
from autoshard.calibrate.run import Measuring
from autoshard.cost.cluster import Cluster
from autoshard.runtime.execute.watched import Doing
from autoshard.simulation.program import UPDATE
from autoshard.simulation.simulate import program_for


class OneByOne(Rounds):
    """The ops, updates and views of a calibration that its curves are made of, by one rank after the other, while the others rest."""

    def __init__(self, measuring: Measuring) -> None:
        every = measuring.rounds
        super().__init__([w for w in every.work if not w.together and not w.sample.held_out and w.sample.dtype == "float32"], every.watch)
        self.measuring = measuring

    def go(self) -> None:
        own: list[float] = []
        for rank in range(dist.get_world_size()):
            dist.barrier()
            if rank == dist.get_rank():
                own = timed(self.work, self.repeats, self.watch)
        dist.barrier()
        self.table.append(self.watch.slowest(own))

    def cluster(self) -> Cluster:
        """The profile whose ops and updates are those of one process; all else is as in the calibration."""
        return self.measuring.fitted([*self.samples(), *(s for s in self.measuring.found().samples if s.kind in ("collective", "step"))])


def factors(doings: Sequence[Doing], graph: Graph, plan: Plan, together: Cluster, single: Cluster) -> list[float]:
    """Of each call of a step, and of the rest, its price in one profile over that in the other; what has no price of its own gets the step's."""
    all_of, one_of = (_prices(graph, plan, cluster) for cluster in (together, single))
    whole = sum(all_of.values()) / sum(one_of.values())
    rest = [sum(seconds for (window, _, _), seconds in prices.items() if window == UPDATE) for prices in (all_of, one_of)]
    keys = [(d.window, d.kind, d.name) for d in doings]
    return [*(all_of[key] / one_of[key] if one_of.get(key) else whole for key in keys), rest[0] / rest[1]]


def _prices(graph: Graph, plan: Plan, cluster: Cluster) -> Mapping[tuple[str, str, str], float]:
    """Seconds by window, kind of work, and name."""
    out: dict[tuple[str, str, str], float] = defaultdict(float)
    for work in program_for(graph, plan, cluster, executed=True).works:
        out[work.window, work.kind, work.name] += work.seconds
    return out
