"""A step of a pipeline, measured and played: two processes, a stage on each.

    torchrun --nproc-per-node 2 -m benchmarks.pipeline.pipeline_measured
    torchrun --nproc-per-node 2 -m benchmarks.pipeline.pipeline_measured --model gpt --schedule 1f1b --microbatches 4 --rounds 10 --json out.json
    torchrun --nproc-per-node 2 -m benchmarks.pipeline.pipeline_measured --cuts

A step is `loss = model(x, target); loss.backward()`, without an update. Every process uses one thread. "played" is the schedule by the player
(pipeline/action_lists/play.py) with durations that were measured apart from it:

    F, B, I, W   of each stage while the other process waits: the rank runs its own turns, and what it receives is there at once
    wire         half a round trip of as many bytes between the two processes
    rest         the step of a rank alone less its windows (results, sums, handing out), and tied gradients on their way

So it says whether the runner does what the player says, whatever a profile says of ops. Rounds go through: each rank alone, the step, the step once
more; medians of rounds. "A/A" is the second series of steps over the first, with its 95 % interval: closer than that means nothing. "idle" is the
mean over ranks of 1 - computing / (first begin to last end of any window). On a machine that is not quiet a rank computes longer beside the
other one than alone ("beside"), and so the step is longer than played. "as beside" plays the schedule with the durations that windows had in the schedule. "asleep" measures
steps whose windows sleep as long as they took alone: what is left is the runner's own, on a busy machine too.

`--cuts`: searched cuts against equal layers (embedding and head count as a layer each), the same schedule, on models with a small and with a large
vocabulary.
"""
from __future__ import annotations

import argparse
import copy
import importlib
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

import autoshard
from autoshard.pipeline.cutting.blocks import Blocks
from autoshard.program.trace import trace
from benchmarks.pipeline.stage_clock import Alone, Clock, asleep, gathered, played_with
from benchmarks.shared.about import about, line, markdown
from benchmarks.shared.rounds import interleaved, ratio

SMALL: dict[str, dict[str, Any]] = {
    "gpt": dict(layers=4, width=256, heads=4, vocab=2048, context=64, batch=8),
    "llama": dict(layers=4, width=256, heads=4, kv_heads=2, hidden=704, vocab=2048, seq=64, batch=8)}
"""A step takes some 100 ms."""
LARGE: dict[str, dict[str, Any]] = {
    "gpt": dict(layers=4, width=1024, heads=16, vocab=8192, context=128, batch=8),
    "llama": dict(layers=4, width=1024, heads=16, kv_heads=8, hidden=2816, vocab=8192, seq=128, batch=8)}
SIZES = {"small": SMALL, "large": LARGE}
VOCABULARIES = (512, 16384)
SCHEDULES = ("gpipe", "1f1b", "zb1p")
STEP, IDLE, WINS = 0.10, 0.03, 0.05


@dataclass(frozen=True)
class Row:
    """Seconds; `idle`: shares. `played`: with durations alone; `there`: with those in the schedule; `slept`: measured, with windows that sleep as long
    as they take alone. `beside`: how much longer windows take while the other rank computes, than alone."""

    model: str
    schedule: str
    microbatches: int
    cuts: str
    played: float
    there: float
    measured: float
    again: tuple[float, float, float]
    idle_played: float
    idle_there: float
    idle_measured: float
    rest: float
    beside: float
    slept: float
    idle_slept: float

    @property
    def off(self) -> float:
        return self.measured / self.played - 1.0

    @property
    def good(self) -> bool:
        return abs(self.off) <= STEP and abs(self.idle_measured - self.idle_played) <= IDLE


def compiled(name: str, sizes: dict[str, Any], pipeline: autoshard.Pipeline, cluster: str) -> tuple[Any, tuple[torch.Tensor, ...]]:
    module = importlib.import_module(f"models.{name}")
    torch.manual_seed(0)
    model, batch = module.build("tiny", **sizes)
    return autoshard.compile(copy.deepcopy(model), "pp=2", batch, loss_fn=module.loss, pipeline=pipeline, cluster=cluster, cache=False,
                             check_inputs="never", time_limit=20), batch


def training_step(model: Any, batch: tuple[torch.Tensor, ...]) -> Callable[[], None]:
    def run() -> None:
        model.zero_grad()
        model(*batch).backward()

    return run


def in_turn(work: Callable[[], None]) -> None:
    """One rank after the other, while the rest wait."""
    for rank in range(dist.get_world_size()):
        dist.barrier()
        if dist.get_rank() == rank:
            work()
    dist.barrier()


def measure(name: str, pipeline: autoshard.Pipeline, options: argparse.Namespace) -> Row:
    model, batch = compiled(name, SIZES[options.size][name], pipeline, options.cluster)
    step, clock, again = training_step(model, batch), Clock(), Clock()
    for _ in range(2):
        step()
    alone = Alone(model, batch)
    in_turn(alone.step)
    alone.clear()
    times: dict[str, list[float]] = {"step": [], "again": []}
    steps = {"step": clock.around(step), "again": again.around(step)}
    for i in range(options.rounds):
        in_turn(alone.step)
        for key in ("step", "again") if i % 2 else ("again", "step"):
            times[key] += interleaved({key: steps[key]}, 1)[key]
    asleep_clock = Clock()
    with asleep(alone, step):
        slept = interleaved({"asleep": asleep_clock.around(step)}, options.rounds)["asleep"]
    said, there = played_with([alone.clock, clock], alone, options.rounds)
    beside = max(gathered(median(clock.busy()) / median(alone.clock.busy()) - 1.0))
    return Row(name, pipeline.schedule, int(pipeline.microbatches), model.plan.pipeline["layout"], said.step, there.step, median(times["step"]),
               ratio(times["again"], times["step"]), said.idle, there.idle, clock.idle(), said.rest, beside, median(slept), asleep_clock.idle())


