"""The core as a mixed-integer program: the local polytope with integral node variables, solved through MathOpt.

Variables x[v, s] in {0, 1} (one strategy per node) and y[u, s, v, t] >= 0 on the finite entries of every table, with
sum_t y = x[u, s] and sum_s y = x[v, t]. Where there are many hard rows, one is added only once a solution violates it; a priced row has an
excess variable with the row's price as cost. Costs are shifted (each table's least entry is zero, see `_tighten`)
and scaled so that the solver's absolute tolerances stay far below the costs that matter.

Nodes without neighbours that look the same are one set of whole numbers: how many of them take each strategy. Which of
them does which makes no difference, and a solver that sees them one by one tries all orders.
"""
from __future__ import annotations

import datetime
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from ortools.math_opt import model_pb2

from autoshard.search.board import Board
from autoshard.search.mip.guarded import never, solve_program
from autoshard.search.reductions.core import Core
from autoshard.search.reductions.gather import gather, look

TABLES = 120_000  # table entries of what is left, up to which `solve_left` is begun
MIP_NODES = 2000  # of its tree
FEW_ROWS = 32  # of a plan: hard ones are part of the program at once, since a first run without them rarely helps
ROWS_PER_ROUND = 12
SCALED_SUM = 1e6
ROW_SPAN = 1e3  # the largest amount on a row: solvers let a row be over by 1e-6, whether it counts bytes or seconds


@dataclass(frozen=True)
class MipAnswer:
    """`choice` is per core node (entries of nodes that are gone are 0), None if none was found; `bound` includes the
    core's constant; `proven` = the solver finished; `infeasible` = it proved that nothing is feasible; `timed` = it had
    to stop by the clock."""

    choice: np.ndarray | None
    bound: float
    proven: bool
    infeasible: bool
    rows: int
    timed: bool = False


