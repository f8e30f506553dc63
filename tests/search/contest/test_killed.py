"""Whatever ends a run, at whatever moment: there is no answer file, or a complete and true one."""
from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from autoshard.search import Status, evaluate
from autoshard.search.contest.read import read_problem
from tests.search.contest_problems import write_problem

SOLVE = "import sys; from autoshard.search.contest.command import solve_command; sys.exit(solve_command(sys.argv[1], float(sys.argv[2]), output=sys.argv[3]))"
WRITE = """
import sys
from autoshard.search.contest.read import write_atomically
print("ready", flush=True)
for n in range(10**9):
    write_atomically(sys.argv[1], "[" + ",".join([str(n)] * 100_000) + "]")
"""


def start(problem: Path, seconds: float, output: Path) -> subprocess.Popen:
    return subprocess.Popen([sys.executable, "-c", SOLVE, str(problem), str(seconds), str(output)],
                            stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)


def check_answer(problem: Path, output: Path) -> None:
    answer = json.loads(output.read_text())
    assert set(answer) == {"choice", "cost", "bound", "gap", "status", "seconds"}
    assert evaluate(read_problem(problem), answer["choice"]) == answer["cost"], "the cost is not the choice's cost"
    assert answer["bound"] is None or answer["bound"] <= answer["cost"]


def kill_once(folder: Path, problem: Path, number: signal.Signals, after: float) -> bool:
    """Whether there was an answer."""
    output = folder / "answer.json"
    output.unlink(missing_ok=True)
    process = start(problem, 8.0, output)
    time.sleep(after)
    process.send_signal(number)
    _, error = process.communicate(timeout=60)
    assert process.returncode in (0, -number, 128 + number, 1), f"exit code {process.returncode} after {after:.2f} s: {error}"
    expected = ("KeyboardInterrupt", "InfeasibleError", "mip/worker")  # during imports; nothing found yet; its worker's
    assert "Traceback" not in error or any(word in error for word in expected), error
    if output.exists():
        check_answer(problem, output)
    return output.exists()


def test_a_signal_writes_the_best_so_far(tmp_path):
    problem, output = write_problem(tmp_path / "problem.json", seed=1, nodes=8000), tmp_path / "answer.json"
    process = start(problem, 300.0, output)
    time.sleep(5.0)
    process.send_signal(signal.SIGTERM)
    _, error = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM, error
    if output.exists():  # on a very busy machine not even the file was read by then
        check_answer(problem, output)
        assert json.loads(output.read_text())["status"] in (Status.INTERRUPTED.value, Status.OPTIMAL.value)
    else:
        assert "interrupted before any choice was found" in error


def test_a_write_that_is_killed_leaves_the_old_file_or_the_new(tmp_path):
    output, rng = tmp_path / "out.json", random.Random(0)
    for _ in range(4):
        writer = subprocess.Popen([sys.executable, "-c", WRITE, str(output)], stdout=subprocess.PIPE, text=True)
        assert writer.stdout is not None and writer.stdout.readline() == "ready\n"
        time.sleep(rng.uniform(0.05, 0.3))
        writer.kill()
        writer.communicate()
        assert not output.exists() or len(set(json.loads(output.read_text()))) == 1


@pytest.mark.slow
def test_fifty_kills_at_random_moments(tmp_path):
    problem, rng = write_problem(tmp_path / "problem.json", seed=2, nodes=150), random.Random(7)
    signals = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT)
    answers = sum(kill_once(tmp_path, problem, signals[n % 3], rng.uniform(1.0, 12.0)) for n in range(50))
    print(f"{answers} of 50 killed runs left an answer")
