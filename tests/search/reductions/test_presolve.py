"""Each reduction alone: its documented example comes out, the optimum stays, and what is undone fits and costs the same."""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from autoshard.search import Edge, Items, Problem, evaluate, solve
from autoshard.search.reductions import Infeasible, _sweep, pairs, reduce_core
from autoshard.search.reductions.better import joined, never_dearer
from autoshard.search.reductions.contraction import contract
from autoshard.search.reductions.core import GONE, Core, build
from autoshard.search.reductions.dead import drop_dead
from autoshard.search.reductions.dominance import _undominated, _worst, distinct, dominate, replacement
from autoshard.search.reductions.elimination import eliminate
from autoshard.search.reductions.pairs import merge
from autoshard.search.reductions.rows import drop_slack_rows, price_certain_rows
from autoshard.search.reductions.separable import separate
from autoshard.search.reductions.states import _told_apart_by_one, alike, merge_states
from autoshard.search.reductions.table import Table
from tests.search.random_problems import random_problem

inf = np.inf


def problem(costs: list, edges: dict, items: list = (), limit: list = (), price: list = ()) -> Problem:
    """Edges as {(u, v): table}; items as (node, strategy, row, amount)."""
    pairs = tuple(Edge(u, v, np.array(t, float), *map(np.arange, np.shape(t))) for (u, v), t in edges.items())
    columns = [np.array(x) for x in zip(*items, strict=True)] or [np.zeros(0, dtype=np.int64)] * 3 + [np.zeros(0)]
    return Problem(tuple(np.array(c, float) for c in costs), pairs, np.array(limit, float), np.array(price, float), Items(*columns))


def core_of(*args) -> Core:
    return build(problem(*args))[0]


def as_problem(core: Core) -> tuple[Problem, np.ndarray]:
    """What is left, as a problem of its own, and the core node of each of its nodes."""
    nodes = core.alive
    number = {v: i for i, v in enumerate(nodes)}
    edges = tuple(Edge(number[u], number[v], t.a, *map(np.arange, t.a.shape)) for u in nodes for v, t in core.adj[u].items() if u < v)
    items = [(number[v], s, r, a) for v in nodes for i in core.items[v] for r in range(i.lo, i.hi) for s, a in enumerate(i.amount)]
    columns = [np.array(x) for x in zip(*items, strict=True)] or [np.zeros(0, dtype=np.int64)] * 3 + [np.zeros(0)]
    left = Problem(tuple(core.cost[v] for v in nodes), edges, core.limit - core.base, core.price, Items(*columns))
    return left, np.array(nodes, dtype=np.int64)


def same_optimum(whole: Problem, core: Core) -> None:
    left, nodes = as_problem(core)
    before, after = solve(whole, backend="brute"), solve(left, backend="brute")
    if before.choice is None:
        assert after.choice is None, "the reduction made an infeasible problem feasible"
        return
    assert after.choice is not None, "the reduction lost every feasible choice"
    slack = 1e-8 * max(1e-9, abs(before.cost))
    assert abs(after.cost + core.constant - before.cost) <= slack, f"optimum {before.cost} became {after.cost} + {core.constant}"
    choice = np.zeros(whole.n, dtype=np.int64)
    choice[nodes] = after.choice
    assert abs(evaluate(whole, core.lift(choice)) - before.cost) <= slack, "undone, the optimum costs something else"


def everywhere(rule: Callable[[Core, int], bool]) -> Callable[[Core], None]:
    def apply(core: Core) -> None:
        for v in list(core.alive):
            if core.cost[v] is not GONE:
                rule(core, v)
    return apply


def after_dead(rule: Callable[[Core], None]) -> Callable[[Core], None]:
    """Some rules count on strategies without a finite cost being gone, as `reduce_core` sees to."""
    def apply(core: Core) -> None:
        changed = True
        while changed:
            changed = any([drop_dead(core, v) for v in core.alive])  # noqa: C419  (all of them, each time)
        rule(core)
    return apply


def merge_neighbours(core: Core) -> None:
    """Every node that still has a neighbour takes in its first one; nothing is minimised out."""
    for u in list(core.alive):
        if core.cost[u] is not GONE and core.adj[u]:
            merge(core, u, min(core.adj[u]))


