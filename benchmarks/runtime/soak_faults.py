"""Train on two ranks while something goes wrong with one of them, and see that training goes on with equal losses, or that the other rank
ends soon with an error that names it.

    python -m benchmarks.runtime.soak_faults                                      # every fault once, by shared memory and by messages: minutes
    python -m benchmarks.runtime.soak_faults --minutes 30 --log soak-faults.log   # again and again; a line for each run
    python -m benchmarks.runtime.soak_faults --faults killed stopped --ways shared

Goes on: "paused" (stopped for seconds, several times), "slowed" (three quarters of the time), "no memory" (a rank gets no file to share, messages take
over), "full shm" (/dev/shm, which nothing here needs), "full disk" (of the plans' cache). Ends: "killed" while it trains, "killed in compile",
"killed before compare" (a call whose inputs the ranks compare), "stopped" for ever. The full ones mount a file system and need root. Status 1 where a run
gave other losses, a rank ended otherwise than it should, or something waited longer than it may.
"""
from __future__ import annotations

import argparse
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from benchmarks.runtime.soak import LOOK, free_port, said, start, watched

RANKS, WAYS = 2, ("shared", "messages")
TIMEOUT, COMPILING = 20, 300.0
"""Seconds: of a collective where a rank stops for ever, and to wait for one that has not begun to compile; until the first round is over, on a machine that does other things."""
FULL = 'mount -t tmpfs -o size=16k soak "$0" && cat /dev/zero > "$0/full" 2>/dev/null; exec "$@"'
"""A shell's command that fills a folder of its own and goes on as another."""


@dataclass(frozen=True)
class Fault:
    """`inflict` on a process, once it trains, or as soon as it compiles (`early`). `most`: seconds that the other rank may take to
    end with an error; 0 where training goes on. `warns`: what some rank then has to say. `under`: what runs the rank, "{folder}" the full one."""

    inflict: Callable[[subprocess.Popen, random.Random], None] = lambda process, rng: None
    most: float = 0.0
    early: bool = False
    warns: str = ""
    under: tuple[str, ...] = ()
    full: str = ""
    dies: bool = False


def pause(process: subprocess.Popen, rng: random.Random) -> None:
    for _ in range(3):
        process.send_signal(signal.SIGSTOP)
        time.sleep(rng.uniform(1.0, 4.0))
        process.send_signal(signal.SIGCONT)
        time.sleep(rng.uniform(0.0, 1.0))


def slow(process: subprocess.Popen, rng: random.Random) -> None:
    end = time.monotonic() + 10.0
    while time.monotonic() < end:
        process.send_signal(signal.SIGSTOP)
        time.sleep(0.03)
        process.send_signal(signal.SIGCONT)
        time.sleep(0.01)


def kill(process: subprocess.Popen, rng: random.Random) -> None:
    time.sleep(rng.uniform(0.0, 3.0))
    process.kill()


def stop(process: subprocess.Popen, rng: random.Random) -> None:
    time.sleep(rng.uniform(0.0, 1.0))
    process.send_signal(signal.SIGSTOP)


FAULTS = {
    "paused": Fault(pause),
    "slowed": Fault(slow),
    "killed": Fault(kill, most=30.0),
    "killed in compile": Fault(kill, most=TIMEOUT + 120.0, early=True),  # the other compiles on until it needs this one
    "killed before compare": Fault(most=30.0, dies=True),
    "stopped": Fault(stop, most=TIMEOUT + 90.0),  # 60 of them for a store that does not answer
    "no memory": Fault(warns="gloo's messages", under=("prlimit", "--fsize=1048576")),
    "full shm": Fault(full="/dev/shm"),
    "full disk": Fault(warns="plan not cached", full="cache"),
}


def run(way: str, name: str, rng: random.Random, usual: list[str]) -> str:
    """What happened, for the line. Raises RuntimeError."""
    fault, victim = FAULTS[name], rng.randrange(RANKS)
    with tempfile.TemporaryDirectory(prefix="soak-") as made:
        folder, port = Path(made), free_port()
        (folder / "cache").mkdir()
        ranks = [_started(way, fault, folder, rank, port, victim) for rank in range(RANKS)]
        try:
            begin = _inflicted(fault, ranks, folder, victim, rng)
            return _ended(fault, ranks, folder, victim, begin) if fault.most else _went_on(fault, way, ranks, folder, usual)
        finally:
            for p in ranks:
                p.kill()
                p.wait()


