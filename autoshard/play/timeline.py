"""The memory of a plan over one step: live bytes by category, the peak, and what is alive there.

    parameters, buffers, optimizer   all the time; optimizer state on the host is not counted, but for its update
    gradients                        from when they are final to the end of the step: `zero_grad()` lets go of them
    inputs, outputs                  as long as the user holds them: the whole step
    saved                            from forward until backward has read them
    temporaries                      from the op that makes them to the last that reads them
"""
from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise

import numpy as np

from autoshard.base.graph import FORWARD, Graph, Op
from autoshard.base.plan import CATEGORIES, Alive, Moment, Plan, Window
from autoshard.base.spec import format_spec
from autoshard.base.turns import Duty
from autoshard.base.windows import END, ONCE, START
from autoshard.cost.budget import Budget
from autoshard.cost.memory import host_workspace, scalar_bytes, stored_parts, update_workspace
from autoshard.lower.schedule import Instruction, Route, Schedule, schedule
from autoshard.play.footprint import Footprints
from autoshard.play.in_flight import Keeping, beside
from autoshard.play.play import Buffer, Playback, play

MOST_MOMENTS = 400
MOST_TENSORS = 12


@dataclass(frozen=True, eq=False)
class Timeline:
    """`live[t, c]`: bytes of category c at time t (see play/play.py), including what `constant` says is there always. `order`: what
    was played; `update`: what the optimizer needs for a moment; `host`: bytes of its state in the host's memory. In a pipeline `duty` says what
    else the rank does: a window is then shown as its fullest run is. `others`: of other stages on the rank, by stage."""

    graph: Graph
    order: Schedule
    playback: Playback
    constant: Mapping[str, int]
    update: int
    host: int = 0
    duty: Duty | None = None
    others: Mapping[int, Timeline] = field(default_factory=dict)

    @cached_property
    def live(self) -> np.ndarray:
        """Of the rank."""
        live = self.alone.copy()
        if self.duty is None:
            return live
        held = beside(self.duty.turns, {self.duty.stage: self.keeping, **{s: t.keeping for s, t in self.others.items()}})
        windows = np.array([window for window, _ in self.playback.times] + ["update"] * (len(live) - len(self.playback.times)))
        for window in dict.fromkeys(windows.tolist()):
            live[windows == window] += held.get((self.duty.stage, window), np.zeros(len(CATEGORIES))).astype(np.int64)
        live[:, CATEGORIES.index("inputs")] += self.duty.inputs
        for other in self.others.values():
            live += np.where((windows == "update")[:, None], other.at_the_end, other.standing)
        if self.graph.training:
            live[-1, CATEGORIES.index("temporaries")] += max(0, self.duty.shared - self.update)
        return live

    @property
    def standing(self) -> np.ndarray:
        """Bytes of the stage that are there whatever micro-batch runs, but for inputs, which are not the stage's own."""
        start = self._begin(FORWARD)
        there = [b for b in self.playback.buffers if not b.micro and b.born <= start < b.died]
        return self._without_inputs(_by_category(there) + self._constant)

    @property
    def at_the_end(self) -> np.ndarray:
        """Bytes of the stage when the optimizer updates, without what that needs."""
        last = len(self.playback.times)
        return self._without_inputs(_by_category([b for b in self.playback.buffers if b.born <= last < b.died]) + self._constant)

    def _without_inputs(self, amounts: np.ndarray) -> np.ndarray:
        amounts[CATEGORIES.index("inputs")] = 0
        return amounts

    @property
    def _constant(self) -> np.ndarray:
        return np.array([self.constant.get(c, 0) for c in CATEGORIES], dtype=np.int64)

    @cached_property
    def keeping(self) -> Keeping:
        """What one micro-batch of the stage keeps between its windows, and sends and receives."""
        names = [w.name for w in self.order.windows if w.name not in ONCE]
        after = {w.name: self._begin(later.name) for w, later in pairwise(self.order.windows)}
        ends = {name: after.get(name, len(self.playback.times)) for name in names}

        def is_kept(b: Buffer, name: str) -> bool:
            return b.born < ends[name] < b.died

        behind = {name: _by_category([b for b in self.playback.buffers if b.micro and is_kept(b, name)]) for name in names}
        for op in self.graph.of_kind("tangent"):
            if not op.is_port:  # it is there as soon as forward has made the loss
                for name in names[:names.index(op.phase)]:
                    behind[name][CATEGORIES.index("temporaries")] += op.outputs[0].nbytes
        leaving = {value: {name: 0 if b is not None and is_kept(b, name) else nbytes for name in names} | {"": nbytes}
                   for value, (nbytes, b) in self.playback.leaving.items()}
        arriving = self.playback.arriving
        holding = {value: frozenset(name for name in names if is_kept(b, name)) for value, b in arriving.items()}
        return Keeping(behind, {value: b.nbytes for value, b in arriving.items()}, leaving, holding)

    def _begin(self, window: Window) -> int:
        return next(t for t, (name, _) in enumerate(self.playback.times) if name == window)

    @cached_property
    def alone(self) -> np.ndarray:
        """Of one micro-batch of the stage, and what the whole step has."""
        n = len(self.playback.times)
        last = n if self.graph.training else n - 1  # time n: the optimizer's update
        change = np.zeros((n + 2, len(CATEGORIES)), dtype=np.int64)
        for b in self.playback.buffers:
            c = CATEGORIES.index(b.category)
            change[b.born, c] += b.nbytes
            change[min(b.died, n + 1), c] -= b.nbytes
        live = np.cumsum(change, axis=0)[:last + 1]
        live += self._constant
        if self.graph.training:
            live[n, CATEGORIES.index("temporaries")] += self.update
        return live

    @property
    def peak(self) -> int:
        return int(self.live.sum(axis=1).max())

    @property
    def peak_time(self) -> int:
        return int(np.argmax(self.live.sum(axis=1)))

    def moment_of(self, t: int) -> str:
        """The moment of time t as `formulate/memory_rows.py` names it: the op that runs then or next, "turn" or "update"."""
        times = self.playback.times
        if t >= len(times):
            return "update"
        ahead = (i for i in range(t, len(times)) if times[i][1] is None or times[i][1].kind == "compute")
        instruction = times[next(ahead, 0)][1]
        return instruction.op if instruction is not None else "turn" if self.graph.training else self.graph.ops[-1].name

    def begins(self, op: str) -> int:
        """The time at which the op begins; -1 where the plan does not run it."""
        times = enumerate(self.playback.times)
        return next((t for t, (_, instruction) in times if instruction is not None and instruction.op == op), -1)

    def moments(self) -> tuple[Moment, ...]:
        """The fullest time of every instruction, or, where there are many, of every stretch of instructions, with its
        emptiest."""
        total = self.live.sum(axis=1)
        times = [*self.playback.times, None]
        first = [t for t in range(len(total)) if t == 0 or times[t] is None or times[t][1] is not times[t - 1][1]]
        fullest = [a + int(np.argmax(total[a:b])) for a, b in zip(first, [*first[1:], len(total)], strict=True)]
        if len(fullest) > MOST_MOMENTS:
            stretches = np.array_split(np.array(fullest), MOST_MOMENTS // 2)
            fullest = sorted({int(s[f(total[s])]) for s in stretches for f in (np.argmax, np.argmin)})
        return tuple(self._moment(t) for t in fullest)

    def _moment(self, t: int) -> Moment:
        window, instruction = (*self.playback.times, ("update", None))[t]
        kind, name, op = _what(self.graph, instruction, window)
        return Moment(t, window, kind, name, op.module if op else "", op.source if op else "", tuple(map(int, self.live[t])))

    def largest(self) -> tuple[Alive, ...]:
        """The largest tensors alive at the peak, each once: buffers that were made for one value are added up."""
        t = self.peak_time
        found: dict[tuple[str, str], Alive] = {}
        for buffer in (b for b in self.playback.buffers if b.born <= t < b.died):
            one = self._alive(buffer)
            earlier = found.get((one.name, one.category))
            found[one.name, one.category] = replace(one, nbytes=one.nbytes + (earlier.nbytes if earlier else 0))
        return tuple(sorted(found.values(), key=lambda a: -a.nbytes)[:MOST_TENSORS])

    def _alive(self, buffer: Buffer) -> Alive:
        """A stored tensor by its name in the model; a copy of it, and any other value, with its spec."""
        held, op = buffer.held, self.graph.op(buffer.held.ref.op)
        stored = op.kind in ("param", "buffer", "input")
        copied = buffer.category in ("temporaries", "saved")
        name = f"{op.target}[{format_spec(held.spec)}]" if stored and copied else str(op.target) if stored else str(held)
        return Alive(name, buffer.category, buffer.nbytes, op.module, op.source)

    def summary(self, budget: Budget) -> dict[str, float | None]:
        """Bytes per category at the peak, what the allocator takes on top, total and limit; and on the host, if any."""
        at = dict(zip(CATEGORIES, map(float, self.live[self.peak_time]), strict=True))
        at["slack"] = budget.slack * sum(at.values())
        limit = budget.limit if np.isfinite(budget.limit) else None
        return {**at, "total": sum(at.values()), "limit": limit, **({"host": float(self.host)} if self.host else {})}


def _what(graph: Graph, instruction: Instruction | None, window: Window) -> tuple[str, str, Op | None]:
    """(kind, name, op to show) of a moment."""
    if instruction is None:
        first = ("start", "parameters" if window == START else "inputs")
        return {START: first, "forward": first, "update": ("update", "optimizer"), END: ("turn", "end of backward")}.get(
            window, ("turn", "end of forward")) + (None,)
    if instruction.kind == "compute":
        op = graph.op(instruction.op)
        return "compute", op.name, op
    return "redistribute", str(instruction.writes[0]), graph.op(instruction.writes[0].ref.op)


def _by_category(buffers: Iterable[Buffer]) -> np.ndarray:
    out = np.zeros(len(CATEGORIES), dtype=np.int64)
    for b in buffers:
        out[CATEGORIES.index(b.category)] += b.nbytes
    return out


def timeline(graph: Graph, plan: Plan, route: Route, footprints: Footprints, optimizer: str, trained: Sequence[str],
             together: bool, duty: Duty | None = None) -> Timeline:
    """Play one step of `plan`. `trained`: names of the parameter ops with a gradient; `together`: whether the optimizer
    updates all parameters in one call; `duty`: of a stage of a pipeline. Raises PlanError for a plan that does not fit the graph."""
    order = schedule(graph, plan, plan.spec_mesh, route)
    playback = play(graph, plan, order, footprints)
    parts = {n: stored_parts(graph.op(n).outputs[0], plan.ops[n].outputs[0], plan.spec_mesh, optimizer) for n in trained}
    away = frozenset(plan.offload)
    host = [p for n, p in parts.items() if graph.op(n).target in away]
    here = [p for n, p in parts.items() if graph.op(n).target not in away]
    update = max(host_workspace(optimizer, host, together), update_workspace(optimizer, [p["parameters"] for p in here], together))
    state = sum(p["optimizer"] for p in here) + scalar_bytes(optimizer, len(trained))  # scalars stay where they are
    parameters, buffers = graph.idle
    always = {"optimizer": state, "parameters": parameters, "buffers": buffers}
    return Timeline(graph, order, playback, always, update, sum(p["optimizer"] for p in host), duty)
