"""What a solution says about itself: only a clock that decided may be blamed."""
from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from autoshard.decide.how import How
from autoshard.search import BACKENDS, Board, Clock, Problem, Status, solve
from autoshard.search.board import Event
from autoshard.search.clock import Phase

PROBLEM = Problem((np.array([1.5, 3.0]), np.array([2.0, 5.0])))


def board_with_gap(clock: Clock) -> Board:
    board = Board(PROBLEM, clock)
    board.offer(np.array([1, 0]))
    board.raise_bound(3.0)
    return board


def test_giving_up_early_is_a_gap_and_not_the_time_limit():
    found = board_with_gap(Clock(60.0)).solution()
    assert found.status is Status.GAP and found.gap == pytest.approx(0.4) and found.bound == 3.0


@pytest.mark.parametrize(("clock", "status"), [
    (Clock(0.0), Status.TIME_LIMIT), (Clock(60.0, work_limit=5, work=5), Status.WORK_LIMIT), (Clock(60.0, cut=True), Status.TIME_LIMIT),
    (Clock(60.0, stop=True), Status.INTERRUPTED),
])
def test_a_limit_that_decided_is_named(clock, status):
    assert board_with_gap(clock).solution().status is status


def test_a_share_of_the_time_that_ran_out_is_noted():
    clock = Clock(60.0)
    assert not Phase(clock, 0.5).over() and not clock.cut
    assert Phase(clock, 0.0).over() and clock.cut
    work = Clock(60.0, work_limit=10)
    phase = Phase(work, 0.5)
    phase.tick(5)
    assert phase.over() and not work.cut, "work ends alike on every machine"


def test_a_tied_proof_keeps_the_untied_bound_and_ends_when_a_cheaper_choice_comes():
    board = board_with_gap(Clock(60.0))
    board.tied_proven = True
    assert board.solution().status is Status.OPTIMAL_TIED and board.solution().bound == 3.0
    board.offer(np.array([0, 0]))
    assert board.solution().status is Status.GAP and board.solution().cost == 3.5


def test_nothing_found_blames_no_limit():
    assert Board(PROBLEM, Clock(60.0)).solution().status is Status.UNKNOWN
    assert "limit" not in Status.UNKNOWN.value and "limit" not in Status.GAP.value


def test_proven_is_optimal():
    assert solve(PROBLEM).status is Status.OPTIMAL and solve(PROBLEM).cost == 3.5


def test_an_event_says_what_came_and_whether_it_is_tied():
    events = []
    board = Board(PROBLEM, Clock(60.0), events.append, near=[np.array([1, 1])])
    board.offer(np.array([1, 0]), "a tied one", tied=True)
    board.offer(np.array([1, 1]), "a dearer one", tied=True)
    board.offer(np.array([0, 0]), "a cheaper one")
    board.raise_bound(3.0)
    assert [(e.cost, e.tied, e.message) for e in events] == [(5.0, True, "a tied one"), (3.5, False, "a cheaper one"), (3.5, False, "")]
    assert events[-1].bound == 3.0 and events[-1].gap == pytest.approx(0.5 / 3.5)
    assert [c.tolist() for c in board.solution().near] == [[1, 1]]


def test_a_choice_that_is_known_is_told_of_again_when_it_is_the_best_tied_one():
    events: list[Event] = []
    board = Board(PROBLEM, Clock(60.0), events.append)
    board.offer(np.array([1, 0]), "met on the way")
    board.offer(np.array([1, 0]), "met on the way")
    board.offer(np.array([1, 0]), "layers tied", tied=True)
    assert [(e.message, e.tied) for e in events] == [("met on the way", False), ("layers tied", True)]


@pytest.mark.parametrize(("roomy", "limit"), [(lambda choice: True, 60.0), (lambda choice: False, 30.0), (lambda choice: choice[0] == 1, 60.0),
                                              (lambda choice: choice[0] != 1, 30.0)])
def test_a_search_whose_best_choice_leaves_room_gets_all_the_time(roomy, limit, monkeypatch):
    """The last choice counts: [0, 0], and then [1, 0], which is cheaper here."""
    given: list[float] = []

    def search(board: Board, **_: object) -> None:
        for choice in ([0, 0], [1, 0]):
            board.offer(np.array(choice))
            given.append(board.clock.time_limit)

    monkeypatch.setitem(BACKENDS, "auto", search)
    problem = replace(PROBLEM, node_costs=(np.array([9.0, 1.0]), *PROBLEM.node_costs[1:]))
    How(Clock(60.0)).part(0.5).solve_until_tied(problem, (), lambda choice: False, worth_all=roomy)
    assert given[-1] == pytest.approx(limit, abs=1.0)
    assert given[0] == pytest.approx(60.0 if roomy(np.array([0, 0])) else 30.0, abs=1.0)