REDUCTIONS: dict[str, Callable[[Core], object]] = {
    "distinct": lambda core: None,  # `build` itself
    "dead": after_dead(lambda core: None),
    "contraction": after_dead(everywhere(contract)),
    "elimination": after_dead(everywhere(eliminate)),
    "separable": after_dead(everywhere(separate)),
    "dominance": after_dead(everywhere(dominate)),
    "states": after_dead(everywhere(merge_states)),
    "pairs": after_dead(merge_neighbours),
    "slack rows": drop_slack_rows,
    "certain rows": price_certain_rows,
    "all": reduce_core,
}


@pytest.mark.parametrize("name", REDUCTIONS)
@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(seed=st.integers(0, 10**6))
def test_a_reduction_keeps_the_optimum_and_can_be_undone(name: str, seed: int):
    whole = random_problem(seed, nodes=5, most=3)
    whole = replace(whole, items=Items.empty() if seed % 3 == 0 else whole.items)
    core = build(whole)[0]
    try:
        with np.errstate(invalid="ignore"):
            REDUCTIONS[name](core)
    except Infeasible:
        assert solve(whole, backend="brute").choice is None, "called infeasible, but there is a choice"
        return
    same_optimum(whole, core)


@pytest.mark.parametrize("name", [n for n in REDUCTIONS if n != "distinct"])
def test_a_reduction_does_something_on_random_problems(name: str):
    def shape(core: Core) -> tuple:
        return ([None if c is None else c.tolist() for c in core.cost], [sorted(a) for a in core.adj],
                [[(i.lo, i.hi) for i in items] for items in core.items], core.price.tolist())

    changed = 0
    for seed in range(60):
        core = build(random_problem(seed))[0]
        before = shape(core)
        try:
            with np.errstate(invalid="ignore"):
                REDUCTIONS[name](core)
        except Infeasible:
            continue
        changed += shape(core) != before
    assert changed >= 3, f"{name} changed only {changed} of 60 problems"


def test_distinct_two_rows_with_equal_specs_leave_the_cheaper():
    e = Edge(0, 1, np.array([[0.0, 1.0], [2.0, 3.0]]), np.array([0, 0, 1]), np.array([0, 1]))
    core = build(Problem((np.array([4.0, 3.0, 1.0]), np.zeros(2)), (e,)))[0]
    assert core.cost[0].tolist() == [3, 1] and core.undo[0].kept.tolist() == [1, 2] and len(core.undo) == 1


def test_dead_removes_row_and_column():
    core = core_of([[0, 0], [0, 0]], {(0, 1): [[1, inf], [inf, inf]]})
    assert drop_dead(core, 0) and drop_dead(core, 1)
    assert core.adj[0][1].a.tolist() == [[1]]
    core = core_of([[3, inf], [0, 0]], {(0, 1): [[1, 2], [3, 4]]})
    assert drop_dead(core, 0) and core.cost[0].tolist() == [3]


def test_dead_without_a_strategy_is_infeasible():
    with pytest.raises(Infeasible):
        drop_dead(core_of([[inf, inf], [0, 0]], {(0, 1): [[1, 2], [3, 4]]}), 0)


def test_contraction_moves_costs_edges_and_loads_along_the_function():
    core = core_of([[0, 0, 0], [10, 20], [0, 0]], {(0, 1): [[2, inf], [inf, 4], [inf, 7]], (1, 2): [[1, 2], [3, 4]]},
                   [(1, 1, 0, 5.0)], [9], [inf])
    assert contract(core, 1) and core.cost[1] is GONE
    assert core.cost[0].tolist() == [12, 24, 27] and core.adj[0][2].a.tolist() == [[1, 2], [3, 4], [3, 4]]
    assert core.items[0][0].amount.tolist() == [0, 5, 5]
    assert core.lift(np.array([2, 0, 0])).tolist() == [2, 1, 0]


def test_elimination_pays_the_minimum():
    core = core_of([[0, 0], [1, 2]], {(0, 1): [[0, 5], [9, 0]]})
    assert eliminate(core, 1) and core.cost[0].tolist() == [1, 2]
    assert core.lift(np.array([1, 0])).tolist() == [1, 1]


def test_elimination_between_two_neighbours_joins_them():
    core = core_of([[0, 0], [1, 2], [0, 0]], {(0, 1): [[0, 5], [9, 0]], (1, 2): [[0, 3], [4, 0]]})
    assert eliminate(core, 1)
    assert core.adj[0][2].a.tolist() == [[1, 4], [6, 2]]  # over v: min(0+1+0, 5+2+4), min(0+1+3, 5+2+0), ...


def test_a_node_with_loads_is_not_minimised_out():
    assert not eliminate(core_of([[0, 0], [1, 2]], {(0, 1): [[0, 5], [9, 0]]}, [(1, 0, 0, 1.0)], [9], [inf]), 1)


