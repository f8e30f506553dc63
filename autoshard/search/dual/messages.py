"""Compiled message passing (sequential tree-reweighted, TRW-S) and the row prices that go with it.

A message into v is a change of v's costs that the edge takes back, so for any messages and any prices in range

    sum_v min_s theta_v(s) + sum_uv min_st slack_uv(s, t) - sum_r price_r * slack_r

is a lower bound, with theta = cost + price of usage + messages in and slack_uv = table minus both messages. `decouple`
brings the bound of the sweeps into this form, whose validity needs no theory and no trust in the sweeps."""
from __future__ import annotations

import numpy as np

from autoshard.search.dual.jit import compiled
from autoshard.search.dual.packed import Packed

STEP, BOUND, IDLE, TARGET, FITTING = range(5)
"""Places in the state of an ascent: the step on the prices, the best bound, sweeps without progress, the cost aimed at, and the least
cost of a decoded choice that fits. One array, since compiled loops write to it."""
Place = np.uint64
"""Of an entry of a flat array, in the inner loops. A signed number may count from the end, and to look at its sign at every entry keeps such a loop
from making several sums at once."""


@compiled
def priced_costs(p: Packed, prices: np.ndarray, out: np.ndarray) -> float:
    """Write cost + price of usage to `out`; returns the constant -sum price x slack."""
    total = np.zeros(len(prices) + 1)
    constant = 0.0
    for r in range(len(prices)):
        total[r + 1] = total[r] + prices[r]
        if prices[r] > 0.0:
            constant -= prices[r] * p.slack[r]
    out[:] = p.cost
    add_usage(p, total, out)
    return constant


@compiled
def add_usage(p: Packed, total: np.ndarray, out: np.ndarray) -> None:
    """Add the price of usage to `out`; `total[r]`: prices of the rows before r, added up."""
    start, item_ptr, item_lo, item_hi, item_amount, amount = p.start, p.item_ptr, p.item_lo, p.item_hi, p.item_amount, p.amount
    for v in range(len(start) - 1):
        base, k = start[v], start[v + 1] - start[v]
        for i in range(item_ptr[v], item_ptr[v + 1]):
            unit = total[item_hi[i]] - total[item_lo[i]]
            if unit > 0.0:
                for s in range(k):
                    out[base + s] += unit * amount[item_amount[i] + s]


@compiled
def _marginals(start: np.ndarray, adj_ptr: np.ndarray, adj_node: np.ndarray, adj_message: np.ndarray, cost: np.ndarray, message: np.ndarray, v: int,
               theta: np.ndarray) -> float:
    """Write v's cost with all messages into it to `theta`. Returns the part of it that goes along one edge: as many parts as v has
    edges to earlier or to later nodes, whichever are more."""
    base, k = start[v], start[v + 1] - start[v]
    before = after = 0
    for s in range(k):
        theta[Place(base) + Place(s)] = cost[Place(base) + Place(s)]
    for a in range(adj_ptr[v], adj_ptr[v + 1]):
        m = adj_message[a]
        for s in range(k):
            theta[Place(base) + Place(s)] += message[Place(m) + Place(s)]
        if adj_node[a] < v:
            before += 1
        else:
            after += 1
    return 1.0 / max(before, after, 1)


@compiled
def _largest(start: np.ndarray) -> int:
    """Strategies of the largest node."""
    most = 0
    for v in range(len(start) - 1):
        most = max(most, start[v + 1] - start[v])
    return most


@compiled
def sweep(p: Packed, cost: np.ndarray, message: np.ndarray, theta: np.ndarray, backward: bool) -> float:
    """One pass over the nodes; `theta` gets each node's min-marginal on its chains. Returns the bound (backward only)."""
    start, adj_ptr, adj_node, adj_message, adj_back = p.start, p.adj_ptr, p.adj_node, p.adj_message, p.adj_back
    adj_table, adj_kind, adj_kinds, kind, table = p.adj_table, p.adj_kind, p.adj_kinds, p.kind, p.table
    n = len(start) - 1
    own, best = np.empty(_largest(start)), np.empty(_largest(start))
    bound = 0.0
    for i in range(n):
        v = n - 1 - i if backward else i
        base, k = start[v], start[v + 1] - start[v]
        share = _marginals(start, adj_ptr, adj_node, adj_message, cost, message, v, theta)
        least = theta[base]
        for s in range(1, k):
            least = min(least, theta[base + s])
        for s in range(k):
            theta[base + s] -= least
        bound += least
        for a in range(adj_ptr[v], adj_ptr[v + 1]):
            w = adj_node[a]
            if (w < v) == backward:
                back, width = adj_back[a], start[w + 1] - start[w]
                m, t0, out = adj_message[a], adj_table[a], adj_message[back]
                if adj_kinds[a] < k or adj_kinds[back] < width:
                    bound += _send_by_kind(kind, adj_kind[a], adj_kind[back], adj_kinds[a], adj_kinds[back], table, message, theta, own, best, base,
                                           k, width, m, t0, out, share)
                else:
                    bound += _send(table, message, theta, best, base, k, width, m, t0, out, share)
    return bound


