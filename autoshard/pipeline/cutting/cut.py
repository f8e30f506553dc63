"""The joint graph of forward and backward, cut into stages.

A stage is an ordinary training graph: what it receives is an input (of backward: a tangent), what it sends is an output, both marked as
ports. A value that several later stages read travels along the chain of its readers, and its gradient comes back the same way, summed
where the parts meet. Parameters, buffers and inputs are in every stage that reads them. Ops that depend on constants, buffers and
inputs alone, and views and casts of a parameter, are repeated where they are read. The gradient of a parameter that several stages
read is a part in each of them; the sum of the parts is taken once a step (`Cut.tied`).
"""
from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from autoshard.base.graph import BACKWARD, EARLY, FORWARD, PORT, WEIGHT, Graph, Op, Ref, TensorMeta
from autoshard.base.roles import Output, Role
from autoshard.base.windows import END, START
from autoshard.errors import UsageError
from autoshard.pipeline.cutting.blocks import Blocks
from autoshard.pipeline.cutting.cut_points import names_of
from autoshard.pipeline.cutting.repeated import repeated_ops
from autoshard.pipeline.cutting.shared_gradients import apart

PLACEHOLDERS = ("param", "buffer", "input", "tangent")
WINDOWS = (START, FORWARD, BACKWARD, WEIGHT, END)


@dataclass(frozen=True)
class Hop:
    """One way of a value between two stages, once per micro-batch. `window`: in which it is sent and received."""

    value: Ref
    source: int
    target: int
    window: str
    meta: TensorMeta

    @property
    def name(self) -> str:
        """What the ports at both ends are called."""
        return f"{self.value}@{self.target}"

    @property
    def skips(self) -> bool:
        """Whether other stages lie between: then no action of the schedule stands for it."""
        return abs(self.target - self.source) > 1

    @property
    def channel(self) -> str:
        """Values of one channel arrive in the order in which they are sent. The schedule orders those of neighbours; between other stages, which
        may be on the same two ranks, only their own are in the same order at both ends."""
        return f"{self.window} {self.source}>{self.target}" if self.skips else self.window

    @property
    def recv(self) -> str:
        return f"recv:{self.name}"

    @property
    def send(self) -> str:
        return f"send:{self.name}"


@dataclass(frozen=True)
class Stage:
    """One stage: its graph, the blocks in it, and what it exchanges with others, in the order in which it is sent."""

    index: int
    graph: Graph
    blocks: tuple[str, ...]
    receives: tuple[Hop, ...]
    sends: tuple[Hop, ...]

    def received(self, port: str) -> Hop:
        """What arrives at a port, "recv:..."."""
        return self._received[port]

    def sent(self, port: str) -> Hop:
        """What leaves at a port, "send:..."."""
        return self._sent[port]

    @cached_property
    def _received(self) -> dict[str, Hop]:
        return {h.recv: h for h in self.receives}

    @cached_property
    def _sent(self) -> dict[str, Hop]:
        return {h.send: h for h in self.sends}

    def names(self, kind: str) -> tuple[str, ...]:
        """Of its parameters, buffers or inputs, as the model calls them."""
        return tuple(op.target for op in self.graph.of_kind(kind) if not op.is_port)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Cut:
    """`starts`: the blocks at which stages begin, but for the first. `tied`: (parameter, stages that have a part of its gradient), of those that
    several stages read."""

    graph: Graph
    blocks: Blocks
    starts: tuple[int, ...]
    stages: tuple[Stage, ...]
    hops: tuple[Hop, ...]
    tied: tuple[tuple[str, tuple[int, ...]], ...]

    @property
    def names(self) -> tuple[str, ...]:
        """Of the modules at which stages begin, as a user gives them."""
        return names_of(self.blocks, self.starts)

    def readers(self, name: str) -> tuple[int, ...]:
        """Stages that have the parameter: some may have no part of its gradient (`words.weight.detach()`), and need that of the others."""
        return tuple(s.index for s in self.stages if name in s.names("param"))


