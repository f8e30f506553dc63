"""Runs things and times them: rounds over all cases, so that a slow minute of the machine touches all alike.

All ranks do the same at the same time, as they do in a training step: they share memory bandwidth and caches. A round times each case once. The
time of an op is the mean over rounds of the slowest rank: a step adds up all its ops, the slow ones too, and the lower quartile of each was 2 %
less than they took together. On a CPU each collective comes after some compute, as in a step; back to back, a call finds its peer awake and
waiting. Its time is a median, after one run that aligns the ranks, as they leave a barrier at different times. An op runs once in a round there,
and finds in the caches what the op before it in a step would leave, its activation or gradient, and its code: an op of its kind ran not long ago.
Weights and saved activations were evicted by the other cases, as they are by the rest of a step. Back to back, the backward of a ReLU takes a fifth
of what it takes in a step; without its code, convolutions of small images took up to 1.4 times, and adding two small tensors three times as long.
"""
from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from autoshard import _torch
from autoshard.calibrate.cases import Pool, cases, prepare
from autoshard.calibrate.sample import Sample
from autoshard.collectives import RUN, wire_bytes
from autoshard.runtime.carriers import gloo_messages
from autoshard.runtime.carriers.choose import start
from autoshard.runtime.carriers.shared_memory import Shared
from autoshard.runtime.ranks.place import Place

SIZES = tuple(2**k for k in (10, 12, 14, 16, 18, 20, 21, 22, 23, 24, 25))
HELD_SIZES = (2**11, 2**15, 3 * 2**16, 3 * 2**19, 3 * 2**21, 3 * 2**22)
OPTIMIZER_SIZES, HELD_OPTIMIZER_SIZES = (2**8, 2**12, 2**16, 2**18, 2**20, 2**21), (2**14, 2**17, 3 * 2**18)
TENSORS = 8
"""Parameters whose update is timed together."""
REPEAT_BELOW = 2e-3
"""Cases shorter than this are repeated to last so long; a clock tick and a barrier's skew are microseconds."""
MIN_ROUNDS, MAX_ROUNDS = 3, 50
VIEWS = 4
"""In a row, as around attention."""
BEFORE, BEFORE_MESSAGES = 256, 512
"""Before a collective on a CPU: a product of two matrices of this width, half a millisecond of work; milliseconds before one that messages carry, as
in a step: the threads that send and receive sleep meanwhile, and wake the later the longer they slept. A rank that looks at memory does not sleep."""
TRIM = 0.1
"""Share of the rounds left out of a mean at either end: one long pause of the machine is not the cost of what it fell on."""

Progress = Callable[[str, str], None]


@dataclass(frozen=True)
class Work:
    """A sample without its time, and what to run for it: `together` on all ranks, after a barrier; `parts` of it at once. `fresh`: tensors that
    the caches hold before, since whatever ran last has written them. `twin`: the same op with other tensors, after which they hold its code.
    `before`: width of the product that is computed before, of a collective."""

    sample: Sample
    run: Callable[[], Any]
    together: bool
    parts: int = 1
    fresh: tuple[torch.Tensor, ...] = ()
    twin: Callable[[], Any] | None = None
    before: int = BEFORE


class Stopwatch:
    """Times work on this device by `clock`; `slowest` makes all ranks see the same."""

    def __init__(self, place: Place, clock: Callable[[], float] = time.perf_counter) -> None:
        self.place, self.cuda, self.clock = place, place.device.type == "cuda", clock
        self.group = dist.group.WORLD if place.device_mesh is not None else None

    def barrier(self) -> None:
        if self.group is not None:
            dist.barrier()

    def aligned(self, run: Callable[[], Any]) -> None:
        """All ranks run it once before any clock starts, so that they begin together: they leave a barrier of messages up to a millisecond apart,
        a hundred times what a small collective over shared memory takes."""
        self.barrier()
        run()

    def once(self, run: Callable[[], Any], repeat: int) -> float:
        """Seconds of one run out of `repeat` in a row."""
        self._finish()
        start = self.clock()
        for _ in range(repeat):
            run()
        self._finish()
        return (self.clock() - start) / repeat

    def between(self, run: Callable[[], Any], repeat: int, width: int = BEFORE) -> float:
        """Median seconds of a run, each after some compute that is not timed: a product of matrices of this width. Not their mean: a pause of the
        machine that falls on that product of one rank, which is most of the time, would be the other rank's wait in the collective."""
        if self.cuda:  # a stream of kernels does not sleep between them
            return self.once(run, repeat)
        taken, x = [], torch.ones(width, width)
        for _ in range(repeat):
            torch.mm(x, x)
            taken.append(self.once(run, 1))
        return median(taken)

    def after(self, work: Work, repeat: int) -> float:
        """Seconds of one run that finds what is `fresh` in the caches, and little else that it reads."""
        if self.cuda:  # a kernel alone would be timed with its launch and with waiting for it
            return self.once(work.run, repeat)
        if work.twin is not None and repeat > 1:  # of long ones the code is nothing
            work.twin()
        for x in work.fresh:
            x.mul_(1)
        return self.once(work.run, 1)

    def slowest(self, seconds: Sequence[float]) -> list[float]:
        """Per entry the time of the slowest rank."""
        if self.group is None:
            return list(seconds)
        out = torch.tensor(list(seconds), dtype=torch.float64, device=self.place.device)
        dist.all_reduce(out, dist.ReduceOp.MAX)
        return out.tolist()

    def _finish(self) -> None:
        if self.cuda:
            torch.cuda.synchronize(self.place.device)


