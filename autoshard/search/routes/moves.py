"""Compiled local search: exact re-optimisation of random induced trees, priced and with noise, annealed.

A move picks a random set of nodes that induces a tree, solves it exactly by dynamic programming given its surroundings
(costs + prices x usage + noise), and keeps the outcome if every row still fits and the true cost rises by no more
than the temperature allows. Prices steer; only true costs and true loads decide."""
from __future__ import annotations

from typing import NamedTuple

import numpy as np

from autoshard.search.dual.jit import compiled
from autoshard.search.dual.messages import add_usage
from autoshard.search.dual.packed import Packed

COST, OVER, BEST, FACTOR = range(4)
"""Places in the tally of a walk: its cost with priced excess, its violation, the best cost, and the factor on the prices."""


@compiled
def _random(state: np.ndarray) -> float:
    """Uniform in [0, 1) from a 64-bit xorshift: the same on every thread and machine for the same state."""
    x = state[0]
    x ^= x >> np.uint64(12)
    x ^= x << np.uint64(25)
    x ^= x >> np.uint64(27)
    state[0] = x
    return float((x * np.uint64(2685821657736338717)) >> np.uint64(11)) / 9007199254740992.0


@compiled
def violation(load: np.ndarray, p: Packed) -> float:
    """How far the hard rows are over their limits, added up."""
    total = 0.0
    for r in range(len(load)):
        if load[r] > p.slack[r] and p.price[r] == np.inf:
            total += load[r] - p.slack[r]
    return total


@compiled
def excess_cost(load: np.ndarray, p: Packed) -> float:
    """What the priced rows cost."""
    total = 0.0
    for r in range(len(load)):
        if load[r] > p.slack[r] and p.price[r] < np.inf:
            total += p.price[r] * (load[r] - p.slack[r])
    return total


@compiled
def _grow(p: Packed, rng: np.ndarray, size: int, stamp: int, seen: np.ndarray, count: np.ndarray,
          tree: np.ndarray, link: np.ndarray, frontier: np.ndarray) -> int:
    """Fill `tree` with nodes in order of addition; `link[i]` = the adjacency entry of tree[i] that leads to its parent.

    seen[v] = stamp: v has been touched; count[v]: its neighbours in the tree (-1: in the tree itself)."""
    n = len(p.start) - 1
    root = int(_random(rng) * n)
    length, waiting = 0, 0
    frontier[waiting] = root
    waiting += 1
    seen[root], count[root] = stamp, 1
    while waiting > 0 and length < size:
        at = int(_random(rng) * waiting)
        v = frontier[at]
        waiting -= 1
        frontier[at] = frontier[waiting]
        if count[v] != 1:
            continue
        count[v] = -1
        tree[length] = v
        link[length] = -1
        for a in range(p.adj_ptr[v], p.adj_ptr[v + 1]):
            w = p.adj_node[a]
            if seen[w] != stamp:
                seen[w], count[w] = stamp, 0
            if count[w] == -1:
                link[length] = a
            else:
                count[w] += 1
                if count[w] == 1:
                    frontier[waiting] = w
                    waiting += 1
        length += 1
    return length


@compiled
def _solve_tree(p: Packed, rng: np.ndarray, length: int, stamp: int, seen: np.ndarray, count: np.ndarray,
                tree: np.ndarray, link: np.ndarray, cost: np.ndarray, noise: float, value: np.ndarray, place: np.ndarray,
                choice: np.ndarray, new: np.ndarray) -> None:
    """Write the tree's best choices, the rest fixed, to `new`. `place[v]`: where v's values start in `value`."""
    start, adj_ptr, adj_node, adj_table, adj_back, table = p.start, p.adj_ptr, p.adj_node, p.adj_table, p.adj_back, p.table
    used = 0
    for i in range(length):
        v = tree[i]
        place[v] = used
        k = start[v + 1] - start[v]
        _own_values(cost, rng, start[v], k, noise, value, used)
        for a in range(adj_ptr[v], adj_ptr[v + 1]):
            w = adj_node[a]
            if not (seen[w] == stamp and count[w] == -1):
                t0 = adj_table[adj_back[a]] + choice[w] * k
                for s in range(k):
                    value[used + s] += table[t0 + s]
        used += k
    for i in range(length - 1, 0, -1):
        v, a = tree[i], link[i]
        w = adj_node[a]
        _pass_on(table, adj_table[a], start[v + 1] - start[v], start[w + 1] - start[w], value, place[v], place[w], used)
    for i in range(length):
        v, a = tree[i], link[i]
        k, own = start[v + 1] - start[v], place[v]
        t0 = adj_table[adj_back[a]] + new[adj_node[a]] * k if i > 0 else 0
        best, at = np.inf, choice[v]
        for s in range(k):
            candidate = value[own + s] + table[t0 + s] if i > 0 else value[own + s]
            if candidate < best:
                best, at = candidate, s
        new[v] = at


