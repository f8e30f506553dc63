"""Clocks that are parts of one another: what stops the whole stops every part, and parts never add up to more than it."""
from __future__ import annotations

import itertools

import numpy as np
import pytest

from autoshard.search import Board, Edge, Problem, Status, solve
from autoshard.search.clock import LATE, Clock
from autoshard.search.mip.guarded import Worker


class Time:
    """A clock that only moves when it is told to."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_part_ends_with_its_share_and_with_the_whole():
    time = Time()
    whole = Clock(10.0, now=time)
    part = whole.part(0.5)
    inner = part.part()
    assert (part.time_limit, inner.time_limit) == (5.0, 5.0)
    time.now = 6.0
    assert part.expired() and inner.expired() and not whole.expired() and whole.part().time_limit == 4.0
    fresh = whole.part()
    whole.stop = True
    assert fresh.stopped and fresh.expired() and fresh.left == 0.0 and fresh.part().left == 0.0


def test_stopping_a_part_leaves_the_whole():
    whole = Clock(10.0)
    part = whole.part()
    part.stop = True
    assert part.stopped and not whole.stopped and not whole.part().stopped


def test_parts_of_what_is_left_never_exceed_the_whole():
    time, rng = Time(), np.random.default_rng(0)
    for _ in range(100):
        whole, start = Clock(10.0, now=time), time.now
        whole.start = start
        for share in rng.uniform(0.05, 1.0, 8):
            part = whole.part(float(share))
            time.now += part.left  # each takes all that it was given
            assert part.left <= 1e-9
        assert time.now - start <= 10.0 * (1 + 1e-12)


def test_only_the_whole_is_overdue():
    time = Time()
    whole = Clock(10.0, now=time)
    part = whole.part(0.1).part()
    time.now = 10.0 * (1 + LATE)
    assert not part.overdue()
    time.now += 0.1
    assert part.overdue() and whole.overdue()
    stopped = Clock(10.0)
    assert not stopped.part().overdue()
    stopped.stop = True
    assert stopped.part().overdue()


def test_an_overdue_solver_is_ended_without_its_grace(tmp_path, monkeypatch, caplog):
    from autoshard.search.mip import worker

    path = tmp_path / "worker.py"
    path.write_text("while True: pass")
    monkeypatch.setattr(worker, "__file__", str(path))
    looks = itertools.count()
    worker = Worker()
    found = worker.ask({"seconds": 1000.0}, b"", lambda: next(looks) > 3)
    assert found.reason == "KILLED" and not worker.alive and not caplog.text, "who asked for the end is not told of it"


@pytest.mark.parametrize("backend", ["auto", "milp", "local"])
def test_a_stopped_clock_gives_the_incumbent_as_interrupted(backend):
    rng = np.random.default_rng(1)
    costs = tuple(rng.random(4) for _ in range(40))
    edges = tuple(Edge(i, i + 1, rng.random((4, 4)), np.arange(4), np.arange(4)) for i in range(39))
    problem, clock = Problem(costs, edges), Clock(60.0)
    clock.stop = True
    found = solve(problem, backend=backend, clock=clock.part(), starts=[np.zeros(40, dtype=np.int64)])
    assert found.choice is not None and found.status in (Status.INTERRUPTED, Status.OPTIMAL)
    assert Board(problem, clock.part()).done
