"""Simulated and measured steps of plans of small models on local processes, with prices of a profile alone and with op times of one process.

    torchrun --nproc-per-node 2 -m autoshard calibrate -o my.toml --seconds 45
    torchrun --nproc-per-node 2 benchmarks/simulation.py --cluster my.toml [--seconds 400] [--models gpt,mlp] [--json out.json]
    torchrun --nproc-per-node 2 benchmarks/simulation.py --cluster my.toml --quick

A step is zero_grad, forward, backward and an AdamW update (lr = 0: numbers do not move), with one thread per process. The program is simulated as it
is executed, three times:

    profile   ops, update and collectives at the profile's prices
    alone     every op, the update and the rest of the step (Python, autograd) as they take on one process while the other rests: the rank's own
              lowered program, with its collectives left out. Collectives at the profile's prices, each rank with its own times, round by round
    beside    the same, taken on all processes at once, which share the machine's memory and caches

None of them sees a timing of the step that it predicts, and nothing is fitted to a row. Rounds go through all plans of a model in turn, starting with
another one each time: alone, beside, the step and the step again, behind a warm-up. There are as many rounds as fit into --seconds. Everything said is a
median over rounds. "A/A" is the second series of steps over the first: closer than its error means nothing.
"""
from __future__ import annotations

import argparse
import copy
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean, median
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "dist")]

from about import about, line, markdown  # noqa: E402
from forced import data_parallel, fully_sharded, tensor_parallel  # noqa: E402
from op_times import Alone, Times, simulated_rounds  # noqa: E402
from prediction import rank_correlation  # noqa: E402
from stage_clock import gathered  # noqa: E402

import autoshard  # noqa: E402
from autoshard.base.mesh import Mesh  # noqa: E402
from autoshard.cost.cluster import Cluster, load_cluster  # noqa: E402
from models import bert, gpt, llama, mlp, resnet, vit  # noqa: E402

MODELS: dict[str, tuple[Any, dict[str, Any]]] = {
    "gpt": (gpt, {"layers": 2, "width": 512, "heads": 8, "vocab": 4096, "context": 128, "batch": 8}),
    "llama": (llama, {"layers": 2, "width": 512, "heads": 8, "kv_heads": 4, "hidden": 1408, "vocab": 4096, "seq": 128, "batch": 4}),
    "mlp": (mlp, {"widths": (512, 2048, 2048, 512), "batch": 512}),
    "resnet": (resnet, {"width": 32, "image": 64, "classes": 128, "batch": 16}),
    "vit": (vit, {"layers": 2, "width": 384, "heads": 6, "patch": 8, "image": 64, "classes": 128, "batch": 8}),
    "bert": (bert, {"layers": 2, "width": 512, "heads": 8, "vocab": 4096, "context": 128, "batch": 8}),
}
CONVOLUTIONS = ("resnet",)
SEARCH_S, PLANNING_S = 15.0, 3.0
"""Of a plan: how long its search may take, and how long planning it usually takes, which is taken off its rounds' time."""
LEAST_ROUNDS, MOST_ROUNDS = 3, 25
MODES = ("profile", "alone", "beside")
MEDIAN, TENTH, SIGNED, RANKS = "median error", "90 % of errors within", "signed mean", "rank correlation"
TARGETS = {"profile": {MEDIAN: 0.05}, "alone": {MEDIAN: 0.03, TENTH: 0.08, SIGNED: 0.02, RANKS: 0.98}, "beside": {}}


@dataclass(frozen=True)
class Row:
    """Seconds per step: simulated by three kinds of prices, measured, and measured again."""

    model: str
    plan: str
    profile: float
    alone: float
    beside: float
    measured: float
    again: float
    rounds: int

    def error(self, mode: str) -> float:
        return float(getattr(self, mode)) / self.measured - 1.0

    @property
    def floor(self) -> float:
        return self.again / self.measured - 1.0


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

    def __init__(self, label: str, model: nn.Module, batch: tuple[Any, ...], loss: Any, seeds: Seeds | None, cluster: str, mesh: Mesh) -> None:
        self.label = label
        self.compiled = autoshard.compile(copy.deepcopy(model), str(mesh), batch, loss_fn=loss, cluster=cluster, seeds=seeds, cache=False,
                                          check_inputs="never", time_limit=SEARCH_S)
        self.step = training_step(self.compiled, batch)
        for _ in range(2):
            self.step()
        self.taken = Alone(self.compiled, self.step)
        self.alone: list[Times] = []
        self.beside: list[Times] = []
        self.steps: list[float] = []
        self.again: list[float] = []

    def round(self, number: int) -> None:
        """Every rank by itself, all of them without collectives, and the step, twice."""
        dist.barrier()
        self.taken.run()
        for rank in range(dist.get_world_size()):
            dist.barrier()
            if rank == dist.get_rank():
                self.alone.append(self.taken.times())
        dist.barrier()
        self.beside.append(self.taken.times())
        for into in (self.steps, self.again) if number % 2 else (self.again, self.steps):
            dist.barrier()
            start = time.perf_counter()
            self.step()
            into.append(time.perf_counter() - start)

    def simulated(self, times: Sequence[Times], cluster: Cluster, mesh: Mesh) -> float:
        """With times of all ranks; called by all of them."""
        rounds = list(zip(*gathered(list(times)), strict=True))
        return median(simulated_rounds(self.taken.doings, rounds, mesh, cluster))

    def row(self, name: str, profile: float, cluster: Cluster, mesh: Mesh) -> Row:
        """A step ends when its last rank does."""
        steps, again = ([max(ranks) for ranks in zip(*gathered(times), strict=True)] for times in (self.steps, self.again))
        return Row(name, self.label, profile, self.simulated(self.alone, cluster, mesh), self.simulated(self.beside, cluster, mesh), median(steps),
                   median(again), len(steps))