@compiled
def _own_values(cost: np.ndarray, rng: np.ndarray, base: int, k: int, noise: float, value: np.ndarray, at: int) -> None:
    """Write what a node's strategies cost with noise to `value[at:]`."""
    for s in range(k):
        value[at + s] = cost[base + s]
    if noise > 0.0:
        for s in range(k):
            value[at + s] -= noise * np.log(1.0 - _random(rng))


@compiled
def _pass_on(table: np.ndarray, t0: int, k: int, width: int, value: np.ndarray, own: int, parent: int, spare: int) -> None:
    """Add the best of a node's values, given its parent's strategy, to the parent's; `spare`: where `value` has room."""
    for t in range(spare, spare + width):
        value[t] = np.inf
    for s in range(k):
        own_s = value[own + s]
        if own_s < np.inf:
            row = t0 + s * width - spare
            for t in range(spare, spare + width):
                candidate = own_s + table[row + t]
                value[t] = candidate if candidate < value[t] else value[t]
    for t in range(width):
        value[parent + t] += value[spare + t]


@compiled
def _change(p: Packed, length: int, tree: np.ndarray, choice: np.ndarray, new: np.ndarray) -> float:
    """True cost of the tree's new choices minus the present ones. Outside the tree `new` equals `choice`."""
    after = before = 0.0
    for i in range(length):
        v = tree[i]
        base = p.start[v]
        after += p.cost[base + new[v]]
        before += p.cost[base + choice[v]]
        for a in range(p.adj_ptr[v], p.adj_ptr[v + 1]):
            w = p.adj_node[a]
            width, t0 = p.start[w + 1] - p.start[w], p.adj_table[a]
            factor = 0.5 if new[w] != choice[w] else 1.0  # both ends moved: each end sees the edge once
            if new[v] != choice[v]:
                after += factor * p.table[t0 + new[v] * width + new[w]]
                before += factor * p.table[t0 + choice[v] * width + choice[w]]
    return after - before


@compiled
def _apply_loads(p: Packed, length: int, tree: np.ndarray, choice: np.ndarray, new: np.ndarray, load: np.ndarray,
                 trial: np.ndarray) -> tuple[float, float]:
    """Write the loads after the move to `trial`; returns the violation and the excess cost there."""
    for r in range(len(load) + 1):
        trial[r] = 0.0
    for i in range(length):
        v = tree[i]
        if new[v] != choice[v]:
            for j in range(p.item_ptr[v], p.item_ptr[v + 1]):
                amount = p.amount[p.item_amount[j] + new[v]] - p.amount[p.item_amount[j] + choice[v]]
                trial[p.item_lo[j]] += amount
                trial[p.item_hi[j]] -= amount
    change = over = excess = 0.0
    for r in range(len(load)):
        change += trial[r]
        trial[r] = load[r] + change
        if trial[r] > p.slack[r]:
            if p.price[r] == np.inf:
                over += trial[r] - p.slack[r]
            else:
                excess += p.price[r] * (trial[r] - p.slack[r])
    return over, excess


class Workspace(NamedTuple):
    """What the moves of one thread write to. A tree: `tree[i]` its nodes, `link`, `seen` and `counts` (its `count`) as in `_grow`, `value` and
    `place` as in `_solve_tree`, `new` the choice with the tree's part changed. `trial`: loads after the move; `priced`: costs
    + prices x usage, `unit` being prices x usage."""

    seen: np.ndarray
    counts: np.ndarray
    tree: np.ndarray
    link: np.ndarray
    frontier: np.ndarray
    place: np.ndarray
    value: np.ndarray
    trial: np.ndarray
    new: np.ndarray
    priced: np.ndarray
    unit: np.ndarray