def test_a_single_strategy_is_folded_into_its_neighbours():
    core = core_of([[7], [0, 0]], {(0, 1): [[1, 2]]})
    assert eliminate(core, 0) and core.constant == 7 and core.cost[1].tolist() == [1, 2]


def test_separable_table_becomes_two_vectors():
    core = core_of([[0, 0], [0, 0]], {(0, 1): [[0, 3], [2, 5]]})
    assert separate(core, 0) and not core.adj[0]
    assert core.cost[0].tolist() == [0, 2] and core.cost[1].tolist() == [0, 3]


def test_parallel_edges_add_up_whatever_their_direction():
    index = np.arange(2)
    edges = (Edge(0, 1, np.array([[1.0, 2.0], [3.0, 4.0]]), index, index), Edge(1, 0, np.array([[10.0, 30.0], [20.0, 40.0]]), index, index))
    core = build(Problem((np.zeros(2), np.zeros(2)), edges))[0]
    assert core.adj[0][1].a.tolist() == [[11, 22], [33, 44]] and core.adj[1][0].a.tolist() == [[11, 33], [22, 44]]


def test_dominance_looks_at_usage_too():
    def with_usage(first: float) -> Core:
        return core_of([[5, 3], [0, 0]], {(0, 1): [[0, 1], [1, 2]]}, [(0, 0, 0, first), (0, 1, 0, 2.0)], [9], [inf])

    core = with_usage(2.0)
    assert dominate(core, 0) and core.cost[0].tolist() == [3]
    assert not dominate(with_usage(1.0), 0)  # the dearer one uses less: it may be needed


def test_states_that_one_neighbour_tells_apart_become_one():
    """Copy states "made from p": the consumer (node 2) sees only whether the copy exists, the producer (node 0) which p."""
    core = core_of([[0, 0], [0, 0, 0], [0, 0]], {(0, 1): [[5, 1, 2], [5, 4, 0]], (1, 2): [[0, inf], [3, 3], [3, 3]]})
    with np.errstate(invalid="ignore"):
        assert merge_states(core, 1)
    assert len(core.cost[1]) == 2
    assert sorted(core.adj[0][1].a.T.tolist()) == [[1, 0], [5, 5]]
    merged = core.adj[0][1].a.T.tolist().index([1, 0])
    assert core.lift(np.array([0, merged, 0])).tolist()[1] == 1 and core.lift(np.array([1, merged, 0])).tolist()[1] == 2


def test_rows_that_cannot_bind_are_dropped():
    items = [(0, 0, 0, 4.0), (1, 0, 0, 5.0), (2, 0, 0, 6.0)]
    core = core_of([[0, 0]] * 3, {}, items, [20], [inf])
    assert drop_slack_rows(core) == [0, 1, 2] and not any(core.items)
    assert drop_slack_rows(core_of([[0, 0]] * 3, {}, items, [14], [inf])) == []


def test_a_priced_row_over_its_limit_is_linear():
    core = core_of([[0, 1], [0, 0]], {}, [(0, 0, 0, 3.0), (0, 1, 0, 8.0), (1, 1, 0, 5.0)], [0], [2.0])
    assert core.base.tolist() == [3] and price_certain_rows(core) == [0, 1]
    assert core.constant == 6 and core.cost[0].tolist() == [0, 11] and core.cost[1].tolist() == [0, 10]