@compiled
def sweep_ahead(p: Packed, message: np.ndarray, before: np.ndarray, pace: np.ndarray, theta: np.ndarray, sweeps: int) -> None:
    """`sweeps` passes forward and backward, each from messages a little ahead of where the last pass left them: Nesterov's momentum, started
    anew when the bound falls. Sweeps alone creep, for a value shares what it knows among its dozens of copies; llama 1B on (2, 4, 8) took ten
    times as many. `before`: the messages from later nodes one pass earlier; those from earlier ones a pass replaces before it reads them. `pace`:
    passes since the start, and the last bound. `message` ends as a pass left it."""
    for _ in range(sweeps):
        _step_ahead(p, message, before, pace[0] / (pace[0] + 3.0))
        sweep(p, p.cost, message, theta, False)
        bound = sweep(p, p.cost, message, theta, True)
        pace[0] = pace[0] + 1.0 if bound >= pace[1] else 0.0
        pace[1] = bound


@compiled
def _step_ahead(p: Packed, message: np.ndarray, before: np.ndarray, ahead: float) -> None:
    start, adj_ptr, adj_node, adj_message = p.start, p.adj_ptr, p.adj_node, p.adj_message
    for v in range(len(start) - 1):
        k = start[v + 1] - start[v]
        for a in range(adj_ptr[v], adj_ptr[v + 1]):
            if adj_node[a] > v:
                m = Place(adj_message[a])
                for s in range(k):
                    now = message[m + Place(s)]
                    step = now - before[m + Place(s)]
                    message[m + Place(s)] = now + ahead * step if abs(step) < np.inf else now  # infinite: a strategy without a partner
                    before[m + Place(s)] = now


@compiled
def _send(table: np.ndarray, message: np.ndarray, theta: np.ndarray, best: np.ndarray, base: int, k: int, width: int, m: int, t0: int, out: int,
         share: float) -> float:
    """Replace the message from the node of `k` strategies at `base` along an edge to one of `width`; its minimum is made zero and returned. Four
    strategies at a time, or `best` would be read and written for each. `best`, like `own` of `_send_by_kind`, is memory for the loops, as long as the
    largest node: to make an array takes as long as a short message."""
    wide, row, first, into = Place(width), Place(t0), Place(base), Place(m)
    for t in range(width):
        best[t] = np.inf
    single = k % 4
    for s in range(single):
        own = _own(theta, message, first + Place(s), into + Place(s), share)
        for t in range(width):
            value = own + table[row + Place(t)]
            best[t] = value if value < best[t] else best[t]
        row += wide
    for s in range(single, k, 4):
        own0 = _own(theta, message, first + Place(s), into + Place(s), share)
        own1 = _own(theta, message, first + Place(s + 1), into + Place(s + 1), share)
        own2 = _own(theta, message, first + Place(s + 2), into + Place(s + 2), share)
        own3 = _own(theta, message, first + Place(s + 3), into + Place(s + 3), share)
        row1, row2, row3 = row + wide, row + wide + wide, row + wide + wide + wide
        for t in range(width):
            at0, at1 = own0 + table[row + Place(t)], own1 + table[row1 + Place(t)]
            at2, at3 = own2 + table[row2 + Place(t)], own3 + table[row3 + Place(t)]
            at0 = at1 if at1 < at0 else at0
            at2 = at3 if at3 < at2 else at2
            at0 = at2 if at2 < at0 else at0
            best[t] = at0 if at0 < best[t] else best[t]
        row = row3 + wide
    least = best[0]
    for t in range(1, width):
        least = min(least, best[t])
    for t in range(width):
        message[Place(out) + Place(t)] = best[t] - least
    return least


@compiled
def _send_by_kind(kind: np.ndarray, mine: int, other: int, rows: int, columns: int, table: np.ndarray, message: np.ndarray, theta: np.ndarray,
                 own: np.ndarray, best: np.ndarray, base: int, k: int, width: int, m: int, t0: int, out: int, share: float) -> float:
    """The same numbers, where strategies are alike: the best of each kind first, for sums are rounded up or down together."""
    for r in range(rows):
        own[r] = np.inf
    for c in range(columns):
        best[c] = np.inf
    for s in range(k):
        value = share * theta[Place(base) + Place(s)] - message[Place(m) + Place(s)]
        at = kind[mine + s]
        own[at] = value if value < own[at] else own[at]
    row = Place(t0)
    for r in range(rows):
        for c in range(columns):
            value = own[r] + table[row + Place(c)]
            best[c] = value if value < best[c] else best[c]
        row += Place(columns)
    least = best[0]
    for c in range(1, columns):
        least = min(least, best[c])
    for t in range(width):
        message[Place(out) + Place(t)] = best[kind[other + t]] - least
    return least


