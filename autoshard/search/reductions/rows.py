"""Rows that cannot bind are dropped, and with them the items that lie only on such rows.

Example: three nodes that can use at most 4 + 5 + 6 on a row with limit 20 never exceed it."""
from __future__ import annotations

import numpy as np

from autoshard.search.reductions.core import Core, Item, charge


def most_load(core: Core) -> np.ndarray:
    """An upper bound of each row's load."""
    delta = np.zeros(len(core.limit) + 1)
    for v in core.alive:
        for item in core.items[v]:
            top = item.amount.max()
            delta[item.lo] += top
            delta[item.hi] -= top
    return core.base + np.cumsum(delta)[:-1]


def drop_slack_rows(core: Core) -> list[int]:
    """Nodes whose items changed. Items are trimmed to the rows that can still bind."""
    if not len(core.limit):
        return []
    finite = np.where(np.isfinite(core.limit), core.limit, 0.0)
    scale = 1e-12 * np.maximum(np.abs(finite), np.abs(core.base))  # cumulated sums of seconds or bytes round
    binding = most_load(core) > core.limit - scale
    before = np.concatenate([[0], np.cumsum(binding)])
    live = np.flatnonzero(binding)
    changed = []
    for v in core.alive:
        if core.items[v]:
            new = _trim(core.items[v], before, live)
            if new is not None:
                items, core.items[v] = new, ()
                for item in items:
                    core.add_item(v, item.lo, item.hi, item.amount)
                changed.append(v)
    return changed


def price_certain_rows(core: Core) -> list[int]:
    """A priced row whose least load already reaches the limit costs price x (load - limit), always: no max is left.

    Returns the nodes whose costs changed. Example: limit 0, base 3, price 2: an item of 5 costs 10."""
    certain = np.isfinite(core.price) & (core.price > 0) & (core.base >= core.limit)
    if not certain.any():
        return []
    unit = np.where(certain, core.price, 0.0)
    total = np.concatenate([[0.0], np.cumsum(unit)])
    changed = []
    for v in core.alive:
        for item in core.items[v]:
            price = total[item.hi] - total[item.lo]
            if price:
                core.cost[v] = core.memo_shaped(charge, (float(price),), core.cost[v], item.amount)
                changed.append(v)
    core.constant += float(np.dot(unit, core.base - np.where(certain, core.limit, 0.0)))
    core.price = np.where(certain, 0.0, core.price)  # a row without a price is slack for good
    core.limit = np.where(certain, np.inf, core.limit)
    return changed


def _trim(items: tuple[Item, ...], before: np.ndarray, live: np.ndarray) -> list[Item] | None:
    """Cut each item to its first and last live row; None when nothing changes."""
    out, changed = [], False
    for item in items:
        a, b = before[item.lo], before[item.hi]
        if a == b:
            changed = True
            continue
        lo, hi = int(live[a]), int(live[b - 1]) + 1
        if (lo, hi) != (item.lo, item.hi):
            changed = True
            item = Item(lo, hi, item.amount)
        out.append(item)
    return out if changed else None