class MipModel:
    """One core as arrays; `solve` may be called again after rows were added."""

    def __init__(self, core: Core, overdue: Callable[[], bool] = never):
        self.core, self.copies, self.overdue = core, _copies(core), overdue
        self.nodes = [same[0] for same in self.copies]
        sizes = [len(core.cost[v]) for v in self.nodes]
        starts = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
        self.start = dict(zip(self.nodes, starts[:-1].tolist(), strict=True))
        self.n_x = int(starts[-1])
        self.node_of = np.repeat(np.arange(len(self.nodes)), sizes)
        count = np.array([len(same) for same in self.copies], dtype=np.float64)
        costs = np.concatenate([core.cost[v] for v in self.nodes]) if self.nodes else np.zeros(0)
        self.allowed = np.isfinite(costs)  # presolve removes the others, unless the clock cut it short
        self.objective = [np.where(self.allowed, costs, 0.0)]
        self.row_ids: list[np.ndarray] = [self.node_of]
        self.col_ids: list[np.ndarray] = [np.arange(self.n_x)]
        self.coefficients: list[np.ndarray] = [np.ones(self.n_x)]
        self.most = np.where(self.allowed, np.repeat(count, sizes), 0.0)
        self.lower, self.upper = count.tolist(), count.tolist()
        self.n_columns = self.n_x
        self._add_edges()
        self._collect_items()
        self.rows: set[int] = set()
        self.timed = False  # some run had to stop by the clock
        few = len(core.limit) <= FEW_ROWS
        for row in np.flatnonzero((few | np.isfinite(core.price)) & (core.price > 0)).tolist():
            if len(self._covering(row)):
                self.add_row(row)

    def _add_edges(self) -> None:
        core = self.core
        for u in self.nodes:
            for v, table in core.adj[u].items():
                if u > v:
                    continue
                s, t = np.nonzero(np.isfinite(table.a))
                count, (n_u, n_v) = len(s), table.a.shape
                self.objective.append(table.a[s, t])
                y = self.n_columns + np.arange(count)
                row = len(self.lower)
                self._extend(row + s, y, 1.0)
                self._extend(row + n_u + t, y, 1.0)
                x = np.concatenate([self.start[u] + np.arange(n_u), self.start[v] + np.arange(n_v)])
                self._extend(row + np.arange(n_u + n_v), x, -1.0)
                self.lower += [0.0] * (n_u + n_v)
                self.upper += [0.0] * (n_u + n_v)
                self.n_columns += count

    def _extend(self, rows: np.ndarray, columns: np.ndarray, value: float | np.ndarray) -> None:
        self.row_ids.append(rows)
        self.col_ids.append(columns)
        self.coefficients.append(np.broadcast_to(np.asarray(value, dtype=np.float64), rows.shape))

    def _collect_items(self) -> None:
        found = [(i.lo, i.hi, self.start[v], i.amount) for v in self.nodes for i in self.core.items[v]]
        self.item_lo = np.array([f[0] for f in found], dtype=np.int64)
        self.item_hi = np.array([f[1] for f in found], dtype=np.int64)
        self.item_column = [f[2] for f in found]
        self.item_amount = [f[3] for f in found]

    def add_row(self, row: int) -> None:
        """Make row `row` (hard or priced) part of the program."""
        core, at = self.core, len(self.lower)
        largest = max((float(np.abs(self.item_amount[i]).max()) for i in self._covering(row)), default=0.0)
        scale = largest / ROW_SPAN or 1.0
        for i in self._covering(row):
            amount = self.item_amount[i]
            used = np.flatnonzero(amount)
            self._extend(np.full(len(used), at), self.item_column[i] + used, amount[used] / scale)
        if np.isfinite(core.price[row]):
            self._extend(np.array([at]), np.array([self.n_columns]), -1.0)
            self.objective.append(np.array([core.price[row] * scale]))
            self.n_columns += 1
        self.lower.append(-np.inf)
        self.upper.append(float(core.limit[row] - core.base[row]) / scale)
        self.rows.add(row)

    def _covering(self, row: int) -> np.ndarray:
        return np.flatnonzero((self.item_lo <= row) & (row < self.item_hi))

    def overloads(self, taken: np.ndarray) -> np.ndarray:
        """Load minus limit of each hard row (others: -inf); `taken`: how many nodes take each strategy."""
        core = self.core
        delta = np.zeros(len(core.limit) + 1)
        for lo, hi, column, amount in zip(self.item_lo, self.item_hi, self.item_column, self.item_amount, strict=True):
            load = np.dot(amount, taken[column:column + len(amount)])
            delta[lo] += load
            delta[hi] -= load
        over = core.base + np.cumsum(delta)[:-1] - core.limit
        return np.where(np.isinf(core.price), over, -np.inf)

    def proto(self) -> tuple[model_pb2.ModelProto, float]:
        """The program, and the factor its objective was multiplied by."""
        model, objective = model_pb2.ModelProto(), np.concatenate(self.objective)
        scale = SCALED_SUM / max(float(np.abs(objective).max(initial=0.0)), 1e-300)
        n, m = len(objective), len(self.lower)
        model.variables.ids.extend(range(n))
        model.variables.lower_bounds.extend([0.0] * n)
        model.variables.upper_bounds.extend([*self.most.tolist(), *[np.inf] * (n - self.n_x)])
        model.variables.integers.extend([True] * self.n_x + [False] * (n - self.n_x))
        used = np.flatnonzero(objective)
        model.objective.linear_coefficients.ids.extend(used.tolist())
        model.objective.linear_coefficients.values.extend((objective[used] * scale).tolist())
        model.linear_constraints.ids.extend(range(m))
        model.linear_constraints.lower_bounds.extend(self.lower)
        model.linear_constraints.upper_bounds.extend(self.upper)
        rows, columns, values = (np.concatenate(x) for x in (self.row_ids, self.col_ids, self.coefficients))
        order = np.lexsort((columns, rows))
        rows, columns, values = rows[order], columns[order], values[order]
        first = np.flatnonzero(np.concatenate([[True], (np.diff(rows) != 0) | (np.diff(columns) != 0)])) if n else order
        matrix = model.linear_constraint_matrix  # two items of one strategy on one row add up
        matrix.row_ids.extend(rows[first].tolist())
        matrix.column_ids.extend(columns[first].tolist())
        matrix.coefficients.extend(np.add.reduceat(values, first).tolist() if n else [])
        return model, scale

    def run(self, solver: str, seconds: float, seed: int, nodes: int | None, gap: float = 0.0) -> tuple[np.ndarray | None, float, bool, bool]:
        """(how many nodes take each strategy, or None; bound, finished, infeasible) of the program with its present rows."""
        proto, scale = self.proto()
        answer = solve_program(proto.SerializeToString(), self.n_x, solver=solver, seconds=seconds, seed=seed, nodes=nodes, gap=gap,
                               overdue=self.overdue)
        self.timed |= answer.reason == "KILLED" or answer.limit == "TIME"
        if answer.reason in ("INFEASIBLE", "INFEASIBLE_OR_UNBOUNDED"):
            return None, np.inf, True, True
        bound, values = answer.bound / scale + self.core.constant, answer.values
        if values is None:
            return None, bound, False, False
        return self._whole(values), bound, answer.reason == "OPTIMAL", False

    def _whole(self, values: np.ndarray) -> np.ndarray:
        """Solvers leave whole numbers within their tolerance: what is missing goes where most was cut off."""
        taken = np.floor(values + 1e-6).astype(np.int64)
        for v, same in zip(self.nodes, self.copies, strict=True):
            at, k = self.start[v], len(self.core.cost[v])
            missing = len(same) - int(taken[at:at + k].sum())
            if missing:
                taken[at + np.argsort(taken[at:at + k] - values[at:at + k], kind="stable")[:missing]] += 1
        return taken

    def choice(self, taken: np.ndarray) -> np.ndarray:
        """Per core node; nodes that are gone get 0."""
        out = np.zeros(len(self.core.cost), dtype=np.int64)
        for v, same in zip(self.nodes, self.copies, strict=True):
            k = len(self.core.cost[v])
            out[same] = np.repeat(np.arange(k), taken[self.start[v]:self.start[v] + k])
        return out


