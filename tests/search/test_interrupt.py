"""Ctrl-C at every phase of every command that plans: the best plan so far with its gap, or a sentence; never a traceback."""
from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import autoshard
from autoshard import cli
from autoshard.base.plan import INTERRUPTED, TIED, Plan
from autoshard.cli import compare, explain, memory, plan
from autoshard.errors import AutoshardError, Interrupted
from autoshard.search import Clock, Status
from autoshard.search.interrupt import stopping

MODEL = ("gpt:tiny", "--mesh", "d=2", "--cluster", "cpu-gloo")
COMMANDS = {
    "plan": (plan, ("plan", *MODEL)),
    "compare": (compare, ("compare", *MODEL)),
    "memory": (memory, ("memory", *MODEL, "--steps", "2")),
    "op": (explain, ("explain", *MODEL, "--op", "h.0.mlp.c_fc")),
    "edge": (explain, ("explain", *MODEL, "--edge", "h.0.mlp.c_fc->gelu_0")),
}
BEFORE = ("load", "trace", "strategies", "costs", "formulate")


class CtrlC:
    """A progress callback that sends SIGINT to its own process when a phase begins, as a terminal does."""

    def __init__(self, phase: str) -> None:
        self.phase, self.sent = phase, 0

    def __call__(self, phase: str, detail: str) -> None:
        if phase == self.phase and not self.sent and (not detail or phase != "search"):
            self.sent += 1
            signal.raise_signal(signal.SIGINT)


class OnceProven(CtrlC):
    """Sends it when the first search has proven its plan."""

    def __call__(self, phase: str, detail: str) -> None:
        if "gap 0.00%" in detail and not self.sent:
            self.sent += 1
            signal.raise_signal(signal.SIGINT)


def run(monkeypatch, capsys, command: str, phase: str, *more: str, sends: type[CtrlC] = CtrlC) -> tuple[int, str, str]:
    module, arguments = COMMANDS[command]
    progress = sends(phase)

    @contextmanager
    def shown(on):
        yield progress

    monkeypatch.setattr(module, "progress_shown", shown)
    monkeypatch.setattr(sys, "argv", ["autoshard", *arguments, *more])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert progress.sent == 1, f"{command} never came to {phase}"
    return ended.value.code or 0, *capsys.readouterr()


@pytest.mark.parametrize("command", COMMANDS)
def test_during_the_search_there_is_a_result(monkeypatch, capsys, command):
    code, out, err = run(monkeypatch, capsys, command, "search", "--json")
    assert code == 130 and "best plan found so far" in err and json.loads(out)


@pytest.mark.parametrize("phase", BEFORE)
def test_before_the_search_there_is_a_sentence(monkeypatch, capsys, phase):
    code, out, err = run(monkeypatch, capsys, "plan", phase)
    assert code == 130 and out == "" and err.startswith("interrupted") and "there is no" in err


@pytest.mark.parametrize("command", ("compare", "op"))
def test_after_the_search_there_is_a_sentence(monkeypatch, capsys, command):
    code, out, err = run(monkeypatch, capsys, command, {"compare": "baselines", "op": "regrets"}[command])
    assert code == 130 and out == "" and err.startswith("interrupted")


@pytest.mark.parametrize("phase", ("trace", "plan", "run"))
def test_verify_is_ended(monkeypatch, capsys, phase):
    module = cli.verify_command
    monkeypatch.setitem(COMMANDS, "verify", (module, ("verify", *MODEL, "--plans", "searched")))
    code, out, err = run(monkeypatch, capsys, "verify", phase)
    assert code == 130 and out == "" and err.startswith("interrupted")


def test_the_plan_is_saved_and_says_so(monkeypatch, capsys, tmp_path):
    code, out, err = run(monkeypatch, capsys, "plan", "search", "-o", str(tmp_path / "plan.json"), "--search", "auto")
    found = Plan.load(tmp_path / "plan.json")
    assert code == 130 and found.interrupted and INTERRUPTED in out and 0 <= found.bound_s <= found.objective_s and 0 <= found.gap <= 1
    json.loads((tmp_path / "plan.json").read_text(), parse_constant=pytest.fail)  # Infinity is no JSON