def all_work(place: Place, link_of: Sequence[int], dtypes: Sequence[torch.dtype]) -> list[Work]:
    """Everything that a profile is made of, but steps and overlap. `link_of[i]`: the profile's link that mesh axis i uses."""
    return [*collective_work(place, link_of), *op_work(place, dtypes), *view_work(place), *optimizer_work(place)]


class Rounds:
    """Rounds of some work, which may be taken between other things. All ranks do the same. `table[i][j]`: seconds of work j in round i, of
    the slowest rank."""

    def __init__(self, work: Sequence[Work], watch: Stopwatch) -> None:
        self.work, self.watch = list(work), watch
        self.repeats = _warm_up(self.work, watch)
        self.table: list[list[float]] = []

    def go(self) -> None:
        """One more round."""
        self.table.append(self.watch.slowest(timed(self.work, self.repeats, self.watch)))

    def samples(self) -> list[Sample]:
        """By the rounds so far."""
        table = np.array(self.table)
        low, high = np.percentile(table, (25, 75), axis=0)
        middle = np.where([w.together for w in self.work], np.median(table, axis=0), trimmed_mean(table))  # of collectives as in Stopwatch.between
        return [replace(w.sample, seconds=float(m), spread=float((h - q) / q)) for w, q, h, m in zip(self.work, low, high, middle, strict=True)]

    def run(self, seconds: float, progress: Progress) -> None:
        """One round to see how long a round takes, then as many as fit into `seconds`, and no fewer than MIN_ROUNDS."""
        start, wanted, done = time.perf_counter(), MIN_ROUNDS, 0
        while done < wanted:
            progress("calibrate", f"round {done + 1} of {wanted}, {time.perf_counter() - start:.0f} s")
            self.go()
            done += 1
            if done == 1:
                one = self.watch.slowest([time.perf_counter() - start])[0]
                wanted = min(max(int(seconds / one), MIN_ROUNDS), MAX_ROUNDS)


def time_rounds(work: Sequence[Work], watch: Stopwatch, seconds: float, progress: Progress) -> list[Sample]:
    """Time some work in about `seconds`."""
    rounds = Rounds(work, watch)
    rounds.run(seconds, progress)
    return rounds.samples()


def trimmed_mean(table: np.ndarray) -> np.ndarray:
    """Over the rounds [rounds, cases], without the TRIM largest and smallest."""
    cut = int(TRIM * len(table))
    return np.sort(table, axis=0)[cut:len(table) - cut].mean(axis=0)


def _warm_up(work: list[Work], watch: Stopwatch) -> list[int]:
    """How often each case is repeated in a round; equal on all ranks."""
    watch.barrier()
    for w in work:
        w.run()
    took = watch.slowest(timed(work, [1] * len(work), watch))
    return [max(1, min(200, int(REPEAT_BELOW / (t * w.parts)))) for t, w in zip(took, work, strict=True)]


def timed(work: Sequence[Work], repeats: Sequence[int], watch: Stopwatch) -> list[float]:
    """Seconds of each on this rank, one after the other."""
    own = []
    for w, repeat in zip(work, repeats, strict=True):
        if w.together:
            watch.aligned(w.run)
        own.append((watch.between(w.run, repeat, w.before) if w.together else watch.after(w, repeat)) / w.parts)
    return own


