"""All stages of a pipeline in one process: the turns of every rank over its lowered windows, with wires that are first in, first out.

What `Program` is for one stage, this is for several, so it answers the same calls. A rank goes on until it needs what has not arrived; the ranks
take turns at that. A receive gets what its channel has next, whatever that is: a wrong order of sends shows in the numbers. Channels are those of
a real run: what skips stages has its own (`Hop.channel`).
"""
from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch

from autoshard.base.graph import FORWARD, Graph
from autoshard.base.plan import Plan
from autoshard.base.random import of_microbatch
from autoshard.base.roles import Role
from autoshard.base.spec import local_tensor_shape
from autoshard.base.turns import HERE, Turn
from autoshard.base.windows import END, START
from autoshard.errors import LoweringError
from autoshard.lower.lower import Port
from autoshard.pipeline.cutting.cut import Hop, Stage
from autoshard.pipeline.microbatches.results import Results, pieces_of
from autoshard.pipeline.pipelined import Pipelined, pipelined_as, stage_plan
from autoshard.program.calling import Traced
from autoshard.verification.one_process.collectives import Ranked
from autoshard.verification.one_process.pieces import Joined, cut, joined
from autoshard.verification.one_process.program import MakeOptimizer, Outcome, Program
from autoshard.verification.one_process.ranks import Watch


@dataclass(eq=False)
class Wires:
    """Channels between ranks, and what is handed over on a rank."""

    channels: dict[tuple[int, int, str], deque[Ranked]] = field(default_factory=lambda: defaultdict(deque))
    posted: dict[tuple[int, int, str], deque[tuple[str, int]]] = field(default_factory=lambda: defaultdict(deque))
    arrived: dict[tuple[str, int], Ranked] = field(default_factory=dict)

    def send(self, channel: tuple[int, int, str], value: Ranked) -> None:
        self.channels[channel].append(value)

    def has(self, channel: tuple[int, int, str], value: str, m: int) -> bool:
        """Whether a value is here: messages go to the receives of their channel in the order in which these were posted."""
        while self.channels[channel] and self.posted[channel]:
            self.arrived[self.posted[channel].popleft()] = self.channels[channel].popleft()
        return (value, m) in self.arrived


@dataclass(eq=False)
class _Step:
    """A step under way: by stage what its windows take of the whole step, by stage and micro-batch what they take of that."""

    tensors: list[torch.Tensor]
    seed: int
    watch: Watch
    results: Results | None
    wires: Wires = field(default_factory=Wires)
    shared: dict[int, dict[Port, Ranked]] = field(default_factory=dict)
    micros: dict[tuple[int, int], dict[Port, Ranked]] = field(default_factory=dict)
    given: dict[int, dict[Port, Ranked]] = field(default_factory=lambda: defaultdict(dict))
    outbox: dict[tuple[str, int], Ranked] = field(default_factory=dict)
    empty: set[int] = field(default_factory=set)


