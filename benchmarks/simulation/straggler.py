"""A slow rank and a slow link, planted in a real step of four processes: what they change, measured and simulated.

    torchrun --nproc-per-node 4 -m benchmarks.simulation.straggler [--rounds 5] [--json out.json]

The step is that of a small GPT on dp=2,tp=2, two "nodes" of two ranks: the program that is lowered, on real processes that really exchange their
data and really wait for each other. Only time is planted: an op sleeps for as long as a made-up profile says, and a transfer arrives when its bytes
are through a link of that profile. It starts when the last rank of its group has called it and the axis is free, and hides behind what sleeps
meanwhile. Sleeping needs no CPU, so four processes have room on two cores, and a busy machine disturbs little. A slow rank sleeps longer in its ops; on a
slow link bytes take longer for the groups that use it.

"predicted" is `replay` of the same program under the same conditions (docs/simulate.md); what is compared is the change against the healthy step. Bytes
are those that a rank hands to its carrier, not those of a formula. Cases go in turn, once in each round; medians of rounds.
"""
from __future__ import annotations

import argparse
import copy
import json
import os
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

import autoshard
from autoshard.base.mesh import Mesh, parse_mesh
from autoshard.collectives import RUN
from autoshard.cost.cluster import Cluster, Link, Overlap, load_cluster
from autoshard.runtime.execute.watched import Doing, watched
from autoshard.simulation.conditions import Conditions
from autoshard.simulation.program import Program
from autoshard.simulation.replay import replay
from autoshard.simulation.simulate import program_for
from benchmarks.pipeline.stage_clock import gathered
from benchmarks.shared.about import about, line, markdown
from models import gpt
from tests.dist.forced import tensor_parallel

MESH = "dp=2,tp=2"
WORK_S, SENDING_S = 2.0, 1.2
"""How long a rank works, and sends, in a healthy step."""
MOST_CALLS = 4096
CASES = {
    "rank 1 takes 1.5 times as long": Conditions(slow_ranks={1: 1.5}),
    "rank 1 1.5 times, rank 2 1.4 times": Conditions(slow_ranks={1: 1.5, 2: 1.4}),
    "node 1's inner link at 40 %": Conditions(slow_links={"inner@1": 0.4}),
    "the link between nodes at 5 %": Conditions(slow_links={"outer": 0.05}),
    "rank 1 1.5 times, node 1's inner link at 40 %": Conditions(slow_ranks={1: 1.5}, slow_links={"inner@1": 0.4}),
}
TARGET = 0.10


@dataclass(frozen=True)
class Row:
    """Seconds of the step that conditions add to the healthy one."""

    case: str
    predicted: float
    measured: float
    spread: float

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1.0


def machine(program: Callable[[Cluster], Program]) -> Cluster:
    """Two nodes of two ranks, scaled so that the program works for WORK_S and sends for SENDING_S. Copies cost next to nothing."""
    base = load_cluster("cpu-gloo")
    device = replace(base.device, kernel_overhead=1e-9, efficiency={**base.device.efficiency, "copy": 1.0, "pointwise": 0.01}, measured={})
    link = Link("inner", 1e-6, 1e-6, 1e9, efficiency=1.0, devices=2.0)
    links = (link, replace(link, name="outer", bandwidth=1.5e8, devices=float("inf")))
    start = Cluster("planted", device, links, Overlap(1.0, 0.0), "made up: sleeps")
    made = program(start)
    work, sending = sum(w.seconds for w in made.works) / WORK_S, sum(c.seconds for c in made.calls) / SENDING_S
    slower = replace(device, memory_bandwidth=device.memory_bandwidth * work, peak={k: v * work for k, v in device.peak.items()})
    return replace(start, device=slower, links=tuple(replace(k, bandwidth=k.bandwidth * sending) for k in links))


