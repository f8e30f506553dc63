"""A step by the clock: what each rank of a compiled model really did when, as tracks that stand beside the simulated ones in a trace."""
from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist

from autoshard.errors import UsageError
from autoshard.runtime.execute.watched import Doing, watched
from autoshard.runtime.module import CompiledModule
from autoshard.simulation.trace import COMPUTE, MICROSECONDS, Span, Track


@dataclass(frozen=True)
class Moment:
    """One call of the program, or something of the loop around it (`what` is its name then): seconds by the machine's clock."""

    what: Doing | str
    begin: float
    end: float


@dataclass(eq=False)
class Clock:
    """What this rank did while it was clocked, in order. `rank`: its number on the mesh."""

    rank: int
    ranks: int
    moments: list[Moment] = field(default_factory=list)

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Names a part of the loop that is not the model's: `with clock.span("update"): optimizer.step()`."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            self.moments.append(Moment(name, begin, time.perf_counter()))

    def around(self, what: Doing, run: Callable[..., Any]) -> Callable[..., Any]:
        """`run`, clocked."""
        put, now = self.moments.append, time.perf_counter

        def clocked_run(*args: Any, **kwargs: Any) -> Any:
            begin = now()
            out = run(*args, **kwargs)
            put(Moment(what, begin, now()))
            return out

        return clocked_run

    def tracks(self) -> tuple[Track, ...]:
        """Of all ranks, from the first thing that any of them did on. Every rank calls it, since it gathers what they did. The clocks of processes
        on one machine agree; those of several machines do not."""
        found: list[Any] = [(self.rank, self.moments)]
        if self.ranks > 1:
            found = [None] * dist.get_world_size()
            dist.all_gather_object(found, (self.rank, self.moments))
        first = min((m.begin for _, moments in found for m in moments), default=0.0)
        return tuple(Track(rank, f"rank {rank}, measured", tuple(_spans(moments, first)), measured=True)
                     for rank, moments in sorted(found, key=lambda pair: pair[0]))


@contextmanager
def clocked(model: CompiledModule) -> Iterator[Clock]:
    """Clocks every op and collective of a compiled model on this rank while the block runs:

        with autoshard.clocked(model) as clock:
            model(*batch).backward()
        autoshard.simulate(model.plan, ...).write_trace("t.json", clock.tracks())

    The variants that the model has are clocked; warm up before. Raises UsageError on a device that is not a CPU, whose kernels run later than their
    calls (use torch.profiler there), for a pipeline and for a model that has not run."""
    if model.place.device.type != "cpu":
        raise UsageError(f"kernels on {model.place.device.type} run later than they are called, and a clock of calls does not see them; "
                         "use torch.profiler")
    clock = Clock(model.place.ranks.index(dist.get_rank()) if model.place.mesh.size > 1 else 0, model.place.mesh.size)
    with model.run_by(watched(clock.around, {group: axis for axis, group in model.place.groups.items()})):
        yield clock


def _spans(moments: Sequence[Moment], first: float) -> Iterator[Span]:
    """Ops and copies on the compute stream, and waits as such; collectives on the stream of their axis, from their start ("ready"), or the end of the
    one before, to the end of their wait."""
    flying: dict[tuple[str, int], float] = {}
    free: dict[str, float] = {}
    for m in moments:
        begin, end, what = m.begin - first, m.end - first, m.what
        if isinstance(what, str):
            yield Span(COMPUTE, what, begin, end, "update")
            continue
        details = {"window": what.window}
        if what.call is None:
            yield Span(COMPUTE, what.name if what.kind == "op" else f"{what.kind} {what.name}", begin, end, what.kind, details)
            continue
        name, axis, key = f"{what.call.kind} {what.name}", what.call.axis, (what.window, what.started)
        details |= {"bytes": what.call.nbytes, "axis": axis}
        if what.kind == "call":
            flying[key] = begin
            yield Span(COMPUTE, f"start {name}", begin, end, "copy", details)
        else:
            yield Span(COMPUTE, f"wait for {name}", begin, end, "idle", details)
            called = flying.pop(key)
            yield Span(axis, name, max(called, free.get(axis, 0.0)), end, "communication", {**details, "ready": MICROSECONDS * called})
            free[axis] = end
