"""Timing by interleaved rounds, and what may be said from them."""
from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist

CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}


def interleaved(steps: Mapping[str, Callable[[], None]], rounds: int, *, solo: frozenset[str] = frozenset(),
                repeat: int = 1, clock: Callable[[], float] = time.perf_counter) -> dict[str, list[float]]:
    """Seconds per step of each, `rounds` times, the slowest rank's. Rounds go through all of them in turn, starting
    with another one each time, because a machine's mood lasts longer than a round. Those in `solo` run on rank 0 alone."""
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    names = list(steps)
    for i in range(rounds):
        for name in names[i % len(names):] + names[:i % len(names)]:
            seconds[name].append(_slowest(_timed(steps[name], repeat, clock, runs=name not in solo or _rank() == 0)))
    return seconds


def _timed(step: Callable[[], None], repeat: int, clock: Callable[[], float], runs: bool) -> float:
    _barrier()
    start = clock()
    for _ in range(repeat if runs else 0):
        step()
    _finish()
    return (clock() - start) / repeat


def _slowest(seconds: float) -> float:
    if not dist.is_initialized():
        return seconds
    t = torch.tensor(seconds, dtype=torch.float64, device=_device())
    dist.all_reduce(t, dist.ReduceOp.MAX)
    return t.item()


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _barrier() -> None:
    _finish()
    if dist.is_initialized():
        dist.barrier()


def _finish() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def spread(values: Sequence[float]) -> tuple[float, float, float]:
    """Median, 25th and 75th percentile."""
    low, middle, high = statistics.quantiles(values, n=4)
    return middle, low, high


def ratio(above: Sequence[float], below: Sequence[float], *, samples: int = 4000, seed: int = 0) -> tuple[float, float, float]:
    """Median of the rounds' ratios and its 95 % interval, by the percentile bootstrap over rounds (Efron 1979)."""
    pairs = [a / b for a, b in zip(above, below, strict=True)]
    draw = random.Random(seed)
    medians = sorted(statistics.median(draw.choices(pairs, k=len(pairs))) for _ in range(samples))
    return statistics.median(pairs), medians[int(0.025 * samples)], medians[int(0.975 * samples) - 1]
