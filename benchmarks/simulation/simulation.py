"""Simulated and measured steps of plans of small models on local processes, with prices of a profile alone and with op times of one process.

    torchrun --nproc-per-node 2 -m benchmarks.simulation.simulation [--seconds 570] [--models gpt,mlp] [--json out.json]
    torchrun --nproc-per-node 2 -m benchmarks.simulation.simulation --quick
    torchrun --nproc-per-node 2 -m benchmarks.simulation.simulation --cluster my.toml          # "earlier": that profile

It calibrates, plans, measures, and says which targets are met, in --seconds. A step is zero_grad, forward, backward and an AdamW update (lr = 0: numbers do
not move), with one thread per process. Rounds go through all plans of all models in turn, beginning with another one each time; every round has a round
of the calibration too, so that a machine which changes its speed changes it for both. The program is simulated as it is executed:

    profile   ops, update and collectives at the prices of the profile that the calibration's rounds make
    earlier   the same at the prices of the calibration before the first step: what a user has. The difference to "profile" is the machine's
    one       every op, the update and the rest of the step (Python, autograd) as they take on one process while the other rests: the rank's own
              lowered program, with its collectives left out. Collectives at the profile's prices, each rank with its own times, round by round
    shared    the same times, each multiplied by how much longer the calibration's own cases of that op and of about that length take while all
              processes compute than by one process alone (sharing.py): cores that share memory and caches are slower together
    beside    op times taken on all processes at once

None of them sees a timing of the step that it predicts, and nothing is fitted to a row. Of a plan, a round takes a warm-up, both ranks alone, both beside,
the step and the step again. Errors of op times are medians over rounds of simulated over measured in the same round. "A/A" is the second series of
steps over the first: closer than its error means nothing.
"""
from __future__ import annotations

import argparse
import copy
import json
import os
import resource
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

import autoshard
from autoshard.base.graph import Graph
from autoshard.base.mesh import Mesh
from autoshard.calibrate.run import Measuring
from autoshard.calibrate.toml import profile_text
from autoshard.cost.cluster import Cluster, load_cluster
from autoshard.recompute.rewrite import with_recompute
from autoshard.runtime.ranks.place import locate
from autoshard.simulation.replay import replay
from autoshard.simulation.simulate import program_for
from autoshard.simulation.source import traced_for
from benchmarks.pipeline.stage_clock import gathered
from benchmarks.shared.about import about
from benchmarks.simulation.op_times import Alone, Times, simulated_rounds
from benchmarks.simulation.sharing import OneByOne, Ratios, factors, ratio_at
from benchmarks.simulation.simulated_rows import CONVOLUTIONS, MODES, Row, figures, row, saved, show
from models import bert, gpt, llama, mlp, resnet, vit
from tests.dist.forced import data_parallel, fully_sharded, tensor_parallel

MODELS: dict[str, tuple[Any, dict[str, Any]]] = {
    "gpt": (gpt, {"layers": 2, "width": 512, "heads": 8, "vocab": 4096, "context": 128, "batch": 8}),
    "llama": (llama, {"layers": 2, "width": 512, "heads": 8, "kv_heads": 4, "hidden": 1408, "vocab": 4096, "seq": 128, "batch": 4}),
    "mlp": (mlp, {"widths": (512, 2048, 2048, 512), "batch": 512}),
    "resnet": (resnet, {"width": 32, "image": 64, "classes": 128, "batch": 16}),
    "vit": (vit, {"layers": 2, "width": 384, "heads": 6, "patch": 8, "image": 64, "classes": 128, "batch": 8}),
    "bert": (bert, {"layers": 2, "width": 512, "heads": 8, "vocab": 4096, "context": 128, "batch": 8}),
}
SEARCH_S = 15.0
"""How long the search of a plan may take."""
FIRST_S, FIRST_STEPS, STEPS = 30.0, 20, 4
"""Of the calibration before the first step: seconds of rounds and steps; steps in each later round."""
LEAST_ROUNDS, ROTATED, PRICING_S = 3, 11, 0.8
"""A round begins so many plans after the one before; seconds that are left for the simulations of a plan at the end."""


Seeds = dict[str, tuple[Any, ...]]


