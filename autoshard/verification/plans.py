"""Plans worth verifying. The best plan of a tiny model replicates nearly everything, and so tests nothing: these split.

    searched         what `autoshard.plan` finds for the cluster as it is
    split            what it finds where compute is a million times dearer, so that splitting always pays
    data_parallel    parameters whole, every op split where it stands as is cheapest
    fully_sharded    parameters over as many mesh axes as they divide by
    tensor_parallel  no activation's dim 0 (the batch) on the last mesh axis, parameters split
    random:SEED      strategies drawn at random from all that can be reached
"""
from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from difflib import get_close_matches
from functools import cached_property

import numpy as np

from autoshard.base.graph import Ref
from autoshard.base.plan import Plan
from autoshard.base.spec import Spec
from autoshard.cost.cluster import Cluster
from autoshard.decide.make_plan import make_plan
from autoshard.decide.options import PROPAGATE, Options
from autoshard.decide.walks.greedy import STORAGE, complete, greedy
from autoshard.decide.walks.reads import Wiring
from autoshard.errors import UsageError
from autoshard.formulate.problem_of import Formulation, formulate
from autoshard.planner.one_stage import decide
from autoshard.program.flow import param_derived
from autoshard.search.problem import Solution, Status
from autoshard.space.cost_table import CostTable, OpCost, build_cost_table

DEARER = 1e6
NEVER = 1e9
"""Seconds: dearer than any plan, yet finite, so that what has no other way still runs."""
NAMES = ("searched", "split", "data_parallel", "fully_sharded", "tensor_parallel", "random:0")


def check_names(names: Iterable[str]) -> tuple[str, ...]:
    """Raises UsageError for a name that is no kind of plan, with the nearest one."""
    names = tuple(names)
    for name in names:
        if not isinstance(name, str):
            raise UsageError(f"plans= takes names ({', '.join(NAMES[:-1])}, random:SEED), not {type(name).__name__}; pass a plan as plan=")
        kind, _, seed = name.partition(":")
        if name not in NAMES and not (kind == "random" and (not seed or seed.isdigit())):
            near = get_close_matches(name, NAMES, n=1)
            raise UsageError(f"no kind of plan is called {name!r}{f'; did you mean {near[0]}?' if near else ''} "
                             f"(known: {', '.join(NAMES[:-1])}, random:SEED)")
    if not names:
        raise UsageError(f"no plans to verify; name some of {', '.join(NAMES[:-1])}, random:SEED")
    return names


class Plans:
    """Makes plans of one traced program by name."""

    def __init__(self, table: CostTable, options: Options, has_loss: bool) -> None:
        self.table, self.options, self.has_loss = table, options, has_loss

    def named(self, names: Iterable[str]) -> Iterator[tuple[str, Plan]]:
        """(name, plan), each made when it is asked for. Raises what planning raises."""
        for name in names:
            yield name, self._make(name)

    def _make(self, name: str) -> Plan:
        if name == "searched":
            return decide(self.table, self.options, has_loss=self.has_loss, interruptible=False)
        if name == "split":
            searching = replace(self.options, search="auto") if self.options.search == PROPAGATE else self.options
            return decide(self._dear, searching, has_loss=self.has_loss, interruptible=False)
        if name == "tensor_parallel":
            return self._walked(self._without_batch, STORAGE["fully sharded"])
        if name in ("data_parallel", "fully_sharded"):
            return self._walked(self._dear, STORAGE[name.replace("_", " ")])
        return self._drawn(int(name.partition(":")[2] or 0))

    @cached_property
    def _dear(self) -> CostTable:
        t = self.table
        return build_cost_table(t.graph, t.mesh, dearer(t.cluster), t.strategies, t.training)

    @cached_property
    def _without_batch(self) -> CostTable:
        """The dear table with a fine on every forward activation whose dim 0 the last mesh axis splits."""
        table = self._dear
        weights = param_derived(table.graph)
        ops = dict(table.ops)
        for op in table.graph.of_kind("call"):
            if op.phase == "forward" and Ref(op.name) not in weights:
                fine = NEVER * (table.strategies[op.name].outputs[:, 0, -1] == 0)
                ops[op.name] = OpCost(ops[op.name].compute + fine, ops[op.name].inner, ops[op.name].update)
        return replace(table, ops=ops)

    def _walked(self, table: CostTable, rank: Callable[[Spec], float],
                score: Callable[[np.ndarray], np.ndarray] = lambda seconds: seconds) -> Plan:
        wiring = Wiring(formulate(table))
        return self._assembled(wiring.formulation, complete(wiring, greedy(wiring, rank, score)))

    def _drawn(self, seed: int) -> Plan:
        rng = np.random.default_rng(seed)
        ranks: dict[Spec, float] = {}

        def drawn(seconds: np.ndarray) -> np.ndarray:
            open_ways = np.flatnonzero(np.isfinite(seconds))
            return np.arange(len(seconds)) != (rng.choice(open_ways) if len(open_ways) else 0)  # no way in: evaluating the choice shows it

        return self._walked(self.table, lambda spec: ranks.setdefault(spec, rng.random()), drawn)

    def _assembled(self, formulation: Formulation, choice: np.ndarray) -> Plan:
        solution = Solution(choice, np.inf, 0.0, Status.GAP, 0.0)
        return make_plan(formulation, solution, model={}, seeds={},
                         settings=self.options.settings(self.table.graph.training, self.has_loss))


def dearer(cluster: Cluster) -> Cluster:
    """The cluster with compute `DEARER` times as slow and the same links."""
    device = cluster.device
    slow = replace(device, peak={name: flops / DEARER for name, flops in device.peak.items()},
                   memory_bandwidth=device.memory_bandwidth / DEARER)
    return replace(cluster, name=f"{cluster.name}, compute {DEARER:.0e} times as slow", device=slow)