class Planted:
    """The time of this rank. `posts`: when each rank called what, by number, in memory that all processes share."""

    def __init__(self, rank: int, posts: np.ndarray, program: Program, cluster: Cluster) -> None:
        self.rank, self.posts, self.cluster, self.mesh = rank, posts, cluster, program.mesh
        self.prices: dict[tuple[str, str], float] = defaultdict(float)
        for work in program.works:
            self.prices["" if work.kind == "update" else work.window, "update" if work.kind == "update" else work.name] += work.seconds
        self.begin(Conditions())

    def begin(self, conditions: Conditions) -> None:
        """A step, now."""
        self.factor, self.slow, self.count = conditions.slow_ranks.get(self.rank, 1.0), conditions.links(self.mesh, self.cluster), 0
        self.deadline, self.done = time.perf_counter(), set[tuple[str, str]]()
        self.free: dict[str, float] = {}
        self.flying: dict[tuple[str, int], int] = {}

    def sleep(self) -> None:
        """Until this rank's work so far is done."""
        left = self.deadline - time.perf_counter()
        if left > 0:
            time.sleep(left)

    def work(self, window: str, name: str) -> None:
        """Once a step, for all the calls that an op is made of."""
        if (window, name) not in self.done:
            self.done.add((window, name))
            self.deadline += self.factor * self.prices.get((window, name), 0.0)

    def around(self, doing: Doing, run: Callable[..., Any]) -> Callable[..., Any]:
        if doing.kind == "call":
            return lambda *args: self.start(doing, run, args)
        if doing.kind == "wait":
            return lambda flight: self.land(doing, run, flight)

        def op(*args: Any, **kwargs: Any) -> Any:
            self.work(doing.window, doing.name)
            return run(*args, **kwargs)

        return op

    def start(self, doing: Doing, run: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        self.sleep()
        self.posts[self.rank, self.count] = self.deadline = time.perf_counter()
        self.flying[doing.window, doing.started], self.count = self.count, self.count + 1
        return run(*args)

    def land(self, doing: Doing, run: Callable[..., Any], flight: Any) -> Any:
        self.sleep()
        sent, number, axis = flight.sent[0].nbytes, self.flying.pop((doing.window, doing.started)), doing.call.axis
        out = run(flight)  # the data, from ranks that have written when they called
        group, ((link, n),) = self.group(axis), self.cluster.link_of(self.mesh, self.mesh.axes(axis)).levels
        sent *= (n - 1) if RUN[doing.call.kind].runs.whole else (n - 1) / n
        share = min([1.0, *(self.slow[link.name].flat[r] for r in group if link.name in self.slow)])
        end = max(self.posts[group, number].max(), self.free.get(axis, 0.0)) + sent / (link.bandwidth * share)
        self.free[axis] = end
        self.deadline = max(time.perf_counter(), end)
        self.sleep()
        return out

    def group(self, axis: str) -> list[int]:
        """The ranks that this one meets over a mesh axis."""
        numbers, axes = np.arange(self.mesh.size).reshape(self.mesh.sizes), self.mesh.axes(axis)
        own = self.mesh.coordinates(self.rank)
        return list(numbers[tuple(slice(None) if i in axes else c for i, c in enumerate(own))].ravel())


def steps(rounds: int, say: Callable[[str], None]) -> tuple[Cluster, Mapping[str, float], Mapping[str, list[float]]]:
    """The machine, and seconds of each case by `replay` and by the clock; called by all ranks."""
    mesh = parse_mesh(MESH)
    model, batch, plan, graph = compiled(mesh)
    cluster = machine(lambda c: program_for(graph, plan, c, executed=True))
    program = program_for(graph, plan, cluster, executed=True)
    planted = Planted(dist.get_rank(), shared_posts(mesh.size), program, cluster)
    cases = {"healthy": Conditions(), **CASES}
    measured: dict[str, list[float]] = {name: [] for name in cases}
    with model.run_by(watched(planted.around, {group: axis for axis, group in model.place.groups.items()})):
        for i in range(rounds + 1):
            for name in [*cases][i % len(cases):] + [*cases][:i % len(cases)]:
                seconds = max(gathered(timed(model, batch, planted, cases[name])))
                if i:  # the first round warms up
                    measured[name].append(seconds)
            say(f"round {i} of {rounds}")
    return cluster, {name: replay(program, cluster, c).step_s for name, c in cases.items()}, measured


def compiled(mesh: Mesh) -> tuple[Any, tuple[torch.Tensor, ...], autoshard.Plan, Any]:
    torch.manual_seed(0)
    model, batch = gpt.build("tiny", layers=2, batch=8)
    seeds = tensor_parallel(model, [tuple(x.shape) for x in batch], mesh)
    fast = autoshard.compile(copy.deepcopy(model), str(mesh), batch, loss_fn=gpt.loss, cluster="cpu-gloo", seeds=seeds, cache=False, check_inputs="never")
    fast(*batch).backward()
    return fast, batch, fast.plan, fast._current.graph


def timed(model: Any, batch: Sequence[torch.Tensor], planted: Planted, conditions: Conditions) -> float:
    dist.barrier()
    planted.begin(conditions)
    start = time.perf_counter()
    model.zero_grad()
    model(*batch).backward()
    planted.work("", "update")
    planted.sleep()
    return time.perf_counter() - start


def shared_posts(ranks: int) -> np.ndarray:
    """Zeros that all processes of this machine see, in a file that is gone when they are."""
    names: list[Any] = [None]
    if dist.get_rank() == 0:
        with tempfile.NamedTemporaryFile(delete=False) as f:
            names = [f.name]
        np.memmap(names[0], float, "w+", shape=(ranks, MOST_CALLS)).flush()
    dist.broadcast_object_list(names)
    posts = np.memmap(names[0], float, "r+", shape=(ranks, MOST_CALLS))
    dist.barrier()
    if dist.get_rank() == 0:
        os.unlink(names[0])
    return posts


def rows_of(predicted: Mapping[str, float], measured: Mapping[str, list[float]]) -> list[Row]:
    def change(name: str) -> list[float]:
        return [m - h for m, h in zip(measured[name], measured["healthy"], strict=True)]

    return [Row(name, predicted[name] - predicted["healthy"], median(change(name)), max(change(name)) - min(change(name))) for name in CASES]


def show(rows: Sequence[Row], predicted: Mapping[str, float], measured: Mapping[str, list[float]], rounds: int) -> None:
    print(f"\n{line(about(), f'{rounds} rounds')}\n")
    print(f"healthy step: {1e3 * predicted['healthy']:.1f} ms predicted, {1e3 * median(measured['healthy']):.1f} ms measured\n")
    print(markdown(("planted", "predicted change", "measured change", "its spread", "error"), (
        (r.case, f"{1e3 * r.predicted:+.1f} ms", f"{1e3 * r.measured:+.1f} ms", f"{1e3 * r.spread:.1f} ms", f"{r.error:+.1%}") for r in rows)))
    worst = max(abs(r.error) for r in rows)
    print(f"\nlargest error of a change {worst:.1%}, wanted at most {TARGET:.0%}: {'yes' if worst <= TARGET else 'NO'}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if os.environ.get("WORLD_SIZE") != "4":
        parser.error("start it with: torchrun --nproc-per-node 4 -m benchmarks.simulation.straggler")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    lead = dist.get_rank() == 0
    cluster, predicted, measured = steps(options.rounds, (lambda text: print(text, flush=True)) if lead else lambda text: None)
    if lead:
        rows = rows_of(predicted, measured)
        show(rows, predicted, measured, options.rounds)
        if options.json:
            options.json.write_text(json.dumps({"about": about(), "healthy_s": {"predicted": predicted["healthy"], "measured": measured["healthy"]},
                                                "rows": [{**asdict(r), "error": r.error} for r in rows]}, indent=1) + "\n")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