@compiled
def _workspace(p: Packed, choice: np.ndarray, rows: int, prices: np.ndarray) -> Workspace:
    n = len(p.start) - 1
    unit = np.empty(len(p.cost))
    _usage_price(p, prices, unit)
    return Workspace(np.zeros(n, dtype=np.int64), np.zeros(n, dtype=np.int64), np.empty(n, dtype=np.int64), np.empty(n, dtype=np.int64),
                     np.empty(len(p.adj_node) + 1, dtype=np.int64), np.empty(n, dtype=np.int64),
                     np.empty(p.start[n] + np.max(np.diff(p.start))), np.empty(rows + 1), choice.copy(), p.cost.copy(), unit)


@compiled
def anneal(p: Packed, choice: np.ndarray, best: np.ndarray, load: np.ndarray, tally: np.ndarray, prices: np.ndarray,
           rng: np.ndarray, moves: int, most: int, hot: float, cold: float, noise: float) -> None:
    """Make `moves` moves on `choice` (with its `load`), the temperature falling geometrically from `hot` to `cold`.

    `tally`: see COST and the names beside it; `best` is only replaced by choices that fit."""
    work = _workspace(p, choice, len(load), prices)
    soft, paid = bool(np.any(p.price < np.inf)), excess_cost(load, p)
    for move in range(moves):
        if move % 64 == 0:
            for i in range(len(work.priced)):
                work.priced[i] = p.cost[i] + tally[FACTOR] * work.unit[i]
        temperature = hot * (cold / hot) ** (move / moves) if hot > 0.0 else 0.0
        length = _propose(p, work, choice, rng, move + 1, most, noise * temperature)
        if _moves(length, work.tree, choice, work.new):
            paid = _decide(p, work, length, choice, best, load, tally, rng, temperature, soft, paid)


@compiled
def _propose(p: Packed, work: Workspace, choice: np.ndarray, rng: np.ndarray, stamp: int, most: int, noise: float) -> int:
    """Solve a random tree of at most `most` nodes into `work.new`; returns its size."""
    size = min(int(np.exp(_random(rng) * np.log(most))) + 1, len(p.start) - 1)
    length = _grow(p, rng, size, stamp, work.seen, work.counts, work.tree, work.link, work.frontier)
    _solve_tree(p, rng, length, stamp, work.seen, work.counts, work.tree, work.link, work.priced, noise * _random(rng), work.value,
                work.place, choice, work.new)
    return length


@compiled
def _decide(p: Packed, work: Workspace, length: int, choice: np.ndarray, best: np.ndarray, load: np.ndarray, tally: np.ndarray,
            rng: np.ndarray, temperature: float, soft: bool, paid: float) -> float:
    """Take the proposed move if it fits and costs no more than the temperature allows, or fits better than before. `paid` is
    what priced rows cost before it; returns what they cost now."""
    change = _change(p, length, work.tree, choice, work.new)
    allowed = -temperature * np.log(1.0 - _random(rng))
    accept = change <= allowed or tally[OVER] > 0.0
    over = excess = 0.0
    if (accept or soft) and len(load) > 0:
        over, excess = _apply_loads(p, length, work.tree, choice, work.new, load, work.trial)
        change += excess - paid
        accept = change <= allowed and over <= 0.0 if tally[OVER] <= 0.0 else over < tally[OVER]
        tally[FACTOR] = tally[FACTOR] * 0.999 if over <= 0.0 else min(tally[FACTOR] * 1.002, 20.0)
    if not accept:
        _copy(length, work.tree, choice, work.new)
        return paid
    _copy(length, work.tree, work.new, choice)
    load[:] = work.trial[:-1]
    _note(choice, best, tally, change, over)
    return excess


@compiled
def _moves(length: int, tree: np.ndarray, choice: np.ndarray, new: np.ndarray) -> bool:
    for i in range(length):
        if new[tree[i]] != choice[tree[i]]:
            return True
    return False


@compiled
def _copy(length: int, tree: np.ndarray, source: np.ndarray, target: np.ndarray) -> None:
    for i in range(length):
        target[tree[i]] = source[tree[i]]


@compiled
def _note(choice: np.ndarray, best: np.ndarray, tally: np.ndarray, change: float, over: float) -> None:
    """An accepted move: the tally, and the best choice if this one fits and is cheaper."""
    tally[COST] += change
    tally[OVER] = over
    if over <= 0.0 and tally[COST] < tally[BEST]:
        tally[BEST] = tally[COST]
        best[:] = choice


@compiled
def _usage_price(p: Packed, prices: np.ndarray, out: np.ndarray) -> None:
    total = np.zeros(len(prices) + 1)
    for r in range(len(prices)):
        total[r + 1] = total[r] + prices[r]
    out[:] = 0.0
    add_usage(p, total, out)