@compiled
def _own(theta: np.ndarray, message: np.ndarray, place: np.uint64, into: np.uint64, share: float) -> float:
    """What a strategy sends of its own. One without a partner got an infinite message, so its cost is infinite too, and it is never the least."""
    value = share * theta[place] - message[into]
    return np.inf if np.isnan(value) else value


@compiled
def decouple(p: Packed, cost: np.ndarray, message: np.ndarray, grid: float) -> float:
    """After a forward sweep: a last backward pass that leaves every node's share on the edge that carries it on.

    Changes `message` in place, rounded to multiples of `grid` (a power of two; whole costs then sum exactly), and
    returns the bound it proves, computed from the messages alone."""
    start, adj_ptr, adj_node, adj_message, adj_back = p.start, p.adj_ptr, p.adj_node, p.adj_message, p.adj_back
    n = len(start) - 1
    theta, own, best = np.empty(start[n]), np.empty(_largest(start)), np.empty(_largest(start))
    for i in range(n):
        v = n - 1 - i
        base, k = start[v], start[v + 1] - start[v]
        share = _marginals(start, adj_ptr, adj_node, adj_message, cost, message, v, theta)
        for a in range(adj_ptr[v], adj_ptr[v + 1]):
            w = adj_node[a]
            if w < v:
                back = adj_back[a]
                _send_by_kind(p.kind, p.adj_kind[a], p.adj_kind[back], p.adj_kinds[a], p.adj_kinds[back], p.table, message, theta, own, best,
                              base, k, start[w + 1] - start[w], adj_message[a], p.adj_table[a], adj_message[back], share)
                m = adj_message[a]
                for s in range(k):
                    message[m + s] -= share * theta[base + s]
    for i in range(len(message)):
        message[i] = np.rint(message[i] / grid) * grid
    return reparametrised_bound(p, cost, message)


@compiled
def reparametrised_bound(p: Packed, cost: np.ndarray, message: np.ndarray) -> float:
    start, adj_ptr, adj_message = p.start, p.adj_ptr, p.adj_message
    bound = 0.0
    for v in range(len(start) - 1):
        base, k = start[v], start[v + 1] - start[v]
        least = np.inf
        for s in range(k):
            value = cost[base + s]
            for a in range(adj_ptr[v], adj_ptr[v + 1]):
                value += message[adj_message[a] + s]
            least = min(least, value)
        bound += least
        for a in range(adj_ptr[v], adj_ptr[v + 1]):
            w, back = p.adj_node[a], p.adj_back[a]
            if w > v:
                bound += least_slack(p.table, p.kind, message, p.adj_table[a], p.adj_kinds[a], p.adj_kinds[back], p.adj_kind[a], p.adj_kind[back],
                                      k, start[w + 1] - start[w], adj_message[a], adj_message[back])
    return bound


@compiled
def least_slack(table: np.ndarray, kind: np.ndarray, message: np.ndarray, t0: int, rows: int, columns: int, mine: int, other: int, k: int,
                 width: int, m: int, back: int) -> float:
    """The least of a table minus both messages. Of strategies that are alike the one with the largest message has it."""
    own, theirs = np.full(rows, -np.inf), np.full(columns, -np.inf)
    for s in range(k):
        own[kind[mine + s]] = max(own[kind[mine + s]], message[m + s])
    for t in range(width):
        theirs[kind[other + t]] = max(theirs[kind[other + t]], message[back + t])
    least = np.inf
    for r in range(rows):
        for c in range(columns):
            least = min(least, table[t0 + r * columns + c] - own[r] - theirs[c])
    return least


@compiled
def decode(p: Packed, cost: np.ndarray, message: np.ndarray, choice: np.ndarray) -> None:
    """The usual primal of a backward-swept chain: in order, each node given the choices before it."""
    start, adj_ptr, adj_node, adj_message, adj_back = p.start, p.adj_ptr, p.adj_node, p.adj_message, p.adj_back
    adj_table, adj_kind, adj_kinds, kind, table = p.adj_table, p.adj_kind, p.adj_kinds, p.kind, p.table
    for v in range(len(start) - 1):
        base, k = start[v], start[v + 1] - start[v]
        best, at = np.inf, 0
        for s in range(k):
            value = cost[base + s]
            for a in range(adj_ptr[v], adj_ptr[v + 1]):
                w, back = adj_node[a], adj_back[a]
                if w < v:
                    value += table[adj_table[a] + kind[adj_kind[a] + s] * adj_kinds[back] + kind[adj_kind[back] + choice[w]]]
                else:
                    value += message[adj_message[a] + s]
            if value < best:
                best, at = value, s
        choice[v] = at


