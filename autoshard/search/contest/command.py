"""`autoshard solve`: read a problem, search, show progress, write the answer whatever interrupts it.

The search runs in a thread of its own; this one waits for it, for the time limit, or for a signal, and then writes the
best choice so far. Solvers that do not look up in time therefore cannot make anyone wait."""
from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

from autoshard.errors import InfeasibleError, ProblemError
from autoshard.search import solve
from autoshard.search.board import MARGIN, Board, Event
from autoshard.search.clock import Clock
from autoshard.search.contest.infeasible import explain
from autoshard.search.contest.read import read_problem, solution_json, write_atomically
from autoshard.search.problem import Problem, Solution, Status

GRACE = 0.3  # seconds the search gets to stop by itself after a signal or the time limit
LONGEST = 1e7  # seconds, a third of a year: more than that fits neither into a thread's wait nor into all solvers' numbers
RESERVE = 0.5  # seconds kept back to stop and to write the answer


def solve_command(path: str, time_limit: float = 60.0, threads: int = 2, seed: int = 0, output: str | None = None,
                  as_json: bool = False, quiet: bool = False, *, start: float | None = None) -> int:
    """Solve a contest file; returns the exit code (0, or 128 + signal when interrupted). `start` is when the command
    began (`time.monotonic`), so that the time limit counts everything.

    Raises ProblemError for bad input or an output that cannot be written (checked before the search), and
    InfeasibleError when no choice is feasible."""
    start = time.monotonic() if start is None else start
    if not time_limit > 0 or threads < 1:
        raise ProblemError("--time-limit must be above 0 and --threads at least 1")
    time_limit = min(time_limit, LONGEST)
    if output is not None:
        _check_writable(output, path)
    signals = _Signals()
    with signals:
        problem = read_problem(path)
        _check_time_is_left(path, time_limit, time.monotonic() - start)
        line = _ProgressLine(quiet=quiet or as_json or not sys.stderr.isatty())
        board = Board(problem, Clock(max(0.05, time_limit - RESERVE), start=start), line.show)
        solution, finished = _search(board, threads, seed, signals)
        line.end()
        if solution.choice is not None:
            _publish(solution, problem, output, as_json, quiet)
        elif signals.number:
            print("interrupted before any choice was found: nothing is written", file=sys.stderr)
        elif not finished:
            print(f"error: {_nothing_found(path, solution)}", file=sys.stderr)
    code = 128 + signals.number if signals.number else 0
    if not finished:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code if solution.choice is not None else code or 2)  # a solver deep in C++ cannot be joined
    if solution.choice is None and not code:
        if solution.status is Status.INFEASIBLE:
            raise InfeasibleError(f"{path}: {explain(problem, max(1.0, min(10.0, time_limit)))}")
        raise InfeasibleError(_nothing_found(path, solution))
    return code


def _nothing_found(path: str, solution: Solution) -> str:
    return f"{path}: no feasible choice was found in {solution.seconds:.1f} s, nor proven impossible; try a longer --time-limit"


def _search(board: Board, threads: int, seed: int, signals: "_Signals") -> tuple[Solution, bool]:
    """(solution, whether the search thread ended)."""
    failure: list[BaseException] = []

    def work() -> None:
        try:
            solve(board.problem, threads=threads, seed=seed, board=board)
        except BaseException as error:  # handed to the waiting thread, which raises it
            failure.append(error)

    worker = threading.Thread(target=work, daemon=True)
    worker.start()
    while worker.is_alive() and not signals.number and board.clock.left > 0:
        worker.join(0.05)
    board.clock.stop = board.clock.stop or bool(signals.number)
    worker.join(GRACE)
    if failure:
        raise failure[0]
    return board.solution(), not worker.is_alive()


def _publish(solution: Solution, problem: Problem, output: str | None, as_json: bool, quiet: bool) -> None:
    answer = solution_json(solution)
    if output is not None:
        write_atomically(output, json.dumps(answer) + "\n")
    if as_json:
        shown = {k: v for k, v in answer.items() if k != "choice" or output is None}
        print(json.dumps(shown | {"presolve": solution.stats}))
    if as_json or quiet:
        return
    print(f"status   {answer['status']}{_how_sure(solution)}")
    print(f"cost     {answer['cost']:,}")
    print(f"bound    {answer['bound']:,}" if answer["bound"] is not None else "bound    none yet")
    print(f"gap      {100 * solution.gap:.4g} %")
    if "core" in solution.stats:
        core = solution.stats["core"]
        print(f"presolve {problem.n:,} -> {core['nodes']:,} nodes, {len(problem.edges):,} -> {core['edges']:,} edges")
    print(f"seconds  {solution.seconds:.1f}")
    if output is not None:
        print(f"written  {output}")


def _how_sure(solution: Solution) -> str:
    if solution.status is not Status.OPTIMAL:
        return ""
    return ", proven in whole numbers" if solution.stats.get("exact") else f", within a margin of {MARGIN:g} of the cost"


def _check_time_is_left(path: str, time_limit: float, passed: float) -> None:
    """Reading cannot be interrupted: the file is one JSON text."""
    if passed >= time_limit:
        raise ProblemError(f"{path}: it took {passed:.1f} s to start and to read the file, and --time-limit is {time_limit:g} s; "
                           f"allow at least {2 * passed + RESERVE:.0f} s")


def _check_writable(output: str, problem: str) -> None:
    if Path(output).resolve() == Path(problem).resolve():
        raise ProblemError(f"the answer would be written over the problem, {problem}; give another file with -o")
    folder = Path(output).absolute().parent
    if not folder.is_dir():
        raise ProblemError(f"{output} cannot be written: there is no folder {folder}")
    if Path(output).is_dir() or not os.access(folder, os.W_OK):
        raise ProblemError(f"{output} cannot be written: it is a folder, or its folder is read-only")


class _Signals:
    """While active, SIGINT and SIGTERM are noted instead of ending the process."""

    def __init__(self) -> None:
        self.number = 0
        self.old: dict[int, Any] = {}  # handlers as `signal.signal` gives them back

    def __enter__(self) -> "_Signals":
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self.old[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self.old.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: object) -> None:
        self.number = number


class _ProgressLine:
    def __init__(self, quiet: bool):
        self.quiet, self.shown = quiet, False

    def show(self, e: Event) -> None:
        if not self.quiet:
            self.shown = True
            line = f"{e.seconds:6.1f} s  cost {e.cost:,.10g}  bound {e.bound:,.10g}  gap {100 * e.gap:.4g} %  {e.message}"
            sys.stderr.write("\r\033[K" + line[:150])
            sys.stderr.flush()

    def end(self) -> None:
        if self.shown:
            sys.stderr.write("\n")