def equal_cut(name: str, sizes: dict[str, Any]) -> tuple[str, ...]:
    """Embedding and head count as a layer each; the cut in the middle."""
    module = importlib.import_module(f"models.{name}")
    model, batch = module.build("tiny", **sizes)
    names = Blocks.of(trace(model, batch, {}, loss_fn=module.loss).graph).names
    return (names[len(names) // 2],)


def against_equal(name: str, vocab: int, options: argparse.Namespace) -> tuple[Any, ...]:
    """A row: ratio of steps with equal layers over steps with the searched cut, priced and measured."""
    sizes = {**SIZES[options.size][name], "vocab": vocab}
    schedule, count = options.schedule[0], options.microbatches[0]
    cuts = {"searched": "auto", "equal": equal_cut(name, sizes), "searched again": "auto"}
    found = {key: compiled(name, sizes, autoshard.Pipeline(count, schedule, cut), options.cluster) for key, cut in cuts.items()}
    steps = {key: training_step(*f) for key, f in found.items()}
    for step in steps.values():
        step()
    times = interleaved(steps, options.rounds)
    plans = {key: f[0].plan for key, f in found.items()}
    priced = plans["equal"].pipeline["makespan_s"] / plans["searched"].pipeline["makespan_s"]
    return (name, vocab, schedule, count, plans["searched"].pipeline["layout"], plans["equal"].pipeline["layout"], f"{priced:.3f}",
            interval(ratio(times["equal"], times["searched"])), interval(ratio(times["searched again"], times["searched"])))


def interval(found: tuple[float, float, float]) -> str:
    return f"{found[0]:.3f} [{found[1]:.3f}, {found[2]:.3f}]"


def cells(r: Row) -> tuple[Any, ...]:
    return (r.model, r.schedule, r.microbatches, r.cuts, f"{1e3 * r.played:.1f}", f"{1e3 * r.measured:.1f}", f"{r.off:+.1%}", interval(r.again),
            f"{r.idle_played:.1%}", f"{r.idle_measured:.1%}", f"{100 * (r.idle_measured - r.idle_played):+.1f}", "yes" if r.good else "NO",
            f"{1e3 * r.rest:.1f}", f"{r.beside:+.1%}", f"{r.measured / r.there - 1:+.1%}", f"{100 * (r.idle_measured - r.idle_there):+.1f}",
            f"{r.slept / r.played - 1:+.1%}", f"{100 * (r.idle_slept - r.idle_played):+.1f}")


COLUMNS = ("model", "schedule", "M", "stages", "played ms", "measured ms", "off", "A/A", "idle played", "idle measured", "points", "within", "rest ms",
           "beside", "off, as beside", "points, as beside",
           "off, asleep", "points, asleep")
CUT_COLUMNS = ("model", "vocabulary", "schedule", "M", "searched", "equal layers", "equal / searched, priced", "measured", "A/A")


def rows(options: argparse.Namespace) -> Iterator[Row]:
    for name in options.model:
        for schedule in options.schedule:
            for count in options.microbatches:
                row = measure(name, autoshard.Pipeline(count, schedule, "auto"), options)
                if dist.get_rank() == 0:
                    print(" ".join(map(str, cells(row))), flush=True)
                yield row


def run(options: argparse.Namespace) -> None:
    lead = dist.get_rank() == 0
    facts = about()
    said = line(facts, "2 processes", f"{options.rounds} rounds", f"size {options.size}")
    if options.cuts:
        table = [against_equal(name, vocab, options) for name in options.model for vocab in VOCABULARIES]
        if lead:
            print(f"{said}\n\n{markdown(CUT_COLUMNS, table)}")
        return
    found = list(rows(options))
    if lead:
        print(f"\n{said}\n\n{markdown(COLUMNS, map(cells, found))}\n")
        print(f"{sum(r.good for r in found)} of {len(found)} have a step within {STEP:.0%} of played and idle within {100 * IDLE:.0f} points; "
              f"median {median(abs(r.off) for r in found):.1%} and {100 * median(abs(r.idle_measured - r.idle_played) for r in found):.1f} points; as beside "
              f"{median(abs(r.measured / r.there - 1) for r in found):.1%} and "
              f"{100 * median(abs(r.idle_measured - r.idle_there) for r in found):.1f} points, asleep {median(abs(r.slept / r.played - 1) for r in found):.1%} "
              f"and {100 * median(abs(r.idle_slept - r.idle_played) for r in found):.1f} points")
        if options.json:
            options.json.write_text(json.dumps({**facts, "rounds": options.rounds, "rows": [asdict(r) for r in found]}, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", action="append", choices=tuple(SMALL))
    parser.add_argument("--schedule", action="append", help=f"default: {', '.join(SCHEDULES)}")
    parser.add_argument("--microbatches", action="append", type=int, help="default: 1, 2, 4, 8; they divide the batch of 8")
    parser.add_argument("--size", choices=tuple(SIZES), default="small")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--cluster", default="cpu-gloo", help="profile to plan for")
    parser.add_argument("--cuts", action="store_true", help="searched cuts against equal layers")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    options.model = options.model or tuple(SMALL)
    options.schedule = options.schedule or (("1f1b",) if options.cuts else SCHEDULES)
    options.microbatches = options.microbatches or ((4,) if options.cuts else (1, 2, 4, 8))
    if os.environ.get("WORLD_SIZE") != "2":
        parser.error("start with `torchrun --nproc-per-node 2 -m benchmarks.pipeline.pipeline_measured ...`")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    try:
        run(options)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
