"""Plays a schedule and notes when every buffer of one rank is made and dropped.

Time counts allocations: buffer b is alive at times born <= t < died. The lowered code drops a value after the last
call that reads it and a buffer lives while some value looks at it, so views cost nothing and keep their base alive;
what a collective sends stays until it is waited for.
"""
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from autoshard.base.graph import Graph, Op, Ref
from autoshard.base.plan import Plan, Window
from autoshard.base.roles import Role
from autoshard.base.spec import local_tensor_shape
from autoshard.base.windows import CAT, ONCE, START, batch_dim_of, is_accumulator, join_of
from autoshard.cost.memory import value_bytes
from autoshard.lower.schedule import Held, Instruction, Schedule, WindowSchedule
from autoshard.play.footprint import Footprint, Footprints, Piece, Strides
from autoshard.rules.states import states

FOREVER = 2**62
KEPT_AS = {Role.USER: "outputs", Role.GRADIENT: "gradients", Role.MUTATION: "temporaries", Role.SEND: "temporaries"}
"""Category of memory in which a window's results are counted from its end on."""


@dataclass(eq=False)
class Buffer:
    """A piece of memory. `held`: the value it was made for (a temporary inside an op: the op's first result);
    `category`: see `plan.CATEGORIES`; `holders`: values, and variables of instructions under way, that look at it now; `given`:
    made before the window, so not to be written; `lent`: that of a state, which its owner lets the program write; `micro`: every
    micro-batch has one of its own."""

    nbytes: int
    born: int
    held: Held
    category: str = "temporaries"
    died: int = FOREVER
    holders: int = 0
    given: bool = False
    lent: bool = False
    micro: bool = False


@dataclass(frozen=True, eq=False)
class Playback:
    """`buffers` of the whole step, with one micro-batch; `times[t]` is the (window, instruction) that makes the allocation of time t.
    `arriving`: buffers of what the micro-batch receives of other stages; `leaving`: of what it sends, with the buffer that holds it (None: a
    copy)."""

    buffers: tuple[Buffer, ...]
    times: tuple[tuple[Window, Instruction | None], ...]
    arriving: Mapping[str, Buffer]
    leaving: Mapping[str, tuple[int, Buffer | None]]


@dataclass(eq=False)
class _Use:
    """An instruction that has begun: its buffers, and what is left of it."""

    instruction: Instruction
    footprint: Footprint
    inputs: tuple[Buffer, ...]
    own: list[Buffer] = field(default_factory=list)
    done: set[int] = field(default_factory=set)


def play(graph: Graph, plan: Plan, schedule: Schedule, footprints: Footprints) -> Playback:
    """One training step (or one forward) of `plan` on one rank, without the optimizer's state and update."""
    player = _Player(graph, plan, footprints)
    player.enter(schedule.windows[0].name)
    for i, window in enumerate(schedule.windows):
        handed = player.turn(schedule, i) if i else []
        player.window(window, schedule)
        player.leave(handed)
    return Playback(tuple(player.buffers), tuple(player.times), player.arriving, player.leaving)