def collective_work(place: Place, link_of: Sequence[int]) -> Iterator[Work]:
    """Every collective over every mesh axis of more than one rank, called as lowered programs call it."""
    sent, received = (torch.ones(max(SIZES) // 4, device=place.device) for _ in range(2))
    for axis, (name, n) in enumerate(zip(place.mesh.names, place.mesh.sizes, strict=True)):
        shared = n > 1 and isinstance(place.carriers().get(place.groups[name]), Shared)
        for size in (*SIZES, *HELD_SIZES) if n > 1 else ():
            numel = size // 4 // n * n
            for kind, run in _collectives(place, axis, name, n, sent[:numel], received[:numel]):
                nbytes = 4.0 * numel
                sample = Sample("collective", kind, wire_bytes(kind, nbytes, n), 0.0, size in HELD_SIZES, link=link_of[axis],
                                ranks=n, nbytes=nbytes)
                yield Work(sample, run, True, before=BEFORE if shared and kind in RUN else BEFORE_MESSAGES)


def _collectives(place: Place, axis: int, name: str, n: int, buffer: torch.Tensor, received: torch.Tensor) -> Iterator[tuple[str, Callable[[], Any]]]:
    x, part, numel = buffer, buffer[:len(buffer) // n], len(buffer)
    tag, wait = place.groups[name], _torch.WAIT
    carrier = place.carriers().get(tag)
    for kind, collective in RUN.items():
        if collective.runs.sized:  # priced as the kind that it is with even sizes
            continue
        local, arguments = part if collective.counted == "out" else x, collective.arguments(numel, n, "sum")
        if carrier is not None:  # in place, as programs run it where its input dies
            yield kind, partial(_carried, start(collective, carrier, in_place=True), local, collective.reduce_op(arguments), carrier)
        else:
            call = collective.in_place or collective.target
            yield kind, lambda call=call, args=(local, *arguments): wait(call(*args, tag))
    if place.device_mesh is None:
        return
    group, me = place.device_mesh.get_group(axis), place.coordinates[axis]
    members = dist.get_process_group_ranks(group)
    yield "broadcast", lambda: dist.broadcast(x, members[0], group=group)
    yield "send_recv", lambda: _shift(x, received, members[(me + 1) % n], members[(me - 1) % n], group)


def _carried(begin: Callable[..., Any], *args: Any) -> Any:
    return gloo_messages.land(begin(*args))


def _shift(x: torch.Tensor, received: torch.Tensor, to: int, source: int, group: Any) -> None:
    works = dist.batch_isend_irecv([dist.P2POp(dist.isend, x, to, group), dist.P2POp(dist.irecv, received, source, group)])
    for work in works:
        work.wait()


def op_work(place: Place, dtypes: Sequence[torch.dtype]) -> Iterator[Work]:
    """The catalogue in the first dtype; in the others the cases that show their rate."""
    for dtype in dtypes:
        pool = Pool(dtype, place.device)
        for case in cases(place.device):
            if dtype != dtypes[0] and not case.low_precision:
                continue
            for size in (*case.sizes, *case.held):
                p = prepare(case, size, pool, size in case.held)
                yield Work(Sample("op", p.key, p.amount, 0.0, p.held_out, p.family, p.dtype, moved=p.moved), p.run, False, fresh=p.fresh, twin=p.twin)


def view_work(place: Place) -> Iterator[Work]:
    """Views, where the device that computes also issues them: some in a row, of which the first finds its code out of the caches."""
    if place.device.type == "cpu":
        x, view = torch.ones(BEFORE, BEFORE), torch.ops.aten.view.default
        sample = Sample("view", "aten::view", 1.0, 0.0, False, dtype="float32")
        yield Work(sample, lambda: [view(x, [BEFORE * BEFORE]) for _ in range(VIEWS)], False, VIEWS)


def optimizer_work(place: Place) -> Iterator[Work]:
    """AdamW as torch runs it by default, on each rank's own pieces (`autoshard.local_update`). A step updates TENSORS of them,
    and a sample is one: what the step costs by itself is spread over them, as in a model."""
    from autoshard.cost.optimizers import OPTIMIZERS

    for numel in (*OPTIMIZER_SIZES, *HELD_OPTIMIZER_SIZES):
        params = [_parameter(place, numel) for _ in range(TENSORS)]
        step = torch.optim.AdamW(params).step
        amount = 4.0 * numel * OPTIMIZERS["adamw"].moved
        sample = Sample("optimizer", "adamw", amount, 0.0, numel in HELD_OPTIMIZER_SIZES, dtype="float32", moved=amount)
        yield Work(sample, step, False, len(params))


def _parameter(place: Place, numel: int) -> torch.nn.Parameter:
    out = torch.nn.Parameter(torch.randn(numel, device=place.device))
    out.grad = torch.randn(numel, device=place.device)
    return out