def training_step(model: Any, batch: tuple[Any, ...]) -> Callable[[], None]:
    optimizer = autoshard.local_update(torch.optim.AdamW(model.parameters(), lr=0.0))

    def run() -> None:
        optimizer.zero_grad()
        model(*batch).backward()
        optimizer.step()

    return run


def rows_of(name: str, labels: Sequence[str], options: argparse.Namespace, say: Callable[[str], None]) -> Iterator[Row]:
    """Compile a model under its plans, and take all of them in turn."""
    module, sizes = MODELS[name]
    mesh, cluster = Mesh(("d",), (dist.get_world_size(),)), load_cluster(options.cluster)
    torch.manual_seed(0)
    model, batch = module.build("tiny", **sizes)
    shapes = [tuple(x.shape) for x in batch]
    plans = WITH_CONVOLUTIONS if name in CONVOLUTIONS else PLANS
    subjects = []
    for label, seeds_of in plans.items():
        if not labels or label in labels:
            seeds = seeds_of(model, shapes, mesh) if seeds_of else None
            subjects.append(Subject(label, model, batch, module.loss, seeds, options.cluster, mesh))
            say(f"{name}, {label}: planned ({subjects[-1].compiled.plan.status})")
    until, rounds = time.perf_counter() + options.seconds / len(options.models) - PLANNING_S * len(subjects), 0
    while rounds < LEAST_ROUNDS or rounds < MOST_ROUNDS and gathered(time.perf_counter() < until)[0]:
        for subject in subjects[rounds % len(subjects):] + subjects[:rounds % len(subjects)]:
            subject.round(rounds)
        rounds += 1
    say(f"{name}: {rounds} rounds")
    for subject in subjects:
        profile = autoshard.simulate(subject.compiled.plan, model, batch, loss_fn=module.loss, executed=True).step_s
        yield subject.row(name, profile, cluster, mesh)


def figures(rows: Sequence[Row], mode: str) -> dict[str, float]:
    """What is said of one kind of prices."""
    errors = [r.error(mode) for r in rows]
    return {MEDIAN: median(map(abs, errors)), TENTH: float(np.quantile(np.abs(errors), 0.9)), SIGNED: mean(errors),
            RANKS: rank_correlation([getattr(r, mode) for r in rows], [r.measured for r in rows]) if len(rows) > 1 else 1.0}


def met(said: str, value: float, target: float) -> bool:
    return value >= target if said == RANKS else abs(value) < target


def show(rows: Sequence[Row]) -> None:
    print(f"\n{line(about(), f'{min(r.rounds for r in rows)} to {max(r.rounds for r in rows)} rounds')}\n")
    print(markdown(("model", "plan", "measured ms", "A/A", *(f"{mode} ms" for mode in MODES), *(f"{mode} error" for mode in MODES)), (
        (r.model, r.plan, f"{1e3 * r.measured:.1f}", f"{r.floor:+.1%}", *(f"{1e3 * getattr(r, mode):.1f}" for mode in MODES),
         *(f"{r.error(mode):+.1%}" for mode in MODES)) for r in rows)))
    floor = [abs(r.floor) for r in rows]
    again = rank_correlation([r.again for r in rows], [r.measured for r in rows]) if len(rows) > 1 else 1.0
    print(f"\n{len(rows)} plans of {len({r.model for r in rows})} models; A/A: median {median(floor):.1%}, 90 % within {np.quantile(floor, 0.9):.1%}, "
          f"rank correlation {again:.3f}\n")
    for mode in MODES:
        for said, value in figures(rows, mode).items():
            shown = f"{value:.3f}" if said == RANKS else f"{value:+.1%}" if said == SIGNED else f"{value:.1%}"
            target = TARGETS[mode].get(said)
            verdict = "" if target is None else f"wanted {target if said == RANKS else f'{target:.0%}'}: {'yes' if met(said, value, target) else 'NO'}"
            print(f"{mode:8} {said:24} {shown:>7}  {verdict}")
        worst = max({r.model for r in rows}, key=lambda m: median(abs(r.error(mode)) for r in rows if r.model == m))
        of_worst = median(r.error(mode) for r in rows if r.model == worst)
        print(f"{mode:8} {'worst model':24} {worst}, {of_worst:+.1%} (median)")


def options_of() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cluster", required=True, help="the calibrated profile, a .toml file")
    parser.add_argument("--models", help=f"some of {','.join(MODELS)}")
    parser.add_argument("--plans", help="some of the plans, by name, separated by commas")
    parser.add_argument("--seconds", type=float, default=400.0, help="about how long all of it may take on a quiet machine")
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
        parser.error("start it with: torchrun --nproc-per-node 2 benchmarks/simulation.py ...")
    return options


def main() -> None:
    options, start = options_of(), time.perf_counter()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    lead = dist.get_rank() == 0
    rows = []
    for name in options.models:
        rows += rows_of(name, options.plans, options, (lambda text: print(text, flush=True)) if lead else lambda text: None)
    if lead:
        show(rows)
        print(f"{time.perf_counter() - start:.0f} s")
        if options.json:
            found = {"about": about(), "rows": [{**asdict(r), "floor": r.floor} for r in rows],
                     **{mode: figures(rows, mode) for mode in MODES}}
            options.json.write_text(json.dumps(found, indent=1) + "\n")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
