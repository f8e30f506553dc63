"""Simulated beside measured steps of small models on local processes; a slow rank and a slow link planted on purpose; a trace of both.

    torchrun --nproc-per-node 2 -m autoshard calibrate -o my.toml
    torchrun --nproc-per-node 2 benchmarks/simulation.py --cluster my.toml [--models gpt,mlp] [--rounds 12] [--trace both.json]
    torchrun --nproc-per-node 2 benchmarks/simulation.py --cluster my.toml --models gpt --slow 1.5 --link 0.25

The plans are those of prediction.py. Every op and collective of a real run has a clock (an own executor of the local graphs, which puts a
line after each call); rounds go through all plans of a model in turn. Each plan is simulated twice: from the profile alone, and with the
seconds of ops, of the update and of what is between graphs as they were clocked in the even rounds, so that collectives and waiting are
what is predicted; the step is that of the odd rounds. The A/A floor is how far the even rounds are from the odd ones. Ops are clocked while both
ranks run, since two ranks of one machine share its memory.

--slow F   in further rounds the last rank spins after every op until it has taken F times as long; --link S: every rank waits, where a
           collective ends, for as long as it would take more with the share S of its bandwidth. What the simulator says changes is held against what does.
--trace    of the first plan: two groups of processes in one file, measured and simulated. Shown by trace_picture.py, or ui.perfetto.dev.
"""
from __future__ import annotations

import argparse
import copy
import json
import os
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import mean, median
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from prediction import MODELS, PLANS, WITHOUT_TENSOR_PARALLEL, rank_correlation
from torch import nn
from torch.fx import Graph, Node

import autoshard
from autoshard.base.mesh import Mesh
from autoshard.cost.cluster import Cluster
from autoshard.lower.lifetimes import Lifetimes
from autoshard.runtime.carriers import gloo_messages
from autoshard.runtime.execute import backends
from autoshard.runtime.execute.eager import Writer
from autoshard.simulation.conditions import Conditions
from autoshard.simulation.program import Program, Stretch, Work
from autoshard.simulation.replay import Replay, replay
from autoshard.simulation.simulate import program_for
from autoshard.simulation.source import traced_for
from autoshard.simulation.trace import COMPUTE, Span, Track, trace_events, tracks_of, write_trace
from models import dlrm, moe, vit

MODELS = {**MODELS, "moe": (moe, {}), "vit": (vit, {}), "dlrm": (dlrm, {})}
MEASURED = 1000
"""Added to the rank of a measured process in a trace."""


@dataclass(frozen=True)
class Mark:
    """A call of a local graph is over. `kind`: "compute", "redistribute", or "wait" where a collective ends."""

    kind: str
    name: str
    window: str
    end: float


@dataclass
class Clock:
    """What is being recorded. `slow`: how many times as long this rank takes for its ops; `late`: seconds that the n-th collective of a step
    ends later."""

    marks: list[Mark] = field(default_factory=list)
    before: float = 0.0
    slow: float = 1.0
    late: Sequence[float] = ()
    ended: int = 0

    def start(self) -> None:
        self.before = perf_counter()
        self.marks.append(Mark("start", "", "", self.before))

    def mark(self, kind: str, name: str, window: str) -> None:
        now = perf_counter()
        until = now
        if kind == "compute" and self.slow > 1:
            until = self.before + self.slow * (now - self.before)
        elif kind == "wait" and self.late:
            until, self.ended = now + self.late[self.ended % len(self.late)], self.ended + 1
        while now < until:
            now = perf_counter()
        self.marks.append(Mark(kind, name, window, now))
        self.before = now


CLOCK = Clock()


class Clocked(Writer):
    """A local graph with a mark after every call."""

    def lines(self) -> Iterator[str]:
        nodes = iter([n for n in self._graph.nodes if n.op == "call_function"])
        for line in super().lines():
            if line.startswith("    return"):
                yield line
            elif " = " in line and not line.endswith("= values"):
                yield line
                yield f"    {self._constant(self._marker(next(nodes)), 'm')}()"
            else:
                yield line
                if line.startswith("    values.clear"):
                    yield f"    {self._constant(CLOCK.start, 's')}()"

    def _marker(self, node: Node) -> Callable[[], None]:
        part = node.meta.get("part")
        kind = "wait" if node.target is gloo_messages.land else part.kind if part else "redistribute"
        name, window = (part.name, part.window) if part else (node.name, "")
        return lambda: CLOCK.mark(kind, name, window)


