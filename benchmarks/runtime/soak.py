"""Train for long on a busy machine, and see whether every program ends well with the numbers of a quiet one.

    python -m benchmarks.runtime.soak                                    # a minute for each of three ways and 2, 4, 8 ranks, beside six busy processes
    python -m benchmarks.runtime.soak --seconds 1800                     # half an hour each
    python -m benchmarks.runtime.soak --ways plain --ranks 4 --seconds 120

Ways: "plain" does not call init_process_group, "shared" does, in "messages" nothing is carried by shared memory. Every round starts
from the same weights, so all its losses must equal those of a round on the machine before the busy processes start, bit by bit. A line for
each way and rank count; status 1 where a rank ended with another status than 0, gave other losses, or did nothing for --stall seconds
(its threads' stacks are printed then).
"""
from __future__ import annotations

import argparse
import faulthandler
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from unittest.mock import patch

from benchmarks import ROOT

WAYS = ("plain", "shared", "messages")
MESHES = {2: "tp=2", 4: "dp=2,tp=2", 8: "dp=2,tp=4"}
STEPS, LOOK = 20, 0.5
"""Steps of a round; seconds between looks at the ranks."""
COMPARED = 8
"""A step before whose call ranks compare their inputs: the ninth."""


# --- one rank ---

def train(way: str, ranks: int, seconds: float, folder: Path, timeout: float = 1800.0, cache: str = "", dies: int = -1) -> None:
    """Rounds until `seconds` are over, at least one; then the losses of the first one to losses{rank}, and how many rounds equal it.
    `timeout` of a collective, and for ranks that have not come yet; `cache`: folder of plans, if there is one; `dies`: the rank that ends itself before a call whose inputs are compared."""
    faulthandler.register(signal.SIGUSR1)
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    if way != "plain":
        dist.init_process_group("gloo", timeout=timedelta(seconds=timeout))
    Path(folder, f"compiles{os.environ['RANK']}").touch()
    programs = _programs(MESHES[ranks], way != "messages", cache or False, timeout)
    start = [[p.detach().to_local().clone() for p in model.parameters()] for model, _, _ in programs]
    end, stop, first, rounds = time.monotonic() + seconds, torch.zeros(1), None, 0
    while not stop.item():
        _reset(programs, start)
        losses = [_step(*programs[i % 10 == 9], dies=dies == dist.get_rank() and i == COMPARED) for i in range(STEPS)]
        first = first or losses
        if losses != first:
            raise AssertionError(f"round {rounds}: losses {losses}, of the first round {first}")
        rounds += 1
        Path(folder, f"rounds{dist.get_rank()}").write_text(str(rounds))
        stop[0] = float(time.monotonic() > end)
        dist.broadcast(stop, 0)
    Path(folder, f"losses{dist.get_rank()}").write_text(json.dumps([x.hex() for x in first]))
    dist.destroy_process_group()


def _programs(mesh: str, share: bool, cache: str | bool, timeout: float) -> list[tuple]:
    """(module, optimizer, batch): a small model, tensor and data parallel; and one whose gradients shared memory and messages leave to gloo
    where it is made of messages."""
    import torch
    from torch import nn

    import autoshard
    from models import gpt

    torch.manual_seed(0)
    small, batch = gpt.build("tiny", batch=8)
    wide, x = nn.Sequential(nn.Linear(1024, 1200), nn.ReLU(), nn.Linear(1200, 64)), torch.randn(8, 1024)
    axis = mesh.partition("=")[0]
    seeds = {"h.*.attn.c_attn.weight": "tp,-", "h.*.mlp.c_fc.weight": "tp,-"} | ({"input:*": "dp,..."} if "dp" in mesh else {})
    made = []
    with patch("autoshard.runtime.ranks.place.share_memory", return_value=None) if not share else _nothing():
        for model, inputs, loss, given in ((small, batch, gpt.loss, seeds),
                                           (wide, (x, torch.arange(8)), nn.functional.cross_entropy, {"input:*": f"{axis},...", "*.weight": "-,-"})):
            compiled = autoshard.compile(model, mesh, inputs, loss_fn=loss, cluster="cpu-gloo", cache=cache, seeds=given, join_timeout=timeout)
            made.append((compiled, torch.optim.SGD(compiled.parameters(), lr=1e-2), inputs))
    return made


@contextmanager
def _nothing() -> Iterator[None]:
    yield


def _reset(programs: list[tuple], start: list[list]) -> None:
    for (model, _, _), values in zip(programs, start, strict=True):
        for p, value in zip(model.parameters(), values, strict=True):
            p.detach().to_local().copy_(value)


def _step(model, optimizer, batch, dies: bool = False) -> float:
    if dies:
        os.kill(os.getpid(), signal.SIGKILL)
    loss = model(*batch)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


# --- all ranks of a program, watched ---

