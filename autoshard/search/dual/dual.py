"""Prices, messages and the bound they prove; reduced costs that fix strategies; the core they leave."""
from __future__ import annotations

import math
from functools import cached_property

import numpy as np

from autoshard.search.clock import Pace
from autoshard.search.dual import messages
from autoshard.search.dual.packed import Packed, pack
from autoshard.search.reductions import Infeasible, drop_forbidden
from autoshard.search.reductions.core import Core
from autoshard.search.reductions.steps import Keep
from autoshard.search.reductions.table import Table

ROUND = 50  # sweeps between looks at the clock
GUESS = 0.02  # of the bound: how far above it a step aims while no cost is known
SETTLED = 1e-3  # relative progress of a round below which the first messages count as settled
FIRST_SWEEPS, SWEEPS, ROUNDS = 6, 20, 100  # of `converge`
TIGHT, GAINED, STALL = 5e-10, 1e-7, 3  # relative: a bound that is reached; a gain that is none, and how often
NEAR, SLOW = 0.05, 0.02  # once the gap is below 5 %, a round must gain 2 % of it
FINER = 2.0 ** -6
FEWER = 0.7  # of the strategies left: worth to be packed anew
SETTLE = 10  # more sweeps at the best prices, before a bound is read off


class Dual:
    """Lagrangian prices on the rows and messages on the edges of one core.

    `nodes`: the order of sweeps. `bound` is what the sweeps claim (constant included); `converge` returns what the messages prove. `alike`: as
    of `pack`; other loops than those of messages.py want plain tables."""

    def __init__(self, core: Core, row_prices: np.ndarray | None = None, nodes: list[int] | None = None, alike: bool = False):
        self.core, self.alike = core, alike
        self.packed, self.nodes, self.rows = pack(core, nodes, alike)
        p = self.packed
        sizes = np.diff(p.start)
        self.message = np.zeros(int(np.repeat(sizes, np.diff(p.adj_ptr)).sum()))
        self.before, self.pace = np.zeros_like(self.message), np.array([0.0, -np.inf])  # of `sweep_ahead`
        self.prices = _place_prices(row_prices, self.rows)
        self.best_prices = self.prices.copy()
        self.average = np.zeros(len(self.rows))
        self.choice = np.zeros(len(self.nodes), dtype=np.int64)
        self.best_choice = self.choice.copy()
        self.state = np.array([0.1, -np.inf, 0.0, 0.0, np.inf])
        self.ended, self.reached = False, (-np.inf, 0)  # of `converge`: the bound, and rounds in a row that gained too little

    @cached_property
    def ceiling(self) -> float:
        """Far above what any choice costs: a bound beyond it says that no choice fits, with room for rounding."""
        core, p = self.core, self.packed
        most = sum(float(np.abs(core.cost[v]).max()) for v in core.alive)
        most += sum(float(np.abs(t.a[np.isfinite(t.a)]).max(initial=0.0)) for v in core.alive for t in core.adj[v].values())
        capped = np.isfinite(p.price)
        most += float(np.dot(p.price[capped], p.scale[capped] + np.abs(p.slack[capped])))
        return 2.0 * most + 1e-300

    @property
    def bound(self) -> float:
        return float(self.state[messages.BOUND]) + self.core.constant

    @property
    def sweep_work(self) -> int:
        """Table entries that one sweep, forward and backward, reads."""
        sizes = np.diff(self.packed.start)
        return int(np.dot(np.repeat(sizes, np.diff(self.packed.adj_ptr)), sizes[self.packed.adj_node]))

    def row_prices(self) -> np.ndarray:
        """The best prices, per row of the core."""
        out = np.zeros(len(self.core.limit))
        out[self.rows] = self.best_prices
        return out

    def ascend(self, phase: Pace, *, target: float | None, step: float = 0.1, stall: int = 6) -> None:
        """Raise the bound until `stall` rounds bring less than 1e-6, or the phase is over. `target` is a cost that was or may be
        reached; without one a little above the bound is aimed at."""
        self._warm_up(phase)
        self.state[messages.STEP], self.state[messages.IDLE] = step, 0.0
        self.prices[:] = self.best_prices
        self.average[:] = 0.0
        flat, guess = 0, GUESS
        while flat < stall and not phase.over():
            before = self.state[messages.BOUND]
            self._aim(target, guess)
            self._round(phase)
            if self.state[messages.BOUND] > self.ceiling:
                raise Infeasible(-1)
            guess = _adapt(guess, self.state[messages.BOUND] - before, self.state[messages.TARGET] - before)
            flat = 0 if self.state[messages.BOUND] > before + 1e-6 * abs(before) else flat + 1
            if not len(self.rows) and flat:
                break

    def _warm_up(self, phase: Pace) -> None:
        """Messages at fixed prices until they settle: price steps taken on raw messages are noise."""
        self.state[messages.STEP] = 0.0
        before = -np.inf
        while not phase.over():
            self._round(phase)
            if self.state[messages.BOUND] <= before + SETTLED * abs(before):
                return
            before = self.state[messages.BOUND]

    def settle_at_prices(self, phase: Pace, work: float = math.inf) -> None:
        """Sweeps at the present prices only, until they bring less than 1e-7 of the bound, or have read `work` table entries."""
        self.state[messages.STEP], before = 0.0, -np.inf
        while not phase.over() and work > 0:
            self._round(phase)
            if self.state[messages.BOUND] <= before + 1e-7 * abs(before):
                return
            before = self.state[messages.BOUND]
            work -= ROUND * self.sweep_work

    def _round(self, phase: Pace) -> None:
        messages.ascend(self.packed, self.prices, self.message, self.state, self.best_prices, self.choice,
                        self.best_choice, self.average, ROUND)
        phase.tick(ROUND)

    def _aim(self, target: float | None, guess: float) -> None:
        """The cost that steps aim at: the least known, else a little above the bound."""
        known = min(self.state[messages.FITTING], math.inf if target is None else target - self.core.constant)
        best = float(self.state[messages.BOUND])
        self.state[messages.TARGET] = known if math.isfinite(known) else best + guess * abs(best)

    def settle(self) -> tuple[np.ndarray, float]:
        """(priced node costs, constant) at the best prices, after a few more sweeps of the messages."""
        cost, theta = np.empty_like(self.packed.cost), np.empty_like(self.packed.cost)
        constant = messages.priced_costs(self.packed, self.best_prices, cost)
        for _ in range(SETTLE):
            messages.sweep(self.packed, cost, self.message, theta, False)
            messages.sweep(self.packed, cost, self.message, theta, True)
        messages.sweep(self.packed, cost, self.message, theta, False)
        return cost, constant

    def converge(self, phase: Pace, enough: float = TIGHT, upper: float = math.inf, rounds: int = ROUNDS) -> tuple[float, np.ndarray, float]:
        """Without rows: sweep until the decoded choice costs what the messages prove, within `enough` of it, or too little
        is gained; for so many `rounds` at most, and `ended` says whether they were enough. Called again it goes on. `upper`: what some choice
        is known to cost, or a bound so high is enough.

        Ends by work, not by the clock, unless the phase is over. Returns (bound, choice per packed node, its cost)."""
        p, value = self.packed, np.inf
        bound, flat = (-np.inf, 0) if rounds == ROUNDS else self.reached
        theta, choice = np.empty_like(p.cost), np.zeros(len(self.nodes), dtype=np.int64)
        constant = self.core.constant
        grid = grid_of(p) * FINER  # nothing here sums whole numbers
        self.ended = True
        for turn in range(rounds):
            sweeps = SWEEPS if turn or bound > -np.inf else FIRST_SWEEPS
            messages.sweep_ahead(p, self.message, self.before, self.pace, theta, sweeps)
            messages.decode(p, p.cost, self.message, self.choice)
            cost = float(messages.total_cost(p, self.choice)) + constant
            if cost < value:
                value, choice = cost, self.choice.copy()
            messages.sweep(p, p.cost, self.message, theta, False)
            self.proven = self.message.copy()
            now = float(messages.decouple(p, p.cost, self.proven, grid)) + constant
            flat = flat + 1 if now <= bound + _too_little(bound, value, upper) else 0
            bound = max(bound, now)
            phase.tick(sweeps)
            if min(value, upper) - bound <= max(TIGHT, enough) * abs(bound) or flat >= STALL or phase.over():
                break
        else:
            self.ended = rounds == ROUNDS
        self.state[messages.BOUND], self.reached = bound - constant, (bound, flat)
        return bound, choice, value

    def without_dearer(self, upper: float) -> Dual | None:
        """Without rows: the same with its messages and without the strategies that no choice of cost at most `upper` takes, nor those that are left
        without a partner: nothing would be left of the infinite messages into them but inf - inf. None where these are few, or all."""
        p, masks = self.packed, self.possible(upper)
        alive = np.concatenate([masks[v] for v in self.nodes.tolist()])
        if alive.sum() > FEWER * len(alive) or not all(mask.any() for mask in masks.values()):
            return None
        core = self.core.copy()
        for v, mask in masks.items():
            if not mask.all():
                core.keep(v, np.flatnonzero(mask))
        try:
            drop_forbidden(core)
        except Infeasible:
            return None
        left = {v: np.arange(len(mask)) for v, mask in masks.items()}
        for step in core.undo[len(self.core.undo):]:
            if isinstance(step, Keep):
                left[step.v] = left[step.v][step.kept]
        other = Dual(core, nodes=self.nodes.tolist(), alike=self.alike)
        first = [p.adj_message[a:b] for a, b in zip(p.adj_ptr[:-1], p.adj_ptr[1:], strict=True)]
        kept = np.concatenate([(at[:, None] + left[v]).ravel() for v, at in zip(self.nodes.tolist(), first, strict=True)])
        other.message, other.before, other.pace, other.reached = self.message[kept], self.before[kept], self.pace, (self.reached[0], 0)
        return other

    def possible(self, upper: float) -> dict[int, np.ndarray]:
        """Without rows: masks of the strategies, by core node, that a choice of cost at most `upper` may take."""
        p = self.packed
        alive = affordable(p, self.message, upper, self.core.constant)
        return {int(v): alive[p.start[i]:p.start[i + 1]] for i, v in enumerate(self.nodes)}

    def reduce(self, upper: float) -> tuple[Core, float]:
        """(core, bound): the core reparametrised, without the strategies and pairs that would cost more than `upper`.

        Valid for every choice of cost at most `upper`. Raises Infeasible when there is none."""
        p = self.packed
        cost, constant = self.settle()
        message, theta = self.message.copy(), np.empty_like(cost)
        messages.decouple(p, cost, message, grid_of(p))
        incoming = sum_messages(p, message)
        marginal = cost + incoming
        if not np.isfinite(cost).all():
            raise ValueError("messages need finite costs: presolve removes the forbidden strategies first")
        least = np.minimum.reduceat(marginal, p.start[:-1]) if len(p.start) > 1 else np.zeros(0)
        core = self.core.copy()
        tables, edge_least = self.slacks(message)
        bound = float(math.fsum([*least, *edge_least.values()])) + constant + self.core.constant
        room = upper - bound + 1e-9 * max(abs(upper), abs(bound))
        messages.sweep(p, cost, self.message, theta, True)  # sharper on each node than the decoupled form
        dearer = marginal - np.repeat(least, np.diff(p.start))
        alive = (theta <= room) & (dearer <= room)
        self.write(core, incoming, tables, edge_least, alive, dearer, room)
        return core, bound

    def slacks(self, message: np.ndarray) -> tuple[dict[tuple[int, int], np.ndarray], dict[tuple[int, int], float]]:
        p, tables, least = self.packed, {}, {}
        for v in range(len(self.nodes)):
            k = int(p.start[v + 1] - p.start[v])
            for a in range(p.adj_ptr[v], p.adj_ptr[v + 1]):
                w = int(p.adj_node[a])
                if w > v:
                    width = int(p.start[w + 1] - p.start[w])
                    m, back = p.adj_message[a], p.adj_message[p.adj_back[a]]
                    slack = self.core.adj[int(self.nodes[v])][int(self.nodes[w])].a - message[m:m + k, None] - message[None, back:back + width]
                    tables[v, w], least[v, w] = slack, float(slack.min())
        return tables, least

    def write(self, core: Core, incoming: np.ndarray, tables: dict[tuple[int, int], np.ndarray],
              least: dict[tuple[int, int], float], alive: np.ndarray, dearer: np.ndarray, room: float) -> None:
        """`dearer`: what each strategy costs more than the best of its node. A pair costs that of both, and its own."""
        p = self.packed
        ends = list(zip(p.start[:-1].tolist(), p.start[1:].tolist(), strict=True))
        for (v, w), slack in tables.items():
            low, own, other = least[v, w], dearer[slice(*ends[v])], dearer[slice(*ends[w])]
            table = Table(np.where(slack - low + own[:, None] + other[None, :] <= room, slack - low, np.inf))
            u, x = int(self.nodes[v]), int(self.nodes[w])
            core.adj[u][x], core.adj[x][u] = table, table.T
            core.constant += low
        for v, node in enumerate(self.nodes.tolist()):
            mask = alive[p.start[v]:p.start[v + 1]]
            core.cost[node] = core.cost[node] + incoming[p.start[v]:p.start[v + 1]]
            if not mask.any():
                raise Infeasible(node)
            if not mask.all():
                core.keep(node, np.flatnonzero(mask))