def cut(graph: Graph, starts: Sequence[int], blocks: Blocks | None = None) -> Cut:
    """Cut `graph` before the blocks `starts`. Raises UsageError naming the op where stages would wait for each other in a circle."""
    found = blocks or Blocks.of(graph)
    return _Cutter(apart(graph, _stages_of(graph, found, starts)), found, tuple(starts), graph).cut()


def one_stage(graph: Graph, starts: Sequence[int], index: int, blocks: Blocks) -> Stage:
    """A stage of `cut` without the others, for whoever looks at nothing else; its ops have the names that they have in `graph`."""
    cutter = _Cutter(apart(graph, _stages_of(graph, blocks, starts)), blocks, tuple(starts), graph)
    return cutter.stage(index, tuple(cutter.hops()))


def _stages_of(graph: Graph, blocks: Blocks, starts: Sequence[int]) -> dict[str, int]:
    """Stage of every call. A backward op goes with its forward op; a sum of gradients, and what has no forward op, as late as what it reads
    allows: gradients flow from the last stage to the first."""
    def stage(block: int) -> int:
        return sum(block >= s for s in starts)

    out: dict[str, int] = {}
    for op in graph.of_kind("call"):
        if op.phase in EARLY:
            out[op.name] = stage(blocks.of_op.get(op.name, 0))
            continue
        read = [out[r.op] for r in op.refs if r.op in out and graph.op(r.op).phase not in EARLY]
        own = stage(blocks.at(op.traced_at)) if op.traced_at >= 0 else len(starts)
        out[op.name] = min([own, *read])
    return out


