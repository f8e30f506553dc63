"""What a rank of a pipeline does in a step, by the clock: its windows as they run in the schedule, and alone."""
from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import mean, median
from typing import Any

import torch
import torch.distributed as dist

from autoshard.base.spec import local_tensor_shape
from autoshard.base.turns import Turn
from autoshard.base.windows import ONCE
from autoshard.pipeline.action_lists.play import Playback
from autoshard.pipeline.playback import played, transfers_of
from autoshard.runtime.pipeline.runner import RAN, Runner
from autoshard.runtime.pipeline.step import PipelineStep
from autoshard.runtime.pipeline.wires import Message

Event = tuple[Turn, float, float, float]
Durations = Mapping[tuple[int, str], float]
"""Seconds by (stage, window)."""


def gathered(mine: Any) -> list[Any]:
    """Of all ranks."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, mine)
    return found


@dataclass(eq=False)
class Clock:
    """The windows of this rank in steps that are run `around` it. Clocks of processes on one machine agree."""

    steps: list[list[Event]] = field(default_factory=list)

    def around(self, step: Callable[[], None]) -> Callable[[], None]:
        def run() -> None:
            seen: list[Event] = []
            token = RAN.set(lambda *event: seen.append(event))
            try:
                step()
            finally:
                RAN.reset(token)
            self.steps.append(seen)

        return run

    def durations(self) -> Durations:
        """Medians over micro-batches and steps."""
        found = defaultdict(list)
        for turn, _, there, done in (event for step in self.steps for event in step):
            found[turn.stage, turn.window].append(done - there)
        return {key: median(values) for key, values in found.items()}

    def busy(self) -> list[float]:
        return [sum(done - there for _, _, there, done in step) for step in self.steps]

    def idle(self) -> float:
        """Mean over ranks, median over steps; called by all ranks."""
        of = gathered([(step[0][1], step[-1][3], busy) for step, busy in zip(self.steps, self.busy(), strict=True)])
        return median(mean(1.0 - busy / (max(e for _, e, _ in ranks) - min(b for b, _, _ in ranks)) for _, _, busy in ranks) for ranks in zip(*of))


@dataclass(eq=False)
class Nowhere:
    """Wires of a rank whose neighbours are not there: what it receives is there at once, and it sends nothing."""

    me: int
    device: torch.device
    buffers: dict[str, torch.Tensor] = field(default_factory=dict)

    def send(self, message: Message, value: torch.Tensor) -> None:
        value.contiguous()

    def post(self, message: Message, shape: Iterable[int], dtype: torch.dtype) -> None:
        if message.value not in self.buffers:
            self.buffers[message.value] = torch.randn(tuple(shape)).to(dtype)

    def take(self, message: Message) -> torch.Tensor:
        return self.buffers[message.value].clone()

    def flush(self) -> None:
        """Nothing is under way."""


class Alone:
    """The turns of this rank without the other ranks."""

    def __init__(self, compiled: Any, batch: Sequence[torch.Tensor]) -> None:
        self.real: PipelineStep = compiled._current
        runner, real = self.real.runner, self.real
        wires: Any = Nowhere(runner.wires.me, runner.wires.device)
        here = PipelineStep(real.made, real.calling, real.plan, Runner(runner.programs, runner.table, runner.turns, wires, runner.stored), real.place,
                            real.stored)
        self.clock, self.totals = Clock(), list[float]()

        def step() -> None:
            compiled.zero_grad()
            here.run(tuple(batch), [None] * len(batch), 1, compiled)[0].backward()

        self._step = self.clock.around(step)

    def step(self) -> None:
        start = time.perf_counter()
        self._step()
        self.totals.append(time.perf_counter() - start)

    def clear(self) -> None:
        """Forget what was run to warm up."""
        self.totals.clear(), self.clock.steps.clear()

    def rest(self) -> float:
        """Seconds of a step outside of its windows."""
        return median(total - busy for total, busy in zip(self.totals, self.clock.busy(), strict=True))


@contextmanager
def asleep(alone: Alone, step: Callable[[], None]) -> Iterator[None]:
    """Inside, windows sleep for as long as they ran alone, and give what they gave in a real step. So a busy machine does not disturb them, and what a
    step takes longer than played is the runner's own: its turns, waits and wires."""
    durations = dict(alone.clock.durations())
    programs = alone.real.runner.programs
    reals = {s: p.windows.run for s, p in programs.items()}
    given: dict[tuple[int, str], Any] = {}

    def keep(s: int, name: str, micro: Any) -> Any:
        given[s, name] = reals[s](name, micro)
        return dict(given[s, name])

    def sleep(s: int, name: str, micro: Any) -> Any:
        if name in ONCE:
            return reals[s](name, micro)
        time.sleep(durations[s, name])
        return dict(given[s, name])

    try:
        for run in (keep, sleep):
            for s, program in programs.items():
                program.windows.run = partial(run, s)  # type: ignore[method-assign]
            if run is keep:
                step()
        yield
    finally:
        for program in programs.values():
            del program.windows.run  # type: ignore[attr-defined]


@dataclass(frozen=True)
class Played:
    """`step`: with `rest`, what is not in the schedule, of the rank that has most of it; `idle`: mean over ranks."""

    playback: Playback
    rest: float

    @property
    def step(self) -> float:
        return self.playback.makespan + self.rest

    @property
    def idle(self) -> float:
        return float((self.playback.idle / self.playback.makespan).mean())


def played_with(clocks: Sequence[Clock], alone: Alone, repeat: int) -> list[Played]:
    """The plan's schedule with the durations of each of `clocks`; wires and the rest by themselves. Called by all ranks."""
    plan, made = alone.real.plan, alone.real.made
    transfers = [{**t, "seconds": wire_seconds(alone.real, t["nbytes"], repeat)} for t in transfers_of(plan)]
    tied = sum(wire_seconds(alone.real, _bytes(alone.real, name), repeat) for name, _ in made.cut.tied)
    rest, out = max(gathered(alone.rest())) + tied, []
    for clock in clocks:
        durations = {key: s for found in gathered(clock.durations()) for key, s in found.items()}
        stages = [replace(s, windows={w: durations.get((s.index, w), 0.0) for w in s.windows}) for s in plan.stages]
        out.append(Played(played(made.table, stages, transfers), rest))
    return out


def _bytes(step: PipelineStep, name: str) -> int:
    meta = next(op.outputs[0] for op in step.graph.of_kind("param") if op.target == name)
    assert meta is not None, "a parameter is one tensor"
    shape = local_tensor_shape(meta, step.plan.placements[name], step.place.mesh)
    return int(torch.Size(shape).numel()) * meta.dtype.itemsize


def wire_seconds(step: PipelineStep, nbytes: int, repeat: int) -> float:
    """Half a round trip of so many bytes between ranks 0 and 1; called by both. Others take no part."""
    wires, there = step.runner.wires, "there"
    me, value, found = wires.me, torch.zeros(max(1, nbytes // 4)), []
    for i in range(repeat + 1):
        dist.barrier()
        start = time.perf_counter()
        out, back = Message(there, i, 0, 1, "forward"), Message("back", i, 1, 0, "backward")
        wires.post(back if me == 0 else out, value.shape, value.dtype)
        if me == 0:
            wires.send(out, value)
            wires.take(back)
        else:
            wires.take(out)
            wires.send(back, value)
        wires.flush()
        found.append((time.perf_counter() - start) / 2)
    return gathered(median(found[1:]))[0]