@compiled
def row_loads(p: Packed, choice: np.ndarray) -> np.ndarray:
    delta = np.zeros(len(p.slack) + 1)
    for v in range(len(p.start) - 1):
        for i in range(p.item_ptr[v], p.item_ptr[v + 1]):
            amount = p.amount[p.item_amount[i] + choice[v]]
            delta[p.item_lo[i]] += amount
            delta[p.item_hi[i]] -= amount
    return np.cumsum(delta)[:-1]


@compiled
def total_cost(p: Packed, choice: np.ndarray) -> float:
    """Node and edge costs of a choice, without rows."""
    start, adj_ptr, adj_kind, adj_kinds, kind = p.start, p.adj_ptr, p.adj_kind, p.adj_kinds, p.kind
    cost = 0.0
    for v in range(len(start) - 1):
        cost += p.cost[start[v] + choice[v]]
        for a in range(adj_ptr[v], adj_ptr[v + 1]):
            w, back = p.adj_node[a], p.adj_back[a]
            if w > v:
                cost += p.table[p.adj_table[a] + kind[adj_kind[a] + choice[v]] * adj_kinds[back] + kind[adj_kind[back] + choice[w]]]
    return cost


@compiled
def ascend(p: Packed, prices: np.ndarray, message: np.ndarray, state: np.ndarray, best_prices: np.ndarray,
           choice: np.ndarray, best_choice: np.ndarray, average: np.ndarray, sweeps: int) -> float:
    """Alternate sweeps with steps on the prices (none while the step is 0), `sweeps` times. `state`: see STEP and
    the names beside it; the choice of cost `state[FITTING]` is in `best_choice`.

    The step follows the averaged excess load of the decoded choices, scaled by (target - bound) / |excess|^2; after 40
    sweeps without progress it shrinks and starts again from the best prices. Returns the last bound."""
    cost, theta = np.empty(len(p.cost)), np.empty(len(p.cost))
    bound = -np.inf
    for _ in range(sweeps):
        constant = priced_costs(p, prices, cost)
        sweep(p, cost, message, theta, False)
        bound = sweep(p, cost, message, theta, True) + constant
        _note_progress(bound, prices, state, best_prices, average)
        if len(prices) == 0 or state[STEP] == 0.0:
            continue
        decode(p, cost, message, choice)
        excess = (row_loads(p, choice) - p.slack) / p.scale
        value = _fitting_cost(p, choice, excess)
        if value < state[FITTING]:
            state[FITTING] = value
            best_choice[:] = choice
        _step_prices(p, prices, average, excess, state[STEP] * max(state[TARGET] - bound, 1e-6 * abs(bound)))
    return bound


@compiled
def _note_progress(bound: float, prices: np.ndarray, state: np.ndarray, best_prices: np.ndarray, average: np.ndarray) -> None:
    if bound > state[BOUND]:
        if bound > state[BOUND] + 1e-6 * abs(bound):
            state[IDLE] = 0.0
        state[BOUND] = bound
        best_prices[:] = prices
    state[IDLE] += 1.0
    if state[IDLE] > 40.0:
        state[STEP] *= 0.6
        state[IDLE] = 0.0
        prices[:] = best_prices
        average[:] = 0.0


@compiled
def _fitting_cost(p: Packed, choice: np.ndarray, excess: np.ndarray) -> float:
    """What a choice costs with its priced rows; inf where it is over a hard one."""
    value = 0.0
    for r in range(len(excess)):
        if p.price[r] < np.inf:
            value += p.price[r] * max(0.0, excess[r] * p.scale[r])
        elif excess[r] > 0.0:
            return np.inf
    return value + total_cost(p, choice)


@compiled
def _step_prices(p: Packed, prices: np.ndarray, average: np.ndarray, excess: np.ndarray, reach: float) -> None:
    """Update the averaged excess, and move the prices along it as far as should raise the bound by `reach`."""
    norm = 0.0
    for r in range(len(prices)):
        average[r] = 0.8 * average[r] + 0.2 * excess[r]
        if prices[r] > 0.0 or average[r] > 0.0:
            norm += average[r] * average[r]
    if norm > 0.0:
        for r in range(len(prices)):
            prices[r] = min(max(0.0, prices[r] + reach / norm * average[r] / p.scale[r]), p.price[r])