def clocked(graph: Graph, name: str, lifetimes: Lifetimes | None = None) -> Callable[[list[Any]], Sequence[Any]]:
    """`eager.straight` with clocks."""
    writer = Clocked(graph, lifetimes or Lifetimes.of(graph))
    exec(compile("\n".join(writer.lines()) + "\n", f"<clocked {name}>", "exec"), writer.scope)
    return writer.scope["run"]


@dataclass(frozen=True)
class Step:
    """A measured step on this rank."""

    begin: float
    end: float
    marks: tuple[Mark, ...]

    @property
    def seconds(self) -> float:
        return self.end - self.begin

    def spent(self) -> Iterator[tuple[Mark, float, float]]:
        """(mark, begin, end) of every call."""
        before = self.begin
        for mark in self.marks:
            if mark.kind != "start":
                yield mark, before, mark.end
            before = mark.end

    def of_ops(self) -> dict[str, float]:
        out: dict[str, float] = defaultdict(float)
        for mark, begin, end in self.spent():
            if mark.kind == "compute":
                out[mark.name] += end - begin
        return out

    def outside(self) -> float:
        """Seconds between graphs: autograd, zero_grad and the update."""
        return self.seconds - sum(end - begin for _, begin, end in self.spent())


@dataclass(frozen=True)
class Plan:
    """A compiled plan: `program` as it is executed, `step` runs it once."""

    name: str
    program: Program
    cluster: Cluster
    step: Callable[[], None]

    def simulated(self, conditions: Conditions | None = None, program: Program | None = None) -> Replay:
        return replay(program or self.program, self.cluster, conditions)

    def run(self) -> Step:
        dist.barrier()
        CLOCK.marks.clear()
        CLOCK.ended = 0
        begin = perf_counter()
        self.step()
        return Step(begin, perf_counter(), tuple(CLOCK.marks))


def plans_of(name: str, cluster: str, only: Sequence[str]) -> Iterator[Plan]:
    module, sizes = MODELS[name]
    mesh = Mesh(("d",), (dist.get_world_size(),))
    torch.manual_seed(0)
    model, batch = module.build("tiny", **sizes)
    for label, seeds_of in PLANS.items():
        if (only and label not in only) or (name in WITHOUT_TENSOR_PARALLEL and label in ("tensor parallel", "mixed")):
            continue
        seeds = seeds_of(model, [tuple(x.shape) for x in batch], mesh) if seeds_of else None
        compiled = autoshard.compile(copy.deepcopy(model), str(mesh), batch, loss_fn=module.loss, cluster=cluster, seeds=seeds, cache=False,
                                     time_limit=10)
        graph, on = traced_for(compiled.plan, model, batch, None, module.loss, None).graph, Cluster.from_snapshot(compiled.plan.cluster)
        yield Plan(f"{name}, {label}", program_for(graph, compiled.plan, on, executed=True), on, stepper(compiled, batch))


def stepper(model: nn.Module, batch: tuple[Any, ...]) -> Callable[[], None]:
    optimizer = autoshard.local_update(torch.optim.AdamW(model.parameters(), lr=1e-4))

    def run() -> None:
        optimizer.zero_grad()
        model(*batch).backward()
        optimizer.step()

    return run


def with_clocks(program: Program, steps: Sequence[Step]) -> Program:
    """The program with its ops as long as they were in the median step. What has a clock and no event (views) comes with what is outside of
    graphs, where the update is."""
    clocks = [s.of_ops() for s in steps]
    seconds = {op: median(c[op] for c in clocks) for op in clocks[0]}
    named = {w.name for w in program.works if w.kind == "op"}
    events: list[Any] = []
    for event in program.events:
        if isinstance(event, Stretch):
            works = tuple(replace(w, seconds=seconds.get(w.name, w.seconds)) if w.kind == "op" else w for w in event.works if w.kind != "update")
            events.append(Stretch(works, sum(w.seconds for w in works)))
        else:
            events.append(event)
    rest = median(s.outside() for s in steps) + sum(t for op, t in seconds.items() if op not in named)
    return replace(program, events=(*events, Stretch((Work("update", "update, autograd and views", rest, "update"),), rest)))