def _started(way: str, fault: Fault, folder: Path, rank: int, port: int, victim: int) -> subprocess.Popen:
    full = str(folder / "cache") if fault.full == "cache" else fault.full
    under = ("unshare", "-m", "sh", "-c", FULL, full) if full else fault.under if rank == victim else ()
    given = (str(TIMEOUT if fault.inflict is stop or fault.early else 1800), str(folder / "cache") if fault.full == "cache" else "", str(victim if fault.dies else -1))
    return start(way, RANKS, 3600.0 if fault.most else 10.0, folder, rank, port, given, under)


def _inflicted(fault: Fault, ranks: list[subprocess.Popen], folder: Path, victim: int, rng: random.Random) -> float:
    """When it was done."""
    sign, end = "compiles" if fault.early or fault.dies else "rounds", time.monotonic() + COMPILING
    while not all((folder / f"{sign}{r}").exists() for r in range(RANKS)) and all(p.poll() is None for p in ranks):
        if time.monotonic() > end:
            raise RuntimeError(f"no {sign} after {COMPILING:.0f} s")
        time.sleep(LOOK / 10)
    fault.inflict(ranks[victim], rng)
    if fault.dies:
        _wait(ranks[victim], COMPILING, folder, victim)
    return time.monotonic()


def _ended(fault: Fault, ranks: list[subprocess.Popen], folder: Path, victim: int, begin: float) -> str:
    for rank, p in enumerate(ranks):
        if rank != victim:
            _wait(p, fault.most, folder, rank)
            error = re.findall(r"autoshard\.errors\.(\w+: .*)", said(folder, rank, 10_000))
            if p.returncode != 1 or not error or f"rank {victim}" not in error[-1]:
                raise RuntimeError(f"rank {rank} ended with status {p.returncode} and does not name rank {victim}:\n{said(folder, rank, 3000)}")
    return f"the other rank ended after {time.monotonic() - begin:.1f} s: {error[-1]}"


def _went_on(fault: Fault, way: str, ranks: list[subprocess.Popen], folder: Path, usual: list[str]) -> str:
    for rank, p in enumerate(ranks):
        _wait(p, COMPILING, folder, rank)
        if p.returncode or json.loads((folder / f"losses{rank}").read_text()) != usual:
            raise RuntimeError(f"rank {rank} ended with status {p.returncode} or other losses than usual: {said(folder, rank, 3000)}")
    if (fault.under and way == "shared" or fault.full == "cache") and not any(fault.warns in said(folder, r, 10_000) for r in range(RANKS)):
        raise RuntimeError(f"no rank says {fault.warns!r}: {said(folder, 0, 3000)}")
    return f"{int((folder / 'rounds0').read_text())} rounds, losses as usual, status 0"


def _wait(process: subprocess.Popen, seconds: float, folder: Path, rank: int) -> None:
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGUSR1)
        time.sleep(2)
        raise RuntimeError(f"rank {rank} still waits after {seconds:.0f} s: {said(folder, rank, 3000)}") from None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS)
    parser.add_argument("--faults", nargs="+", choices=tuple(FAULTS), default=tuple(FAULTS))
    parser.add_argument("--minutes", type=float, default=0.0, help="go on until they are over; every fault runs once at least")
    parser.add_argument("--seed", type=int, default=0, help="decides which rank and when")
    parser.add_argument("--log", type=Path, help="append every line to this file too")
    options = parser.parse_args()
    end, rng, failed, turn = time.monotonic() + 60 * options.minutes, random.Random(options.seed), 0, 0
    usual = {way: watched(way, RANKS, 0.0, COMPILING)[1][0] for way in options.ways}
    while not turn or time.monotonic() < end:
        for name in options.faults:
            for way in options.ways:
                if turn and time.monotonic() > end:
                    break
                failed += _line(way, name, rng, usual[way], options.log)
        turn += 1
    return int(failed > 0)


def _line(way: str, name: str, rng: random.Random, usual: list[str], log: Path | None) -> bool:
    begin, failed = time.monotonic(), False
    try:
        what = run(way, name, rng, usual) if not FAULTS[name].full or os.geteuid() == 0 else "not run: only root can mount"
    except RuntimeError as e:
        what, failed = f"FAILED: {e}", True
    line = f"{way:<9}{name:<22}{time.monotonic() - begin:4.0f} s  {what}"
    print(line, flush=True)
    if log is not None:
        with log.open("a") as out:
            out.write(line + "\n")
    return failed


if __name__ == "__main__":
    sys.exit(main())