def watched(way: str, ranks: int, seconds: float, stall: float) -> tuple[int, list[list[str]]]:
    """(rounds, losses of the first round by rank). Raises RuntimeError with what went wrong."""
    with tempfile.TemporaryDirectory(prefix="soak-") as name:
        folder, port = Path(name), free_port()
        started = [start(way, ranks, seconds, folder, rank, port) for rank in range(ranks)]
        try:
            _watch(started, folder, stall)
        finally:
            for p in started:
                if p.poll() is None:
                    p.kill()
                p.wait()
        bad = [f"rank {r} ended with status {p.returncode}: {said(folder, r)}" for r, p in enumerate(started) if p.returncode]
        if bad:
            raise RuntimeError("\n".join(bad))
        return int(Path(folder, "rounds0").read_text()), [json.loads(Path(folder, f"losses{r}").read_text()) for r in range(ranks)]


def free_port() -> int:
    """Below the ports that Linux gives to outgoing connections, one of which would take it before it is used."""
    while True:
        try:
            with socket.create_server(("", random.randrange(20000, 32768))) as held:
                return held.getsockname()[1]
        except OSError:
            continue  # in use


def start(way: str, ranks: int, seconds: float, folder: Path, rank: int, port: int, given: tuple[str, ...] = (),
          under: tuple[str, ...] = ()) -> subprocess.Popen:
    """A rank's process. `given`: the further arguments of `train`; `under`: a command that runs it."""
    env = os.environ | {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks), "MASTER_ADDR": "localhost", "MASTER_PORT": str(port),
                        "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    with open(folder / f"said{rank}", "wb") as out:
        return subprocess.Popen([*under, sys.executable, "-m", __spec__.name, "--rank", way, str(ranks), str(seconds), str(folder), *given],
                                env=env, stdout=out, stderr=out)


def _watch(started: list[subprocess.Popen], folder: Path, stall: float) -> None:
    """Until all have ended, or one has failed and the others had time to notice. Raises RuntimeError where nothing moves."""
    moved, seen = time.monotonic(), None
    while any(p.poll() is None for p in started):
        now = [(p.poll(), text(folder / f"rounds{r}")) for r, p in enumerate(started)]
        if now != seen:
            moved, seen = time.monotonic(), now
        failed = any(p.poll() for p in started)
        if time.monotonic() - moved > (30 if failed else stall):
            if failed:
                return
            for p in started:
                if p.poll() is None:
                    p.send_signal(signal.SIGUSR1)
            time.sleep(3)
            raise RuntimeError(f"no rank has finished a round for {stall:.0f} s\n" +
                               "\n".join(f"rank {r}, {now[r][1] or 0} rounds: {said(folder, r, 3000)}" for r in range(len(started))))
        time.sleep(LOOK)


def said(folder: Path, rank: int, most: int = 600) -> str:
    return text(folder / f"said{rank}")[-most:].strip() or "it said nothing"


def text(file: Path) -> str:
    return file.read_text(errors="replace") if file.exists() else ""


@contextmanager
def busy(count: int) -> Iterator[None]:
    burners = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for p in burners:
            p.kill()
            p.wait()


def soak(way: str, ranks: int, seconds: float, count: int, stall: float) -> str:
    """What happened, for the line. Raises RuntimeError."""
    _, quiet = watched(way, ranks, 0.0, stall)
    with busy(count):
        rounds, losses = watched(way, ranks, seconds, stall)
    if losses != quiet or any(x != quiet[0] for x in quiet):
        raise RuntimeError(f"losses by rank {losses}, of a quiet run {quiet}")
    return f"{rounds * STEPS:,} steps, losses as in a quiet run, status 0"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS)
    parser.add_argument("--ranks", nargs="+", type=int, choices=tuple(MESHES), default=tuple(MESHES))
    parser.add_argument("--seconds", type=float, default=60.0, help="of each run, after compiling (default 60)")
    parser.add_argument("--busy", type=int, default=6, help="processes beside that only compute (default 6)")
    parser.add_argument("--stall", type=float, default=300.0, help="seconds without a finished round that count as a hang (default 300)")
    options = parser.parse_args()
    failed = 0
    for way in options.ways:
        for ranks in options.ranks:
            try:
                what = soak(way, ranks, options.seconds, options.busy, options.stall)
            except RuntimeError as e:
                what, failed = f"FAILED: {e}", 1
            print(f"{way:<9}{ranks} ranks, {options.seconds:.0f} s beside {options.busy} busy processes: {what}", flush=True)
    return failed


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        timeout, cache, dies = sys.argv[6:] or ("1800", "", "-1")
        train(sys.argv[2], int(sys.argv[3]), float(sys.argv[4]), Path(sys.argv[5]), float(timeout), cache, int(dies))
    else:
        sys.exit(main())