def test_equal_tables_are_one_object_and_its_facts_are_computed_once():
    table = Table(np.zeros((2, 2)))
    calls = []
    assert table.fact(calls.append) is None and table.fact(calls.append) is None and len(calls) == 1


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(seed=st.integers(0, 10**6))
def test_a_decided_node_costs_and_loads_what_it_did(seed: int):
    whole = random_problem(seed, nodes=5)
    best = solve(whole, backend="brute").choice
    if best is None or whole.intervals is not None:
        return
    core = build(whole)[0]
    part = core.project(best)
    for v in np.flatnonzero(part[: (whole.n + 1) // 2] >= 0):
        core.fix(int(v), int(part[v]))
    same_optimum(whole, core)


def test_dominance_among_many_strategies_is_that_among_few():
    """Above a size tables are compared by kinds of rows and nothing is remembered."""
    rng = np.random.default_rng(0)
    few = rng.integers(0, 3, (2, 12, 5)).astype(float)
    kinds, cost = rng.integers(0, 12, (2, 300)), rng.integers(0, 3, 300).astype(float)
    tables = [Table(np.ascontiguousarray(few[i][kinds[i]])) for i in range(2)]
    kept, change = _undominated(cost, *tables)
    worst = cost[None, :] - cost[:, None] + sum((t.a[None] - t.a[:, None]).max(axis=2) for t in tables)
    gone = np.setdiff1d(np.arange(300), kept)
    np.testing.assert_array_equal(change, worst[np.ix_(gone, kept)])
    assert (change <= 0).any(axis=1).all(), "every strategy that goes has one that stays and replaces it"
    left = worst[np.ix_(kept, kept)] + np.diag(np.full(len(kept), inf))
    assert (left > 0).all() and 0 < len(kept) < 300
    assert not any(t.facts for t in tables)


def test_dominance_among_many_is_the_same_where_pairs_are_forbidden():
    """The compiled comparison ends at the first neighbour that forbids; both say the same of infinite costs, too."""
    rng = np.random.default_rng(1)
    few = np.where(rng.random((3, 14, 6)) < 0.3, inf, rng.integers(0, 3, (3, 14, 6)).astype(float))
    kinds = rng.integers(0, 14, (3, 260))
    cost = np.where(rng.random(260) < 0.02, inf, rng.integers(0, 3, 260).astype(float))
    with np.errstate(invalid="ignore"):
        changes = [replacement(np.ascontiguousarray(few[i][kinds[i]])) for i in range(3)]
        expected = _worst(cost, changes, np.arange(260), np.arange(260)) <= 0
    found = np.ones((260, 260), dtype=bool)
    never_dearer(cost, *joined(changes, 260), found)
    np.testing.assert_array_equal(found, expected)
    assert 0 < found.sum() < found.size


@pytest.mark.parametrize(("limits", "kept"), [({}, [(0, 1), (2, 3)]), ({"PAIR": 20}, [(0, 1)]), ({"ROUND": 20}, [(0, 1)]), ({"ROUND": 5}, []),
                                              ({"STORED": 1}, [])])
def test_pairs_whose_tables_would_be_too_large_are_left_alone(limits, kept, monkeypatch):
    """(0, 1) has 2 x 3 strategies beside the 2 of node 4, 12 entries; (2, 3) 4 x 3 beside them, 24."""
    sizes = (2, 3, 4, 3, 2)
    core = core_of([[0.0] * n for n in sizes], {(v, 4): np.arange(2.0 * n).reshape(n, 2).tolist() for v, n in enumerate(sizes[:4])})
    for name, limit in limits.items():
        monkeypatch.setattr(pairs, name, limit)
    assert pairs._affordable(core, [(0, 1), (2, 3)]) == kept


def test_kinds_of_rows_are_numbered_in_order():
    first, kind = distinct(np.array([[5.0, inf], [1.0, 2.0], [5.0, inf], [1.0, 3.0]]))
    assert first.tolist() == [0, 1, 3] and kind.tolist() == [0, 1, 0, 2]


def test_what_two_neighbours_tell_apart_is_not_merged():
    each = Table(np.eye(3))
    assert _told_apart_by_one(each, each) is None
    assert _told_apart_by_one(each, Table(np.ones((3, 2))), np.array([0.0, 0.0, 1.0])) == 0
    assert _told_apart_by_one(Table(np.ones((3, 2))), np.arange(3.0)) is None, "a row alone tells all apart, no table does"


def test_rows_alike_differ_by_a_constant():
    kind, first = alike(np.array([[1.0, 2.0, inf], [3.0, 4.0, inf], [1.0, 2.0, 5.0], [inf, 0.0, 1.0], [inf, 7.0, 8.0]]))
    assert kind[0] == kind[1] and kind[3] == kind[4] and len(set(kind.tolist())) == 3
    assert first.tolist() == [1.0, 3.0, 1.0, 0.0, 7.0]


def test_a_look_without_anything_to_do_is_not_looked_at_again():
    core = core_of([[0, 1]] * 3, {(0, 1): [[0, 5], [4, 2]], (1, 2): [[0, 5], [4, 2]], (0, 2): [[3, 0], [0, 4]]})
    rule_calls = []
    rule = lambda core, v: rule_calls.append(v) or False  # noqa: E731
    _sweep(core, [0, 1, 2], (rule,), lambda: False)
    seen = len(rule_calls)
    _sweep(core.copy(), [0, 1, 2], (rule,), lambda: False)
    assert seen == len(rule_calls) == 3
    core.forget()
    _sweep(core, [0, 1, 2], (rule,), lambda: False)
    assert len(rule_calls) == 6