class _Player:
    def __init__(self, graph: Graph, plan: Plan, footprints: Footprints) -> None:
        self.graph, self.plan, self.footprints, self.mesh = graph, plan, footprints, plan.spec_mesh
        self.buffers: list[Buffer] = []
        self.times: list[tuple[Window, Instruction | None]] = []
        self.env: dict[Held, tuple[Buffer, Strides]] = {}
        self.started: dict[tuple[Held, ...], _Use] = {}
        self.arriving: dict[str, Buffer] = {}
        self.leaving: dict[str, tuple[int, Buffer | None]] = {}
        self.micro = False

    # --- borders ---

    def enter(self, first: Window) -> None:
        """Time 0, before anything runs: parameters and buffers for good, and inputs as the user holds them."""
        self.times.append((first, None))
        lent = states(self.graph)
        for op in self.graph.of_kind("param", "buffer"):
            held = Held(Ref(op.name), self.plan.ops[op.name].outputs[0])
            self._given(held, {"param": "parameters", "buffer": "buffers"}[op.kind]).lent = op.name in lent
        for op in self.graph.of_kind("input"):
            if not op.is_port:
                self._whole_input(op)
        if first != START:
            self._arrive(first)

    def _arrive(self, window: Window) -> list[Buffer]:
        """What a micro-batch has at the begin of a window: this rank's copies of inputs, where it needs some, and tangents. Those that autograd
        holds until the window ends are returned; what other stages send goes with its last reader."""
        self.micro = window not in ONCE
        held_by_autograd = []
        for op in self.graph.of_kind("input", "tangent"):
            if op.phase != window:
                continue
            held = Held(Ref(op.name), self.plan.ops[op.name].outputs[0])
            if op.kind == "input" and not op.is_port:
                self._local_copy(op, held)
                continue
            buffer = self._given(held, "temporaries")
            if op.is_port:
                self.arriving[str(op.target).removeprefix("recv:")] = buffer
            if op.is_port or self.graph.microbatches > 1:
                buffer.holders = 1
            else:
                held_by_autograd.append(buffer)
        return held_by_autograd

    def _between(self) -> None:
        """What all micro-batches share: accumulators, and the results that are put together."""
        for op in filter(is_accumulator, self.graph.ops):
            self._given(Held(Ref(op.name), self.plan.ops[op.name].outputs[0]), "gradients").holders = 1
        if self.graph.microbatches > 1:
            for op in self.graph.outputs(Role.USER).values():
                if op.refs:
                    held = Held(op.refs[0], self.plan.ops[op.name].inputs[0])
                    pieces = self.graph.microbatches if join_of(op) == CAT else 1
                    self._make(pieces * value_bytes(self.graph.meta(held.ref), held.spec, self.mesh), held, "outputs").holders = 1

    def _whole_input(self, op: Op) -> None:
        """All micro-batches of it."""
        held = Held(Ref(op.name), self.plan.ops[op.name].outputs[0])
        buffer = self._given(held, "inputs")
        pieces = 1 if batch_dim_of(op) is None else self.graph.microbatches
        buffer.nbytes = pieces * (self.graph.meta(held.ref).nbytes if self._passes_whole else buffer.nbytes)

    def _local_copy(self, op: Op, held: Held) -> None:
        """Where the rank's part of a micro-batch does not lie in the input without gaps."""
        dim, pieces = batch_dim_of(op), self.graph.microbatches
        apart = dim is not None and pieces > 1 and any(n != 1 for n in self.graph.meta(held.ref).shape[:dim])
        if apart or self._passes_whole and not self._is_prefix(held):
            copy = self._make(value_bytes(self.graph.meta(held.ref), held.spec, self.mesh), held, "inputs")
            copy.holders = 1
            self.env[held] = copy, self._contiguous(held)

    @property
    def _passes_whole(self) -> bool:
        return bool(self.plan.settings.get("inputs", "global") == "global")

    def _is_prefix(self, held: Held) -> bool:
        """Whether the local part of a whole input lies in it without gaps, so that it is no copy."""
        shape, local = self.graph.meta(held.ref).shape, local_tensor_shape(self.graph.meta(held.ref), held.spec, self.mesh)
        cut = [d for d, (n, m) in enumerate(zip(shape, local, strict=True)) if n != m]
        return all(n == 1 for n in local[:max(cut, default=0)])

    def turn(self, schedule: Schedule, i: int) -> list[Buffer]:
        """Before window i: what no window from there on needs goes, tangents come and are returned. Saved values are arguments
        there as they lie."""
        window = schedule.windows[i].name
        needed = dict.fromkeys(held for later in schedule.windows[i:] for held in later.takes)
        needed |= dict.fromkeys(Held(Ref(op.name), self.plan.ops[op.name].outputs[0]) for op in self.graph.of_kind("input") if op.phase == window)
        for op in self.graph.outputs(Role.MUTATION).values():
            if op.name in schedule.outputs and op.phase == schedule.windows[i - 1].name:
                self._let_go(self.env[schedule.outputs[op.name]][0])
        self.env = {held: self.env[held] for held in (*needed, *self._stored()) if held in self.env}
        self.times.append((window, None))
        if schedule.windows[i - 1].name == START:
            self._between()
        return self._arrive(window)

    def leave(self, tangents: list[Buffer]) -> None:
        """After a window: until then autograd holds what it called it with."""
        for buffer in tangents:
            self._let_go(buffer)

    def _stored(self) -> list[Held]:
        return [Held(Ref(op.name), self.plan.ops[op.name].outputs[0]) for op in self.graph.of_kind("param", "buffer")]

    def _given(self, held: Held, category: str) -> Buffer:
        buffer = self._make(value_bytes(self.graph.meta(held.ref), held.spec, self.mesh), held, category)
        buffer.holders = 2  # the user, or autograd, holds them too
        self.env[held] = buffer, self._contiguous(held)
        return buffer

    def _contiguous(self, held: Held) -> Strides:
        strides, step = [], 1
        for n in reversed(local_tensor_shape(self.graph.meta(held.ref), held.spec, self.mesh)):
            strides.append(step)
            step *= max(n, 1)
        return tuple(reversed(strides))

    # --- one window ---

    def window(self, window: WindowSchedule, schedule: Schedule) -> None:
        for buffer, _ in self.env.values():
            buffer.given = not buffer.lent
        run = {"compute": self._compute, "redistribute": self._issue, "wait": self._complete}
        for instruction in window.instructions:
            run[instruction.kind](window.name, instruction)
        seen: set[Held] = set()
        for held, category in self._leaving(window, schedule):
            buffer = self.env[held][0]
            buffer.holders += held in seen
            seen.add(held)
            if buffer.category not in ("parameters", "buffers", "inputs") and not is_accumulator(self.graph.op(held.ref.op)):
                buffer.category = category
            if category == "outputs" and self.graph.microbatches > 1:  # put to those of the other micro-batches
                self._let_go(buffer)
        for op in self.graph.outputs(Role.SEND).values():
            if op.phase == window.name:
                self._send(op, schedule.outputs[op.name])

    def _send(self, op: Op, held: Held) -> None:
        """What is sent lies in its buffer, or, if that has gaps, in a copy; from here on only the wire holds it."""
        buffer, strides = self.env[held]
        shape = local_tensor_shape(self.graph.meta(held.ref), held.spec, self.mesh)
        dense = all(n == 1 or a == b for n, a, b in zip(shape, strides, self._contiguous(held), strict=True))
        own = value_bytes(self.graph.meta(held.ref), held.spec, self.mesh)
        self.leaving[op.target.name] = (buffer.nbytes, buffer) if dense else (own, None)
        self._let_go(buffer)

    def _leaving(self, window: WindowSchedule, schedule: Schedule) -> list[tuple[Held, str]]:
        """Values that outlive the window, with what they are kept for."""
        out = [(schedule.outputs[op.name], KEPT_AS[op.target.role])
               for op in self.graph.of_kind("output") if op.phase == window.name and op.name in schedule.outputs]
        return out + [(held, "saved") for held in window.saves]

    def _compute(self, window: Window, instruction: Instruction) -> None:
        op = self.graph.op(instruction.op)
        if is_accumulator(op):  # added to what is there
            for held in instruction.frees:
                self._drop(held)
            return
        strides = [self.env[h][1] for h in instruction.reads]
        footprint = self.footprints.of_op(op, self.graph.calls[op.name], self.plan.ops[op.name], strides)
        use = self._begin(instruction, footprint)
        self._run(window, use, 0, len(footprint.pieces))
        self._finish(use)

    def _issue(self, window: Window, instruction: Instruction) -> None:
        metas = [self.graph.meta(own.ref) for own in instruction.reads]
        footprint = self.footprints.of_move(metas, instruction, [self.env[own][1] for own in instruction.reads])
        use = self.started[instruction.writes] = self._begin(instruction, footprint)
        self._run(window, use, 0, footprint.started)

    def _complete(self, window: Window, instruction: Instruction) -> None:
        use = self.started.pop(instruction.reads)
        self._run(window, use, use.footprint.started, len(use.footprint.pieces))
        self._finish(use)

    # --- pieces ---

    def _begin(self, instruction: Instruction, footprint: Footprint) -> _Use:
        """The instruction's own variables look at what it reads from here on, and values that it reads last go."""
        use = _Use(instruction, footprint, tuple(self.env[h][0] for h in instruction.reads))
        for buffer in use.inputs:
            buffer.holders += 1
        for held in instruction.frees:
            if held in self.env:
                self._drop(held)
        return use

    def _run(self, window: Window, use: _Use, start: int, stop: int) -> None:
        held = use.instruction.writes[0]
        for piece in use.footprint.pieces[start:stop]:
            makes, taken = piece.makes, self._overwritten(use, piece)
            if taken is not None:
                taken.holders += 1
                use.own.append(taken)
                makes = makes[1:]
            elif piece.arriving:
                makes = (*makes[:-1], 0)
            if makes:
                self.times.append((window, use.instruction))
            for nbytes in makes:
                use.own.append(self._make(nbytes, held))
                use.own[-1].holders = 1
            for buffer in piece.drops:
                if buffer < 0:
                    use.done.add(~buffer)
                self._let_go(use.inputs[~buffer] if buffer < 0 else use.own[buffer])

    def _overwritten(self, use: _Use, piece: Piece) -> Buffer | None:
        """The buffer that a call writes its result to instead of a new one: this window has made it, or it is a state's, and nobody
        else in the program looks at it."""
        for b in piece.over:
            buffer = use.inputs[~b] if b < 0 else use.own[b]
            if not buffer.given and buffer.holders == 1 + buffer.lent:
                return buffer
        return None

    def _finish(self, use: _Use) -> None:
        instruction = use.instruction
        for i, held in enumerate(instruction.writes):
            output = use.footprint.outputs[held.ref.index if instruction.kind == "compute" else i]
            buffer = use.inputs[~output.buffer] if output.buffer < 0 else use.own[output.buffer]
            self.env[held] = buffer, output.strides
            buffer.holders += 1
        dropped = {b for piece in use.footprint.pieces for b in piece.drops}
        for b in set(range(len(use.own))) - dropped:
            self._let_go(use.own[b])
        for i in set(range(len(use.inputs))) - use.done:
            self._let_go(use.inputs[i])
        for held in instruction.frees:
            if held in self.env:  # one that nobody reads
                self._drop(held)

    def _drop(self, held: Held) -> None:
        self._let_go(self.env.pop(held)[0])

    def _let_go(self, buffer: Buffer) -> None:
        buffer.holders -= 1
        if not buffer.holders:
            buffer.died = len(self.times)

    def _make(self, nbytes: int, held: Held, category: str = "temporaries") -> Buffer:
        self.buffers.append(Buffer(nbytes, len(self.times) - 1, held, category, micro=self.micro))
        return self.buffers[-1]