@dataclass
class _Cutter:
    """`graph` has the parts of shared gradients apart; `given` is the graph as it was traced."""

    parted: tuple[Graph, Mapping[str, int]]
    blocks: Blocks
    starts: tuple[int, ...]
    given: Graph

    def __post_init__(self) -> None:
        self.graph, self.home = self.parted
        self.repeated = repeated_ops(self.graph)
        self.n = len(self.starts) + 1
        self.owned: set[str] = set()

    def cut(self) -> Cut:
        hops = tuple(self.hops())
        stages = tuple(self.stage(s, hops) for s in range(self.n))
        made = Cut(self.given, self.blocks, self.starts, stages, hops, tuple(self._tied(stages)))
        check_whole(made)
        return made

    @cached_property
    def members(self) -> tuple[frozenset[str], ...]:
        """Calls that every stage runs: its own, and the repeated ones that it reads or hands out."""
        out = []
        for s in range(self.n):
            own = {op.name for op in self.graph.of_kind("call") if op.name not in self.repeated and self.home[op.name] == s}
            outputs = [op for op in self.graph.of_kind("output") if self._output_stage(op) == s]
            todo = [r.op for op in (*map(self.graph.op, own), *outputs) for r in op.refs]
            while todo:
                name = todo.pop()
                if name in self.repeated and name not in own:
                    own.add(name)
                    todo += [r.op for r in self.graph.op(name).refs]
            out.append(frozenset(own))
        return tuple(out)

    def _output_stage(self, op: Op) -> int:
        """Where an output is handed out: results of the model by the last stage, where the loss is made; others with the op that makes them."""
        return self.n - 1 if op.target.role is Role.USER else self.home.get(op.refs[0].op, self.n - 1)

    def _reads(self, stage: int) -> Iterator[Ref]:
        for op in self.graph.ops:
            if op.name in self.members[stage] or (op.kind == "output" and self._output_stage(op) == stage):
                yield from op.refs

    def hops(self) -> Iterator[Hop]:
        """In the order in which values are made."""
        readers: dict[Ref, set[int]] = {}
        for s in range(self.n):
            for ref in self._reads(s):
                if self.graph.op(ref.op).kind == "call" and ref.op not in self.members[s]:
                    readers.setdefault(ref, set()).add(s)
        for ref in sorted(readers, key=lambda r: (self.graph.order[r.op], r.index)):
            op, home = self.graph.op(ref.op), self.home[ref.op]
            later, earlier = sorted(s for s in readers[ref] if s > home), sorted((s for s in readers[ref] if s < home), reverse=True)
            if later and op.phase not in EARLY:
                raise UsageError(f"cannot cut before {', '.join(self.blocks.names[b] for b in self.starts)}: {op.where} is a gradient that stage "
                                 f"{home} makes and stage {later[0]}, whose backward comes first, reads; cut elsewhere")
            for window, chain in ((FORWARD, later), (BACKWARD, earlier)):
                for source, target in zip([home, *chain], chain, strict=False):
                    yield Hop(ref, source, target, window, self.graph.meta(ref))

    def _tied(self, stages: Sequence[Stage]) -> Iterator[tuple[str, tuple[int, ...]]]:
        """In the order of the model's parameters, which is the same on all ranks."""
        read = Counter(name for s in stages for name in s.names("param"))
        for op in self.graph.of_kind("param"):
            where = tuple(s.index for s in stages if op.target in s.graph.outputs(Role.GRADIENT))
            if where and read[op.target] > 1:
                yield op.target, where

    def stage(self, s: int, hops: Sequence[Hop]) -> Stage:
        receives, sends = (tuple(h for h in hops if end(h) == s) for end in (lambda h: h.target, lambda h: h.source))
        blocks = tuple(b.name for i, b in enumerate(self.blocks.blocks) if sum(i >= at for at in self.starts) == s)
        return Stage(s, replace(self.given, ops=self._ops(s, receives, sends), unused=(), idle=self.given.idle if s == 0 else (0, 0)),
                     blocks, receives, sends)

    def _ops(self, s: int, receives: Sequence[Hop], sends: Sequence[Hop]) -> tuple[Op, ...]:
        """Placeholders, forward with its outputs, tangents, backward with its outputs. What is in an earlier stage too has the stage's number
        in its name: names are unique over all stages."""
        reads = set(self._reads(s))
        ops = [op for op in self.graph.ops if op.name in self.members[s] or Ref(op.name) in reads and op.kind in PLACEHOLDERS
               or op.kind == "output" and self._output_stage(op) == s]
        names = {op.name: self._unique(op.name, s) for op in ops}
        arrived = {h.value: Ref(h.recv) for h in receives}

        def rename(ref: Ref) -> Ref:
            return Ref(names[ref.op], ref.index) if ref.op in names else arrived[ref]

        own = [replace(op.reading(rename), name=names[op.name]) for op in ops]
        own += [Op(h.recv, "input" if h.window == FORWARD else "tangent", h.recv, (), ((PORT, True),), (h.meta,), h.window) for h in receives]
        own += [Op(h.send, "output", Output(Role.SEND, h.name), (rename(h.value),), ((PORT, True),), (), h.window) for h in sends]
        return tuple(sorted(own, key=_place))

    def _unique(self, name: str, s: int) -> str:
        """The name itself in the first stage that has the op; stages are made in order."""
        if name not in self.owned:
            self.owned.add(name)
            return name
        return f"{name}@{s}"


def _place(op: Op) -> tuple[int, int]:
    """Sorts a stage's ops: by window, and in each placeholders, calls, outputs."""
    return WINDOWS.index(op.phase), 0 if op.kind in PLACEHOLDERS else 1 if op.kind == "call" else 2


def check_whole(made: Cut) -> None:
    """Every op, parameter, buffer and output of the graph is in some stage. A layer lost in a cut would train nothing and say nothing."""
    there = {op.name.partition("@")[0] for stage in made.stages for op in stage.graph.ops}
    outputs = {str(op.target) for stage in made.stages for op in stage.graph.of_kind("output")}
    sums = {op.name for op in made.graph.of_kind("call") if op.phase not in EARLY}  # sums of shared gradients are taken apart
    lost = [op.name for op in made.graph.ops if op.kind in ("call", "param", "buffer") and op.name not in there and op.name not in sums]
    lost += [str(op.target) for op in made.graph.of_kind("output") if str(op.target) not in outputs]
    if lost:
        raise UsageError(f"a cut before {', '.join(made.names)} loses {', '.join(lost[:3])}; this is a bug of autoshard: please report it, and "
                         "cut elsewhere")

