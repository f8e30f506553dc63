"""Op times of a compiled model taken on one process: a rank's own lowered program, run alone with its collectives left out, and the step that a
simulation makes of them."""
from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from autoshard.base.mesh import Mesh
from autoshard.collectives import RUN
from autoshard.collectives.phases import alone, phases
from autoshard.cost.cluster import Cluster
from autoshard.runtime.carriers.gloo_messages import Flight
from autoshard.runtime.execute.watched import Doing, watched
from autoshard.simulation.program import Call, Program, Stretch, Wait, Work
from autoshard.simulation.replay import replay

Times = list[float]
"""Seconds of each call of the program, in order; of collectives and waits 0. Last: all of the step that is in no call."""


class Alone:
    """A rank's step without the other ranks: the variants that `model` has by now, with every op clocked. `doings`: the calls of the latest step."""

    def __init__(self, model: Any, step: Callable[[], None]) -> None:
        self.model, self.step, self.doings = model, step, list[Doing]()
        self._seen: list[tuple[Doing, float]] = []
        with model.run_by(watched(self._around, {group: axis for axis, group in model.place.groups.items()})):
            self._steps = model._steps, model._current  # bound once: a step of freshly made code is slower

    def run(self) -> None:
        self._seen.clear()
        before, (self.model._steps, self.model._current) = (self.model._steps, self.model._current), self._steps
        try:
            self.step()
        finally:
            self.model._steps, self.model._current = before

    def times(self) -> Times:
        """Of one step, now."""
        start = time.perf_counter()
        self.run()
        whole = time.perf_counter() - start
        self.doings = [doing for doing, _ in self._seen]
        rest = whole - sum(seconds for _, seconds in self._seen)
        return [*(0.0 if doing.call else seconds for doing, seconds in self._seen), rest]

    def _around(self, doing: Doing, run: Callable[..., Any]) -> Callable[..., Any]:
        put, now, inside = self._seen.append, time.perf_counter, left_out(doing, run)

        def clocked(*args: Any, **kwargs: Any) -> Any:
            begin = now()
            out = inside(*args, **kwargs)
            put((doing, now() - begin))
            return out

        return clocked


def left_out(doing: Doing, run: Callable[..., Any]) -> Callable[..., Any]:
    """In the place of a collective something that gives a tensor of the same shape, made of this rank's own. It is not counted, but
    what reads it finds it as warm as what a collective has just written."""
    if doing.kind != "call":
        return run
    kind = RUN[doing.call.kind]

    def own(x: torch.Tensor, op: str, carrier: Any) -> Flight:
        n, rows = carrier.n, kind.runs.rows(carrier.n, carrier.n)  # of n, or of a scalar
        out = torch.cat([x] * n) if rows > n else x.chunk(n)[0].clone() if rows < n else x.clone()
        return Flight([], lambda: out, (x,))

    if kind.runs.sized:
        raise SystemExit(f"{doing.name}: how many rows a rank gets is up to the others; take a model without such an exchange")
    return own


def program_of_calls(doings: Sequence[Doing], mesh: Mesh, cluster: Cluster) -> tuple[Program, dict[int, list[int]]]:
    """The program of a step as it is lowered, collectives priced by the profile, and per stretch the calls it consists of. Its works have no seconds."""
    events: list[Any] = []
    members: dict[int, list[int]] = {}
    started: dict[tuple[str, int], int] = {}
    pending: list[int] = []

    def flush() -> None:
        if pending:
            members[len(events)] = list(pending)
            events.append(Stretch(tuple(Work(doings[i].kind, doings[i].name, 0.0, doings[i].window) for i in pending if i < len(doings)), 0.0))
            pending.clear()

    overlaps = cluster.overlap.eta > 0
    for i, doing in enumerate(doings):
        if doing.call is None:
            pending.append(i)
            continue
        flush()
        key = (doing.window, doing.started)
        if doing.kind == "call":
            started[key] = len(events)
            events.append(call_event(doing, mesh, cluster, overlaps))
        if doing.kind == ("wait" if overlaps else "call"):  # a collective that nothing hides is waited for at once
            events.append(Wait(started[key]))
    pending.append(len(doings))
    flush()
    return Program(tuple(events), mesh, cluster.overlap.interference if overlaps else 0.0), members


def call_event(doing: Doing, mesh: Mesh, cluster: Cluster, overlaps: bool) -> Call:
    call = doing.call
    groups = phases(call.kind, call.nbytes, cluster.link_of(mesh, mesh.axes(call.axis)))
    return Call(call.kind, call.axis, mesh.axes(call.axis), call.nbytes, alone(groups), groups, call.axis if overlaps else "compute", doing.window,
                doing.name)


def simulated_rounds(doings: Sequence[Doing], rounds: Sequence[Sequence[Times]], mesh: Mesh, cluster: Cluster,
                     factors: Sequence[float] | None = None) -> Iterator[float]:
    """Seconds of a step, for each round that op times were taken in. `rounds[i][r]`: times of rank r; `factors`: by which those of each call, and of
    the rest, are multiplied."""
    program, members = program_of_calls(doings, mesh, cluster)
    for ranks in rounds:
        table = np.array(ranks) * (1.0 if factors is None else np.array(factors))  # ranks x calls
        own = {at: table[:, calls].sum(axis=1).reshape(mesh.sizes) for at, calls in members.items()}
        yield replay(program, cluster, own=own).step_s