def slowest(seconds: float) -> float:
    t = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(t, dist.ReduceOp.MAX)
    return t.item()


def averaged(program: Program, own: Program) -> Program:
    """`own` with the seconds of works averaged over the ranks, so that all simulate one program."""
    t = torch.tensor([w.seconds for w in own.works], dtype=torch.float64)
    dist.all_reduce(t)
    seconds = iter((t / dist.get_world_size()).tolist())
    events: list[Any] = []
    for event in own.events:
        works = tuple(replace(w, seconds=next(seconds)) for w in event.works) if isinstance(event, Stretch) else ()
        events.append(Stretch(works, sum(w.seconds for w in works)) if isinstance(event, Stretch) else event)
    return replace(own, events=tuple(events))


def measured_rounds(plans: Sequence[Plan], rounds: int) -> dict[str, list[Step]]:
    out: dict[str, list[Step]] = {p.name: [] for p in plans}
    for i in range(rounds):
        for p in [*plans[i % len(plans):], *plans[:i % len(plans)]]:
            out[p.name].append(p.run())
    return out


def quartile(values: Sequence[float]) -> float:
    return sorted(values)[len(values) // 4]


def planted(plan: Plan, steps: Sequence[Step], rounds: int, slow: float, link: float) -> dict[str, float]:
    """Measured and simulated change of a step, with a slow last rank or slow links."""
    clocks = averaged(plan.program, with_clocks(plan.program, steps))
    last = dist.get_world_size() - 1
    late = [sum(p.wire / p.rate for g in c.phases for p in g) * (1 / link - 1) for c in plan.program.calls] if link < 1 else []
    conditions = Conditions({last: slow} if slow > 1 else {}, {level.name: link for level in plan.cluster.links[:1]} if link < 1 else {})
    times: dict[bool, list[float]] = {False: [], True: []}
    for i in range(2 * rounds):
        on = bool(i % 2)
        CLOCK.slow, CLOCK.late = (slow if on and dist.get_rank() == last else 1.0), (late if on else ())
        times[on].append(slowest(plan.run().seconds))
    CLOCK.slow, CLOCK.late = 1.0, ()
    before = plan.simulated(program=clocks).step_s
    after = plan.simulated(conditions, without_update(clocks)).step_s + outside_of(clocks) if slow > 1 else plan.simulated(conditions, clocks).step_s
    return {"measured": quartile(times[True]) / quartile(times[False]), "simulated": after / before}


def without_update(program: Program) -> Program:
    return replace(program, events=tuple(e for e in program.events if not (isinstance(e, Stretch) and any(w.kind == "update" for w in e.works))))


def outside_of(program: Program) -> float:
    return sum(w.seconds for w in program.works if w.kind == "update")


def measured_track(rank: int, step: Step, zero: float) -> Track:
    spans: list[Span] = []
    for mark, begin, end in step.spent():
        kind, name = ("idle", f"wait for {mark.name}") if mark.kind == "wait" else ("op" if mark.kind == "compute" else "copy", mark.name)
        if spans and spans[-1].name == name and spans[-1].end == begin - zero:
            spans[-1] = replace(spans[-1], end=end - zero)
        else:
            spans.append(Span(COMPUTE, name, begin - zero, end - zero, kind, {"window": mark.window}))
    return Track(MEASURED + rank, f"measured, rank {rank}", tuple(spans))


def write_both(path: Path, plan: Plan, step: Step, program: Program) -> None:
    """Collective: the ranks send their clocks to the first. Both groups begin at the first rank's beginning."""
    all_steps: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(all_steps, step)
    if dist.get_rank() == 0:
        zero = min(s.begin for s in all_steps)
        simulated = [replace(t, title=f"simulated, rank {t.rank}") for t in tracks_of(plan.simulated(program=program), range(len(all_steps)))]
        write_trace(path, trace_events([*(measured_track(r, s, zero) for r, s in enumerate(all_steps)), *simulated]))
        print(f"{path}: {plan.name}, measured {1e3 * all_steps[0].seconds:.2f} ms, simulated {1e3 * plan.simulated(program=program).step_s:.2f} ms")


@dataclass(frozen=True)
class Row:
    name: str
    measured: float
    even: float
    profile: float
    clocks: float


def run_model(name: str, given: argparse.Namespace, say: Callable[[str], None]) -> list[Row]:
    plans = list(plans_of(name, given.cluster, given.plans))
    measured_rounds(plans, 3)
    rounds = measured_rounds(plans, given.rounds)
    out = []
    for plan in plans:
        steps = rounds[plan.name]
        times = [slowest(s.seconds) for s in steps]
        clocks = averaged(plan.program, with_clocks(plan.program, steps[::2]))
        row = Row(plan.name, quartile(times[1::2]), quartile(times[::2]), plan.simulated().step_s, plan.simulated(program=clocks).step_s)
        out.append(row)
        say(f"{row.name}: {1e3 * row.measured:.2f} ms; profile {100 * (row.profile / row.measured - 1):+.0f} %, "
            f"clocked ops {100 * (row.clocks / row.measured - 1):+.1f} %, A/A {100 * (row.even / row.measured - 1):+.1f} %")
        if given.trace and plan is plans[0]:
            write_both(given.trace, plan, sorted(steps, key=lambda s: s.seconds)[len(steps) // 4] if dist.get_world_size() == 1 else
                       steps[min(range(len(times)), key=lambda i: abs(times[i] - quartile(times)))], clocks)
        for word, slow, link in (("slow rank", given.slow, 1.0), ("slow link", 1.0, given.link)):
            if slow > 1 or link < 1:
                found = planted(plan, steps, given.rounds, slow, link)
                say(f"  {word}: step x {found['measured']:.3f} measured, x {found['simulated']:.3f} simulated, "
                    f"{100 * (found['simulated'] / found['measured'] - 1):+.1f} %")
    return out


def show(rows: Sequence[Row]) -> None:
    for word, of in (("profile only", lambda r: r.profile), ("with clocked ops", lambda r: r.clocks), ("A/A, even rounds", lambda r: r.even)):
        errors = sorted(of(r) / r.measured - 1 for r in rows)
        worst = sorted(map(abs, errors))[int(0.9 * (len(errors) - 1))]
        print(f"{word}: {len(rows)} plans, median error {100 * median(map(abs, errors)):.1f} %, 90 % within {100 * worst:.1f} %, signed mean "
              f"{100 * mean(errors):+.1f} %, rank correlation {rank_correlation([of(r) for r in rows], [r.measured for r in rows]):.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cluster", required=True, help="the calibrated profile, a .toml file")
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--plans", default="", help="some of: " + ", ".join(PLANS))
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--slow", type=float, default=1.0)
    parser.add_argument("--link", type=float, default=1.0)
    parser.add_argument("--trace", type=Path)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    given.plans = [p.strip() for p in given.plans.split(",") if p.strip()]
    if unknown := (set(given.models.split(",")) - set(MODELS)) | (set(given.plans) - set(PLANS)):
        parser.error(f"there is no {min(unknown)!r}; models: {', '.join(MODELS)}; plans: {', '.join(PLANS)}")
    if "RANK" not in os.environ:
        parser.error("start it with: torchrun --nproc-per-node 2 benchmarks/simulation.py ...")
    torch.set_num_threads(1)
    backends.straight = clocked
    dist.init_process_group("gloo")
    lead = dist.get_rank() == 0
    say: Callable[[str], None] = (lambda text: print(text, flush=True)) if lead else (lambda text: None)
    rows = [row for name in given.models.split(",") for row in run_model(name, given, say)]
    if lead:
        show(rows)
        if given.json:
            given.json.write_text(json.dumps([asdict(r) for r in rows], indent=1) + "\n")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