class StagePrograms:
    """`state`: parameters and buffers by name, whole; they are copied. `arrived(hop, pieces)` and `weighed(tangent, loss)` are told of every value
    that a stage receives, and of every tangent that a backward begins with. Raises LoweringError."""

    def __init__(self, traced: Traced, plan: Plan, state: Mapping[str, torch.Tensor], device: torch.device) -> None:
        self.traced, self.device, self.whole_plan = traced, device, plan
        self.made: Pipelined = pipelined_as(traced.graph, plan)
        self.mesh = self.made.submesh
        self.programs = [Program(replace(traced, graph=s.graph), stage_plan(plan, self.made, s.index), state, device) for s in self.made.cut.stages]
        self.turns = self.made.turns
        self.stage = self.microbatch = 0
        self.arrived: Callable[[Hop, Ranked], None] = lambda hop, pieces: None
        self.weighed: Callable[[torch.Tensor, int], None] = lambda tangent, loss: None

    # --- of the stage at work, as watches read it ---

    @property
    def graph(self) -> Graph:
        return self.programs[self.stage].graph

    @property
    def plan(self) -> Plan:
        return self.programs[self.stage].plan

    def whole_name(self, op: str) -> str | None:
        """What an op of the stage at work is called in the graph of the model; None for one that adds up a part of what the model adds up."""
        return self._names[self.stage].get(op)

    @cached_property
    def _names(self) -> list[dict[str, str]]:
        return [_names(s, self.traced.graph, frozenset(n for n, _ in self.made.cut.tied)) for s in self.made.cut.stages]

    # --- one step ---

    def step(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], seed: int, watch: Watch = lambda node, value: None) -> Outcome:
        """Forward and backward of all micro-batches, in the order of the schedule on every rank. As `Program.step`."""
        graph = self.traced.graph
        step = _Step(self.traced.calling.flatten(args, kwargs), seed, watch, Results(graph) if graph.microbatches > 1 else None)
        for s, program in enumerate(self.programs):
            self.stage, self.microbatch = s, 0
            step.shared[s] = {Port(op.kind, op.target): program.local[op.target] for op in program.graph.of_kind("param", "buffer")}
            step.shared[s][Port("seed", "")] = [seed] * self.mesh.size
            step.shared[s] |= self._run(step, START, step.shared[s]) if START in program.windows else {}
            step.shared[s] |= dict(program._accumulators())
        self._play(step)
        for s, program in enumerate(self.programs):
            self.stage = s
            if END in program.windows:
                given = {p: step.shared[s].get(p, step.shared[s].get(Port("accumulator", p.name))) for p in program.windows[END].takes}
                step.given[s] |= self._run(step, END, {**step.shared[s], **given})
        return self._finished(step)

    def _play(self, step: _Step) -> None:
        """Every rank as far as it comes, again and again."""
        at, moved = [0] * len(self.turns), True
        while moved:
            moved = False
            for r, turns in enumerate(self.turns):
                while at[r] < len(turns) and self._can(step, turns[at[r]]):
                    self._act(step, turns[at[r]])
                    at[r], moved = at[r] + 1, True
        waiting = {r: turns[at[r]] for r, turns in enumerate(self.turns) if at[r] < len(turns)}
        if waiting:
            words = "; ".join(f"rank {r} at {t.window} of stage {t.stage}, micro-batch {t.microbatch}" for r, t in waiting.items())
            raise LoweringError(f"the ranks of the pipeline wait for each other: {words}")

    def _can(self, step: _Step, turn: Turn) -> bool:
        hops = [self.made.cut.stages[turn.stage].received(f"recv:{value}") for value in turn.takes]
        return all(step.wires.has(self._channel(hop), hop.name, turn.microbatch) for hop in hops)

    def _channel(self, hop: Hop) -> tuple[int, int, str]:
        return self.made.table.rank_of[hop.source], self.made.table.rank_of[hop.target], hop.channel

    def _act(self, step: _Step, turn: Turn) -> None:
        self.stage, self.microbatch = turn.stage, turn.microbatch
        if turn.kind == "post":
            hop = self.made.cut.stages[turn.stage].received(f"recv:{turn.value}")
            step.wires.posted[self._channel(hop)].append((turn.value, turn.microbatch))
        elif turn.kind == "run":
            self._window(step, turn)
        else:
            value = step.outbox.pop((turn.value, turn.microbatch))
            if turn.other == HERE:
                step.wires.arrived[turn.value, turn.microbatch] = value
            else:
                step.wires.send(self._channel(self.made.cut.stages[turn.stage].sent(f"send:{turn.value}")), value)

    def _window(self, step: _Step, turn: Turn) -> None:
        s, m, program = turn.stage, turn.microbatch, self.programs[turn.stage]
        if (s, m) not in step.micros:
            step.micros[s, m] = self._inputs(step, s, m)
        given = step.micros[s, m]
        for value in turn.takes:
            hop = self.made.cut.stages[s].received(f"recv:{value}")
            pieces = step.wires.arrived.pop((value, m))
            self.arrived(hop, pieces)
            given[Port(program.graph.op(hop.recv).kind, hop.recv)] = pieces
        if turn.window != FORWARD and m in step.empty and s == len(self.programs) - 1:
            return self._nothing(step, s, m, turn.window)
        out = self._run(step, turn.window, {**step.shared[s], **given})
        for port, pieces in out.items():
            if port.kind == Role.SEND:
                step.outbox[port.name, m] = pieces
            elif port.kind == Role.MUTATION:
                program.local[port.name] = step.shared[s][Port("buffer", port.name)] = pieces
                step.given[s][port] = pieces
            elif port.kind == "saved":
                self._keep(step, s, m, port, pieces)
            else:
                step.given[s][port] = pieces
        if turn.window == FORWARD and any(port.kind == Role.USER for port in out):
            self._weigh(step, m, out)

    def _keep(self, step: _Step, s: int, m: int, port: Port, pieces: Ranked) -> None:
        accumulator = Port("accumulator", port.name)
        if accumulator in step.shared[s]:
            step.shared[s][accumulator] = pieces
        else:
            step.micros[s, m][port] = pieces

    def _nothing(self, step: _Step, s: int, m: int, window: str) -> None:
        """The backward of a micro-batch that counts nothing."""
        for hop in self.made.cut.stages[s].sends:
            if hop.window == window:
                spec = self.programs[s].plan.ops[hop.send].inputs[0]
                zeros = torch.zeros(local_tensor_shape(hop.meta, spec, self.mesh), dtype=hop.meta.dtype, device=self.device)
                step.outbox[hop.name, m] = [zeros] * self.mesh.size

    def _run(self, step: _Step, window: str, given: Mapping[Port, Ranked]) -> dict[Port, Ranked]:
        program = self.programs[self.stage]
        return program._run(program.windows[window], given, step.watch)

    def _inputs(self, step: _Step, s: int, m: int) -> dict[Port, Ranked]:
        """What a micro-batch begins with in a stage."""
        program, seed = self.programs[s], step.seed if step.results is None else of_microbatch(step.seed, m)
        tensors = dict(zip((op.target for op in self.traced.graph.of_kind("input")), pieces_of(self.traced.graph, step.tensors, m), strict=True))
        given: dict[Port, Ranked] = {Port("seed", ""): [seed] * self.mesh.size}
        for op in program.graph.of_kind("input", "tangent"):
            if not op.is_port:
                meta = op.outputs[0]
                whole = tensors[op.target].detach() if op.kind == "input" else torch.ones(meta.shape, dtype=meta.dtype)
                given[Port(op.kind, op.target)] = cut(whole.to(self.device), meta, program.plan.ops[op.name].outputs[0], self.mesh)
        return given

    def _weigh(self, step: _Step, m: int, forward: Mapping[Port, Ranked]) -> None:
        """Take the results of a micro-batch, and set its tangent."""
        if step.results is None:
            return
        program, s = self.programs[self.stage], self.stage
        step.results.add(m, [j.whole for j in program._joined(Role.USER, forward).values()])
        if not step.results.counts:
            step.empty.add(m)
        for op in program.graph.of_kind("tangent"):
            if not op.is_port:
                tangent = step.results.tangent(int(op.target)).to(self.device)
                self.weighed(tangent, int(op.target))
                step.micros[s, m][Port("tangent", op.target)] = cut(tangent, op.outputs[0], program.plan.ops[op.name].outputs[0], self.mesh)

    # --- results ---

    def _finished(self, step: _Step) -> Outcome:
        factor = step.results.factor if step.results is not None else None
        grads: dict[str, list[Joined]] = defaultdict(list)
        mutations: dict[str, Joined] = {}
        users: tuple[Joined, ...] = ()
        for s, program in enumerate(self.programs):
            given = step.given[s]
            for name, op in program.graph.outputs(Role.GRADIENT).items():
                if (port := Port(Role.GRADIENT, name)) in given:
                    grads[name].append(joined(given[port], program.graph.meta(op.refs[0]), program.plan.ops[op.name].inputs[0], self.mesh))
            mutations |= program._joined(Role.MUTATION, given)
            if program.graph.outputs(Role.USER):
                users = tuple(program._joined(Role.USER, given).values())
        whole = {name: Joined(_sum([j.whole for j in parts], factor), max(j.disagreement for j in parts)) for name, parts in grads.items()}
        self._hand_out(whole)
        if step.results is not None:
            users = tuple(Joined(t, users[0].disagreement) for t in step.results.finished())
        return Outcome(users, whole, mutations)

    def _hand_out(self, grads: Mapping[str, Joined]) -> None:
        """To every stage that has the parameter, as it is stored there: the same sum to all."""
        for program in self.programs:
            program._grads = {op.target: cut(grads[op.target].whole, op.outputs[0], program.plan.ops[op.name].outputs[0], self.mesh)
                              for op in program.graph.of_kind("param") if op.target in grads}

    def weights(self) -> dict[str, Joined]:
        """Parameters by name, put together. Stages that share one must agree."""
        found: dict[str, Joined] = {}
        for program in self.programs:
            for name, own in program.weights().items():
                other = found.get(name)
                off = 0.0 if other is None else float((own.whole.double() - other.whole.double()).norm())
                found[name] = Joined(own.whole, max(own.disagreement, off))
        return found

    def update(self, make: MakeOptimizer) -> None:
        for program in self.programs:
            if program._grads:
                program.update(make)


def _sum(parts: list[torch.Tensor], factor: torch.Tensor | None) -> torch.Tensor:
    whole = sum(parts[1:], parts[0])
    return whole if factor is None else (whole * factor).to(whole.dtype)


def _names(stage: Stage, whole: Graph, tied: frozenset[str]) -> dict[str, str]:
    """The ops of a stage that make what an op of the whole graph makes, with its name there."""
    arrives = {h.recv: h.value.op for h in stage.receives}
    out: dict[str, str] = {}
    for op in stage.graph.ops:
        name = op.name if op.name in whole.by_name else op.name.rpartition("@")[0]
        if op.kind in ("param", "buffer", "input", "tangent") and not op.is_port and name in whole.by_name:
            out[op.name] = name
        elif op.kind == "call" and name in whole.by_name:
            read = [arrives.get(r.op) or out.get(r.op) for r in op.refs]
            if read == [r.op for r in whole.op(name).refs]:
                out[op.name] = name
    return out