def _copies(core: Core) -> list[list[int]]:
    """Nodes that look the same and have no neighbours, together; every other node alone."""
    found: dict[object, list[int]] = {}
    for v in core.alive:
        found.setdefault(v if core.adj[v] else look(core, v), []).append(v)
    return list(found.values())


def solve_mip(core: Core, seconds: float, *, solver: str = "milp", seed: int = 0, nodes: int | None = None,
              gap: float = 0.0, overdue: Callable[[], bool] = never) -> MipAnswer:
    """Solve a core exactly with hard rows added as they are violated. A relaxation's optimum is a valid bound, and its
    solution is returned only when it fits. `nodes` of the search tree a run at most. `gap`: the relative gap at which a run ends, so that `proven`
    means within it. `overdue`: whether to end a solver that does not look up."""
    clock = datetime.datetime.now
    end = clock() + datetime.timedelta(seconds=seconds)
    if not core.alive:
        over = np.maximum(0.0, core.base - core.limit)
        hard = np.isinf(core.price)
        if (over[hard] > 1e-9 * np.maximum(1.0, np.abs(core.limit[hard]))).any():
            return MipAnswer(None, np.inf, True, True, 0)
        return MipAnswer(np.zeros(len(core.cost), dtype=np.int64), core.constant + float(np.dot(over[~hard], core.price[~hard])), True, False, 0)
    model, bound = MipModel(core, overdue), -np.inf
    while True:
        taken, new_bound, finished, infeasible = model.run(solver, (end - clock()).total_seconds(), seed, nodes, gap)
        bound = max(bound, new_bound)
        if infeasible or taken is None:
            return MipAnswer(None, bound, finished, infeasible, len(model.rows), model.timed)
        over = model.overloads(taken)
        worst = _local_peaks(over, 1e-9 * np.maximum(1.0, np.abs(core.limit)), model.rows)
        if not worst:
            tight = over <= 1e-9 * np.maximum(1.0, np.abs(core.limit))
            return MipAnswer(model.choice(taken) if tight.all() else None, bound, finished, False, len(model.rows), model.timed)
        if not finished and (end - clock()).total_seconds() <= 0:
            return MipAnswer(None, bound, False, False, len(model.rows), True)
        for row in worst:
            model.add_row(row)


def _local_peaks(over: np.ndarray, tolerance: np.ndarray, present: set[int]) -> list[int]:
    """The most violated row of each violated stretch, worst first."""
    bad = np.flatnonzero(over > tolerance)
    if not len(bad):
        return []
    stretches = np.split(bad, np.flatnonzero(np.diff(bad) > 1) + 1)
    peaks = [int(s[np.argmax(over[s])]) for s in stretches]
    peaks = [p for p in sorted(peaks, key=lambda p: -over[p]) if p not in present]
    return peaks[:ROWS_PER_ROUND]


def solve_left(board: Board, core: Core, seed: int, nodes: int = MIP_NODES, gap: float = 0.0) -> MipAnswer:
    """The MIP of what is left. A number of nodes ends it, the same on every machine; the clock only where half of the
    time that is left is not enough for them."""
    joined = core.copy()
    gather(joined)
    answer = solve_mip(joined, 0.5 * board.clock.left, seed=seed, nodes=nodes, gap=gap, overdue=board.clock.overdue)
    board.clock.cut |= answer.timed
    return answer if answer.choice is None else replace(answer, choice=joined.lift(answer.choice, len(core.undo)))