def halves(first: Callable[..., Seeds], second: Callable[..., Seeds]) -> Callable[..., Seeds]:
    """One in the first half of the parameters, the other in the second; inputs are left to the search."""
    def of(model: nn.Module, shapes: Sequence[Sequence[int]], mesh: Mesh) -> Seeds:
        a, b, names = first(model, shapes, mesh), second(model, shapes, mesh), [n for n, _ in model.named_parameters()]
        return {n: (a if i < len(names) // 2 else b)[n] for i, n in enumerate(names)}

    return of


PLANS: dict[str, Callable[..., Seeds] | None] = {
    "data parallel": data_parallel, "fully sharded": fully_sharded, "tensor parallel": tensor_parallel, "tensor then sharded":
    halves(tensor_parallel, fully_sharded), "sharded then tensor": halves(fully_sharded, tensor_parallel), "chosen": None}
WITH_CONVOLUTIONS: dict[str, Callable[..., Seeds] | None] = {
    "data parallel": data_parallel, "fully sharded": fully_sharded, "whole then sharded": halves(data_parallel, fully_sharded),
    "sharded then whole": halves(fully_sharded, data_parallel), "chosen": None}


class Subject:
    """A model under one plan on this rank, and what it took round by round."""

    def __init__(self, name: str, label: str, model: nn.Module, batch: tuple[Any, ...], loss: Any, seeds: Seeds | None, cluster: str, mesh: Mesh) -> None:
        self.name, self.label, self.source, self.mesh = name, label, (model, batch, loss), mesh
        self.compiled = autoshard.compile(copy.deepcopy(model), str(mesh), batch, loss_fn=loss, cluster=cluster, seeds=seeds, cache=False,
                                          check_inputs="never", time_limit=SEARCH_S)
        self.step = training_step(self.compiled, batch)
        for _ in range(2):
            self.step()
        self.taken = Alone(self.compiled, self.step)
        self.plan = self.compiled.plan
        self.alone: list[Times] = []
        self.beside: list[Times] = []
        self.steps: list[tuple[float, float]] = []

    def round(self) -> None:
        """Every rank by itself, all of them without collectives, and the step, twice; which of the two is the A alternates."""
        dist.barrier()
        self.taken.run()
        for rank in range(dist.get_world_size()):
            dist.barrier()
            if rank == dist.get_rank():
                self.alone.append(self.taken.times())
        dist.barrier()
        self.beside.append(self.taken.times())
        first, again = self.timed(), self.timed()
        self.steps.append((first, again) if len(self.steps) % 2 else (again, first))

    def timed(self) -> float:
        dist.barrier()
        start = time.perf_counter()
        self.step()
        return time.perf_counter() - start

    def done(self) -> None:
        """What was measured stays; the model's memory is for others."""
        self.doings = self.taken.doings
        del self.compiled, self.taken, self.step

    def row(self, prices: "Prices") -> Row:
        """Called by all ranks. A step ends when its last rank does."""
        (model, batch, loss), plan = self.source, self.plan
        graph = with_recompute(traced_for(plan, model, batch, {}, loss).graph, plan.recompute)
        alone, beside, steps = ([list(ranks) for ranks in zip(*gathered(own), strict=True)] for own in (self.alone, self.beside, self.steps))
        more = factors(self.doings, np.median(self.alone, axis=0).tolist(), graph, plan, prices.profile, prices.together)

        def simulated(rounds: Sequence[Sequence[Times]], factors: Sequence[float] | None = None) -> list[float]:
            return list(simulated_rounds(self.doings, rounds, self.mesh, prices.profile, factors))

        return row(self.name, self.label, [(max(a for a, _ in ranks), max(b for _, b in ranks)) for ranks in steps],
                   {"profile": played(graph, plan, prices.profile), "earlier": played(graph, plan, prices.earlier)},
                   {"one": simulated(alone), "shared": simulated(alone, more), "beside": simulated(beside)})


@dataclass(frozen=True)
class Prices:
    """`profile`: of the calibration's rounds; `earlier`: from before; `together`: how much longer ops take while all processes compute."""

    profile: Cluster
    earlier: Cluster
    together: Ratios


def played(graph: Graph, plan: autoshard.Plan, cluster: Cluster) -> float:
    return replay(program_for(graph, plan, cluster, executed=True), cluster).step_s


def training_step(model: Any, batch: tuple[Any, ...]) -> Callable[[], None]:
    optimizer = autoshard.local_update(torch.optim.AdamW(model.parameters(), lr=0.0))

    def run() -> None:
        optimizer.zero_grad()
        model(*batch).backward()
        optimizer.step()

    return run


def subjects_of(name: str, labels: Sequence[str], cluster: str, mesh: Mesh, say: Callable[[str], None]) -> Iterator[Subject]:
    """A model, compiled under its plans."""
    module, sizes = MODELS[name]
    torch.manual_seed(0)
    model, batch = module.build("tiny", **sizes)
    shapes = [tuple(x.shape) for x in batch]
    for label, seeds_of in (WITH_CONVOLUTIONS if name in CONVOLUTIONS else PLANS).items():
        if not labels or label in labels:
            seeds = seeds_of(model, shapes, mesh) if seeds_of else None
            yield (subject := Subject(name, label, model, batch, module.loss, seeds, cluster, mesh))
            say(f"{name}, {label}: planned ({subject.compiled.plan.status})")


def rows_of(options: argparse.Namespace, begun: float, say: Callable[[str], None]) -> list[Row]:
    """Calibrate, plan, and measure until the time is up; `begun`: when it began to run."""
    mesh = Mesh(("d",), (dist.get_world_size(),))
    measuring = Measuring("this machine", locate(mesh), lambda phase, detail: None)
    if options.cluster:
        earlier = load_cluster(options.cluster)
    else:
        measuring.rounds.run(0.0 if options.quick else FIRST_S, lambda phase, detail: None)
        measuring.some_steps(FIRST_STEPS)
        earlier = measuring.found().cluster
    say(f"calibrated; {time.perf_counter() - begun:.0f} s")
    one_by_one = OneByOne(measuring.rounds)
    share = (options.seconds - (time.perf_counter() - begun)) / len(options.models)
    subjects: list[Subject] = []
    with tempfile.NamedTemporaryFile("w", suffix=".toml") as file:
        file.write(profile_text(earlier, "benchmarks/simulation/simulation.py"))
        file.flush()
        for first in range(0, len(options.models), options.at_once):
            some = options.models[first:first + options.at_once]
            until = time.perf_counter() + share * len(some)
            here = [s for name in some for s in subjects_of(name, options.plans, file.name, mesh, say)]
            rounds_of(here, measuring, one_by_one, until - PRICING_S * len(here), say)
            for subject in here:
                subject.done()
            subjects += here
    prices = Prices(measuring.found().cluster, earlier, one_by_one.ratios())
    say("together over alone, of 10 us and of 1 ms: " + ", ".join(
        f"{kind or 'all'} {ratio_at(cases, 1e-5):.2f} {ratio_at(cases, 1e-3):.2f}" for kind, cases in prices.together.items() if "::" not in kind))
    return [subject.row(prices) for subject in subjects]


def rounds_of(subjects: Sequence[Subject], measuring: Measuring, one_by_one: OneByOne, until: float, say: Callable[[str], None]) -> None:
    """As many as there is time for."""
    rounds, longest = 0, 0.0
    while rounds < LEAST_ROUNDS or gathered(time.perf_counter() + longest < until)[0]:
        start = time.perf_counter()
        measuring.rounds.go()
        measuring.some_steps(STEPS)
        one_by_one.go()
        calibrated = time.perf_counter() - start
        first = rounds * ROTATED % len(subjects)
        for subject in [*subjects[first:], *subjects[:first]]:
            subject.round()
        rounds, longest = rounds + 1, max(longest, time.perf_counter() - start)
        say(f"round {rounds}: {time.perf_counter() - start:.0f} s, of it {calibrated:.0f} for the calibration; "
            f"{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20:.1f} GiB a process")


def options_of() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cluster", help="a profile from before, a .toml file, to plan with; default: this machine is calibrated first")
    parser.add_argument("--models", help=f"some of {','.join(MODELS)}")
    parser.add_argument("--plans", help="some of the plans, by name, separated by commas")
    parser.add_argument("--seconds", type=float, default=570.0, help="about how long all of it may take")
    parser.add_argument("--at-once", type=int, default=len(MODELS), help="models whose plans share rounds: all; fewer where memory is short")
    parser.add_argument("--quick", action="store_true", help="gpt and mlp, three plans each, three rounds: whether it works, not how well")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    options.models = (options.models or ("gpt,mlp" if options.quick else ",".join(MODELS))).split(",")
    options.plans = options.plans.split(",") if options.plans else ["data parallel", "fully sharded", "tensor parallel"] if options.quick else []
    options.seconds = 0.0 if options.quick else options.seconds
    if unknown := set(options.models) - set(MODELS):
        parser.error(f"no model {min(unknown)!r}; choose from {', '.join(MODELS)}")
    if unknown := set(options.plans) - set(PLANS) - set(WITH_CONVOLUTIONS):
        parser.error(f"no plan {min(unknown)!r}; choose from {', '.join({**PLANS, **WITH_CONVOLUTIONS})}")
    if "RANK" not in os.environ:
        parser.error("start it with: torchrun --nproc-per-node 2 -m benchmarks.simulation.simulation ...")
    return options


def main() -> None:
    begun, options = time.perf_counter(), options_of()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    lead = dist.get_rank() == 0
    rows = rows_of(options, begun, (lambda text: print(text, flush=True)) if lead else lambda text: None)
    if lead:
        show(rows)
        print(f"{time.perf_counter() - begun:.0f} s")
        if options.json:
            found = {"about": about(), "rows": saved(rows), **{mode: figures(rows, mode) for mode in MODES}}
            options.json.write_text(json.dumps(found, indent=1) + "\n")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