@pytest.mark.parametrize("command, arguments, rows", [
    (memory, ("memory", "mlp", "--mesh", "d=2", "--cluster", "cpu-gloo", "--steps", "3"), lambda found: len(found)),
    (plan, ("plan", "mlp", "--mesh", "d=2", "--cluster", "cpu-gloo", "--what-if", "device.memory_bandwidth=2x"), lambda found: 1 + len(found["what_if"])),
], ids=["memory", "what-if"])
def test_no_search_follows_one_that_was_ended(command, arguments, rows, monkeypatch, capsys):
    """Also where what it found was proven by then, so that the plan says nothing of Ctrl-C."""
    monkeypatch.setitem(COMMANDS, "several", (command, arguments))
    code, out, err = run(monkeypatch, capsys, "several", "search", "--json", sends=OnceProven)
    assert code == 130 and rows(json.loads(out)) == 1 and "what was planned by then" in err


def test_why_not_in_the_first_search_has_nothing_to_compare(monkeypatch, capsys):
    monkeypatch.setitem(COMMANDS, "why-not", (explain, ("explain", *MODEL, "--why-not", "h.0.mlp.c_fc=d,-")))
    code, out, err = run(monkeypatch, capsys, "why-not", "search")
    assert code == 130 and out == "" and "first of two searches" in err and "gap" in err


def test_the_status_is_the_searchs():
    assert INTERRUPTED == Status.INTERRUPTED.value and TIED == Status.OPTIMAL_TIED.value


def planned(progress, **options):
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 8))
    return autoshard.plan(model, "d=2", (torch.ones(32, 64), torch.zeros(32, dtype=torch.long)), loss_fn=F.cross_entropy, cluster="cpu-gloo",
                          progress=progress, **options)


def test_the_interface_returns_a_plan_that_fits_or_raises():
    free, found = planned(None), planned(CtrlC("search"))
    assert (found.interrupted or found.gap < 1e-9) and found.memory["total"] <= found.memory["limit"] and found.objective_s >= free.objective_s
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    with pytest.raises(Interrupted, match="'costs'; there is no plan yet") as raised:
        planned(CtrlC("costs"))
    assert isinstance(raised.value, AutoshardError) and isinstance(raised.value, KeyboardInterrupt)


def test_tight_memory_ends_with_a_plan_that_fits_or_with_a_sentence():
    least = planned(None).memory["total"]
    for budget in (0.999 * least, 0.3 * least):
        try:
            found = planned(CtrlC("search"), memory_budget=budget)
            assert found.memory["total"] <= budget
        except Interrupted as e:
            assert "before a plan that fits was found" in str(e)
        except autoshard.AutoshardError as e:  # proven without any search
            assert "(proven)" in str(e)


def test_compile_is_ended(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        autoshard.compile(nn.Linear(4, 4), "one=1", (torch.ones(2, 4),), cluster="cpu-gloo", cache=tmp_path, progress=CtrlC("search"))
    assert not list(tmp_path.iterdir()), "nothing that was cut short is kept for other runs"


def test_other_handlers_and_threads_are_left_alone():
    mine = lambda number, frame: None  # noqa: E731
    old = signal.signal(signal.SIGINT, mine)
    try:
        with stopping(Clock(1.0)):
            assert signal.getsignal(signal.SIGINT) is mine
    finally:
        signal.signal(signal.SIGINT, old)
    seen: list[object] = []

    def work() -> None:
        with stopping(Clock(1.0)):
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [signal.default_int_handler]


def test_a_second_ctrl_c_ends_it_at_once():
    clock = Clock(60.0)
    with pytest.raises(KeyboardInterrupt), stopping(clock):
        signal.raise_signal(signal.SIGINT)
        assert clock.stopped and clock.part(0.5).stopped and clock.part().left == 0.0
        signal.raise_signal(signal.SIGINT)


def children(pid: int) -> set[int]:
    found = set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if int((entry / "stat").read_text().rpartition(")")[2].split()[1]) == pid:
                    found.add(int(entry.name))
            except OSError:  # ended just now
                continue
    return found


def test_a_real_process_ends_with_130_and_leaves_no_solver(tmp_path):
    code = ("import sys; from autoshard import cli; sys.argv = ['autoshard', 'plan', 'llama:1b', '--mesh', 'a=2,b=4,c=8', '--batch', '16', "
            "'--seq', '2048']; cli.main()")
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                               env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)})
    said = ""
    for line in process.stderr:
        said += line
        if line.startswith("search"):
            break
    time.sleep(2.0)
    solvers = children(process.pid)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 130, said + err
    assert "Traceback" not in err and (INTERRUPTED in out.replace("\n", " ") or "there is no plan yet" in err), out + err
    end = time.monotonic() + 10
    while any(os.path.exists(f"/proc/{pid}") for pid in solvers) and time.monotonic() < end:
        time.sleep(0.1)
    assert not [pid for pid in solvers if os.path.exists(f"/proc/{pid}")]
