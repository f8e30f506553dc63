"""Lossless reductions, applied until nothing changes. Each file holds one; `Core.undo` takes them back.

Every reduction keeps at least one optimal choice of the problem with its rows, so the bound and the optimum of what
is left, plus `core.constant`, are those of the whole."""
from __future__ import annotations

from collections.abc import Callable

import numpy as np

from autoshard.search.reductions.contraction import contract, has_host
from autoshard.search.reductions.core import GONE, Core
from autoshard.search.reductions.dead import Infeasible, drop_dead
from autoshard.search.reductions.dominance import dominate
from autoshard.search.reductions.elimination import eliminate
from autoshard.search.reductions.rows import drop_slack_rows, price_certain_rows
from autoshard.search.reductions.separable import separate
from autoshard.search.reductions.states import merge_states

__all__ = ["Infeasible", "drop_forbidden", "reduce_core", "settle_rows"]

Rule = Callable[[Core, int], bool]
CHEAP: tuple[Rule, ...] = (drop_dead, eliminate, contract, separate)
ALL: tuple[Rule, ...] = (*CHEAP, dominate, merge_states)


def reduce_core(core: Core, expired: Callable[[], bool] = lambda: False, changed: list[int] | None = None) -> None:
    """Reduce `core` in place to a fixpoint, or until `expired()`: stopping early is only less reduced. `changed`: the nodes
    that changed since it was last reduced, by default all.

    Raises Infeasible when some node has no strategy left, or a hard row's least load is over its limit."""
    with np.errstate(invalid="ignore"):  # forbidden - forbidden: every rule says what it means by that
        price_certain_rows(core)
        dirty = core.alive if changed is None else sorted({v for u in changed for v in (u, *core.adj[u])})
        _sweep(core, dirty, CHEAP, expired)
        dirty = core.alive if changed is None else [v for v in dirty if core.cost[v] is not GONE]
        while dirty and not expired():
            _check_rows(core)
            _sweep(core, dirty, ALL, expired)
            dirty = sorted({v for v in drop_slack_rows(core) + price_certain_rows(core) if core.cost[v] is not GONE})


def drop_forbidden(core: Core) -> None:
    """What has to be done also when the time is up, for messages need finite costs. Raises Infeasible."""
    _sweep(core, core.alive, (drop_dead,), lambda: False)


def settle_rows(core: Core) -> None:
    """Price rows that are surely over their limit. Raises Infeasible where a hard one is."""
    price_certain_rows(core)
    _check_rows(core)


def _check_rows(core: Core) -> None:
    hard = np.isinf(core.price)
    over = hard & (core.base > core.limit + 1e-9 * np.maximum(1.0, np.abs(core.limit)))
    if over.any():
        raise Infeasible(-1)


def _sweep(core: Core, dirty: list[int], rules: tuple[Rule, ...], expired: Callable[[], bool]) -> None:
    """Visit dirty nodes in waves; a node whose surroundings changed is visited again."""
    wave = dirty
    while wave:
        again: dict[int, None] = {}
        for count, v in enumerate(wave):
            if count % 256 == 0 and expired():
                return
            if core.cost[v] is GONE or core.is_settled(v, rules):
                continue
            around = tuple(core.adj[v])
            for rule in rules:
                if rule(core, v):
                    again.update(dict.fromkeys(around))
                    if core.cost[v] is GONE:
                        break
                    again[v] = None
                    around = (*around, *core.adj[v])
            if v not in again and core.cost[v] is not GONE and not has_host(core, v):
                core.settle(v, rules)
        wave = [v for v in again if core.cost[v] is not GONE]
