"""What a rank learns of one that is gone: from the kernel, and from a store that does not answer."""
from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import pytest
import torch

from autoshard.errors import AutoshardError, CollectiveError
from autoshard.runtime.ranks import agree, heartbeat, store
from autoshard.runtime.ranks.process import ENDED, STOPPED, fate, here

SAYS = "import time; from autoshard.runtime.ranks.process import here; print(here(), flush=True); time.sleep(60)"


def comes_to(text: str, wanted: str) -> bool:
    end = time.monotonic() + 60
    while fate(text) != wanted and time.monotonic() < end:
        time.sleep(0.01)
    return fate(text) == wanted


@pytest.mark.skipif(not here(), reason="no /proc")
def test_the_fate_of_a_process():
    other = subprocess.Popen([sys.executable, "-c", SAYS], stdout=subprocess.PIPE, text=True)
    try:
        text = other.stdout.readline().strip()
        assert fate(text) == ""
        other.send_signal(signal.SIGSTOP)
        assert comes_to(text, STOPPED)
        other.send_signal(signal.SIGCONT)
        assert comes_to(text, "")
    finally:
        other.kill()
    assert comes_to(text, ENDED), "not waited for yet"
    other.wait()
    assert fate(text) == ENDED
    boot, space, pid, start = here().split()
    assert fate(here()) == "" and fate(f"{boot} {space} {pid} {int(start) + 1}") == ENDED, "another process of the same id"
    assert fate(f"elsewhere {space} {other.pid} 1") == "" and fate("") == ""


class Stopped:
    """Answers `check`, and `get` never."""

    def __init__(self) -> None:
        self.let_go = threading.Event()

    def check(self, keys: list[str]) -> bool:
        return keys == ["here"]

    def get(self, key: str) -> bytes:
        self.let_go.wait()
        return b""

    def add(self, key: str, amount: int) -> int:
        raise RuntimeError("connection lost")


def test_a_store_that_does_not_answer(monkeypatch):
    keeper = Stopped()
    asked = store.PatientStore(keeper)
    assert asked.check(["here"]) and not asked.check(["there"])
    with pytest.raises(AutoshardError, match="store is gone, .*usually rank 0.*connection lost"):
        asked.add("x", 1)
    monkeypatch.setattr(store, "PATIENCE", 0.2)
    with pytest.raises(AutoshardError, match="no answer .*usually rank 0"):
        asked.get("x")
    monkeypatch.setattr(store, "PATIENCE", 60.0)
    start = time.monotonic()
    with pytest.raises(AutoshardError, match="no answer"):
        asked.check(["here"])
    assert time.monotonic() - start < 30, "one wait is enough"
    keeper.let_go.set()


def test_the_thread_of_a_store_ends_with_it():
    before = set(threading.enumerate())
    asked = store.PatientStore(Stopped())
    thread, = set(threading.enumerate()) - before
    assert thread.is_alive() and asked.check(["here"])
    del asked
    thread.join(10)
    assert not thread.is_alive()


@pytest.mark.skipif(not here(), reason="no /proc")
def test_a_rank_that_is_gone_is_blamed_before_one_that_waited_for_it():
    """Of three ranks one is killed, another waits for it with a new variant and fails, the third waits in a collective."""
    kept = store.PatientStore(torch.distributed.HashStore())
    waits, left = (heartbeat.Pulse(kept, "model", rank, range(3)) for rank in (0, 1))
    gone = subprocess.Popen([sys.executable, "-c", SAYS], stdout=subprocess.PIPE, text=True)
    try:
        kept.set("model/process/2", gone.stdout.readline().strip())
        with pytest.raises(AutoshardError), left.together("inputs (4, 8)"):
            raise AutoshardError("rank 2 does not answer")
        with pytest.raises(AutoshardError, match=r"rank 1 could not go on with call 1 \(inputs \(4, 8\)\)"):
            waits.blame(CollectiveError("closed"))
    finally:
        gone.kill()
        gone.wait()
    with pytest.raises(CollectiveError, match="^closed: the process of rank 2 has ended; see its output$"):
        waits.blame(CollectiveError("closed"))


def test_a_rank_that_waits_long_says_so_without_being_asked(monkeypatch, caplog):
    """Where `if rank == 0` is around a call that all must make: rank 0 waits in it, the others in their next call."""
    monkeypatch.setattr(agree, "NEWS", 0.05)
    monkeypatch.setattr(agree, "LONG", 0.1)
    monkeypatch.setattr(agree.dist, "get_rank", lambda: 1)
    keys = SimpleNamespace(check=lambda names: False)
    place = SimpleNamespace(pulse=SimpleNamespace(trouble=lambda rank, waited: ""))
    with caplog.at_level("WARNING", "autoshard"), pytest.raises(AutoshardError, match="waited 1 s for rank 0 to plan"):
        agree._wait(keys, "key", 1.0, "rank 0 to plan", place, 0)
    said = [r.getMessage() for r in caplog.records]
    assert 1 <= len(said) <= 5 and all("rank 1 has waited" in s and "outside of `if rank == 0`" in s for s in said)