def _too_little(bound: float, value: float, upper: float) -> float:
    """The gain of a round of `converge` that does not count."""
    if not math.isfinite(bound):
        return 0.0
    gap = min(value, upper) - bound
    return max(GAINED * abs(bound), SLOW * gap if gap < NEAR * abs(bound) or math.isfinite(upper) else 0.0)


def _adapt(guess: float, gained: float, aimed: float) -> float:
    """Aim higher while rounds gain much of what was aimed at, lower when they gain nothing."""
    if gained > 0.1 * aimed:
        return min(8.0, 2.0 * guess)
    return guess if gained > 0.0 else max(0.002, 0.5 * guess)


def affordable(p: Packed, message: np.ndarray, upper: float, constant: float = 0.0) -> np.ndarray:
    """Without rows: whether a choice of cost at most `upper`, with `constant` in it, may take a strategy; those of all nodes one after the other."""
    theta = np.empty_like(p.cost)
    messages.sweep(p, p.cost, message, theta, False)
    bound = float(messages.sweep(p, p.cost, message, theta, True)) + constant
    return theta <= upper - bound + 1e-9 * max(abs(upper), abs(bound))


def sum_messages(p: Packed, message: np.ndarray) -> np.ndarray:
    out = np.zeros_like(p.cost)
    for v in range(len(p.start) - 1):
        k = p.start[v + 1] - p.start[v]
        for a in range(p.adj_ptr[v], p.adj_ptr[v + 1]):
            out[p.start[v]:p.start[v + 1]] += message[p.adj_message[a]:p.adj_message[a] + k]
    return out


def grid_of(p: Packed) -> float:
    """A power of two: sums of costs and messages that are multiples of it are exact in 53 bits."""
    largest = max(1e-300, *(float(np.abs(values[np.isfinite(values)]).max(initial=0.0)) for values in (p.table, p.cost)))
    return 2.0 ** (math.ceil(math.log2(largest)) - 44)


def _place_prices(row_prices: np.ndarray | None, rows: np.ndarray) -> np.ndarray:
    """Prices of rows that are no longer kept go to the nearest row that is."""
    out = np.zeros(len(rows))
    if row_prices is not None and len(rows):
        for r in np.flatnonzero(row_prices).tolist():
            at = int(np.searchsorted(rows, r))
            if at == len(rows) or (at and r - rows[at - 1] < rows[at] - r):
                at -= 1
            out[at] += row_prices[r]
    return out
