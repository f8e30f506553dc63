"""Solver processes: answers come back, a solver that hangs or crashes is ended and the search goes on."""
from __future__ import annotations

import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from ortools.math_opt.python import mathopt

from autoshard.search.mip import guarded, worker
from autoshard.search.mip.guarded import Worker, solve_program


def knapsack(capacity: float) -> bytes:
    """max 3a + 4b + 5c with 2a + 3b + 4c <= capacity, as a minimisation."""
    model = mathopt.Model()
    take = [model.add_binary_variable() for _ in range(3)]
    model.add_linear_constraint(2 * take[0] + 3 * take[1] + 4 * take[2] <= capacity)
    model.minimize(-3 * take[0] - 4 * take[1] - 5 * take[2])
    return model.export_model().SerializeToString()


@pytest.mark.parametrize("solver", worker.SOLVERS)
def test_an_answer_comes_back(solver):
    found = solve_program(knapsack(5), 3, solver=solver, seconds=10, seed=0)
    assert found.reason == "OPTIMAL" and found.bound == pytest.approx(-7)
    np.testing.assert_allclose(found.values, [1, 1, 0], atol=1e-6)
    assert guarded.cpu_seconds() > 0


def test_threads_solve_side_by_side():
    with ThreadPoolExecutor(3) as pool:
        found = list(pool.map(lambda c: solve_program(knapsack(c), 3, solver="milp", seconds=10, seed=0).bound, [2, 5, 9]))
    assert found == pytest.approx([-3, -7, -12])


def test_nodes_are_a_limit_that_is_named():
    rng, model = np.random.default_rng(0), mathopt.Model()
    take, worth = [model.add_binary_variable() for _ in range(40)], rng.integers(50, 100, 40)
    for weight in rng.integers(50, 100, (5, 40)):
        model.add_linear_constraint(mathopt.fast_sum(float(w) * x for w, x in zip(weight, take, strict=True)) <= weight.sum() / 2)
    model.maximize(mathopt.fast_sum(float(w) * x for w, x in zip(worth, take, strict=True)))
    program = model.export_model().SerializeToString()
    first, again = (solve_program(program, 40, solver="milp", seconds=60, seed=0, nodes=1) for _ in range(2))
    assert first.limit == "NODE" and first.bound == again.bound
    np.testing.assert_array_equal(first.values, again.values)


def test_infeasible_is_said():
    assert solve_program(knapsack(-1), 3, solver="milp", seconds=10, seed=0).reason.startswith("INFEASIBLE")


def test_a_process_started_early_is_the_one_that_answers():
    workers = guarded.Workers()
    workers.start()
    workers.start()
    assert len(workers._started) == 1
    with workers.borrowed() as worker:
        assert worker is workers._started[0] and worker.alive
    workers.close()


@pytest.fixture
def script(tmp_path, monkeypatch):
    """Puts another script in the place of the worker."""
    def use(code: str) -> Worker:
        path = tmp_path / "worker.py"
        path.write_text(code)
        monkeypatch.setattr(worker, "__file__", str(path))
        return Worker()

    return use


def test_a_hanging_solver_is_ended(script, monkeypatch, caplog):
    monkeypatch.setattr(guarded, "GRACE", 0.5)
    worker, start = script("while True: pass"), time.monotonic()
    found = worker.ask({"seconds": 0.1}, b"")
    assert found.reason == "KILLED" and found.values is None and found.bound == -np.inf
    assert time.monotonic() - start < 60 and not worker.alive
    assert "did not answer" in caplog.text


def test_a_crashing_solver_is_ended(script, caplog):
    found = script("import sys; sys.stdin.buffer.read(16); sys.exit(3)").ask({"seconds": 1.0}, b"")
    assert found.reason == "KILLED" and "crashed" in caplog.text


def test_a_worker_ends_with_its_parent(tmp_path):
    code = ("import os, time\nfrom autoshard.search.mip.guarded import Worker\n"
            "w = Worker(); print(w.process.pid, flush=True); os._exit(0)")
    pid = int(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)
    for _ in range(600):  # a busy machine takes seconds to import what the worker needs before it looks
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return
        if state == "Z":
            return
        time.sleep(0.1)
    pytest.fail(f"solver process {pid} outlived its parent")


def test_no_time_is_left_for_a_long_program(monkeypatch):
    monkeypatch.setattr(guarded, "AT_ONCE", 10)
    late, early = (solve_program(knapsack(5), 3, solver="milp", seconds=s, seed=0) for s in (0.0, 10.0))
    assert (late.reason, late.limit, late.bound, late.values) == ("KILLED", "TIME", -np.inf, None)
    assert early.reason == "OPTIMAL"
