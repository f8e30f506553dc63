"""What each thing the lowering does for speed is worth: one plan, run with it and without.

    torchrun --nproc-per-node 2 -m benchmarks.training.passes --model gpt --plan auto-dp
    torchrun --nproc-per-node 1 -m benchmarks.training.passes --model mlp --plan auto
    torchrun --nproc-per-node 4 -m benchmarks.training.passes --model gpt --plan auto-dp --mesh dp=2,tp=2 --only "axes taken as one"

"without / with" is the median over interleaved rounds with a 95 % bootstrap interval; above 1 the thing pays.
Calls are the collectives of one step, "sent" is what one rank sends in them on rings.
"""
from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from autoshard.base.mesh import parse_mesh
from autoshard.collectives import wire_bytes
from autoshard.cost import redistribute
from benchmarks.shared.about import about, line, markdown
from benchmarks.shared.rounds import CLOCKS, interleaved, ratio, spread
from benchmarks.training.contenders import SIZES, Contender, contender, subject


def as_it_is(op: Any) -> Any:
    return op


def nothing(*args: Any) -> frozenset[Any]:
    return frozenset()


def each_alone(flights: Any) -> tuple[Any, ...]:
    return tuple((flight,) for flight in flights)


def no_memory(*args: Any) -> None:
    return None


def alone(sizes: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    return tuple((axis,) for axis in range(len(sizes)))


WITHOUT: dict[str, dict[str, Callable]] = {
    "everything on": {},
    "memory reused in place": {"autoshard.runtime.execute.backends.overwrite": nothing},
    "small gradients in buckets": {"autoshard.lower.schedule.shared_calls": each_alone},
    "early issue, late wait": {"autoshard.lower.schedule.param_derived": nothing, "autoshard.lower.schedule.gradient_bound": nothing},
    "axes taken as one": {"autoshard.cost.redistribute.axis_sets": alone,
                          "autoshard.cost.redistribute.layout": redistribute.layout.__wrapped__},
    "collectives in shared memory": {"autoshard.runtime.ranks.place.share_memory": no_memory},
    "kernels called directly": {"autoshard._torch.kernel": as_it_is},
}


def build(what: str, options: argparse.Namespace) -> Contender:
    """The planned model, run without `what`."""
    on = parse_mesh(options.mesh or f"d={dist.get_world_size()}")
    mesh = init_device_mesh("cpu", on.sizes, mesh_dim_names=on.names)
    model, batch, loss = subject(options.model, options.size)
    with ExitStack() as patched:
        for target, replacement in WITHOUT[what].items():
            patched.enter_context(patch(target, replacement))
        made = contender(options.plan, options.model, model, batch, loss, mesh, options)
        made.train(1)
    return made


def sent(made: Contender) -> tuple[int, float]:
    """(collectives of one step, bytes that a rank sends in them)."""
    step, mesh = made.trained.model._latest[1], made.trained.model.plan.mesh
    return len(step.issues), sum(wire_bytes(i.kind, i.nbytes, mesh.ranks(mesh.axes(i.axis))) for i in step.issues)


def report(made: dict[str, Contender], seconds: dict[str, list[float]], options: argparse.Namespace) -> None:
    facts = {"model": options.model, "size": options.size, "plan": options.plan, "processes": dist.get_world_size(), **about()}
    print(line(facts, f"{facts['processes']} processes", f"{options.rounds} rounds of {options.clock} time") + "\n")
    rows = []
    for what, times in seconds.items():
        middle, low, high = ratio(times, seconds["everything on"])
        calls, nbytes = sent(made[what])
        rows.append((what, f"{1e3 * spread(times)[0]:.1f}", f"{middle:.3f} [{low:.3f}, {high:.3f}]", calls, f"{nbytes / 1e6:.1f}"))
    print(markdown((f"{options.model} {options.size}, {options.plan}; without", "ms/step", "without / with", "calls", "MB sent"), rows))
    if options.json:
        options.json.write_text(json.dumps({**facts, "seconds": seconds}, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=SIZES, default="gpt")
    parser.add_argument("--size", default="small")
    parser.add_argument("--plan", choices=("auto", "auto-dp"), default="auto")
    parser.add_argument("--mesh", help="dp=2,tp=2; default: one axis of all processes")
    parser.add_argument("--only", action="append", choices=[w for w in WITHOUT if WITHOUT[w]], help="this thing alone; may be repeated")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--repeat", type=int, default=1, help="steps per round")
    parser.add_argument("--fused", action="store_true")
    parser.add_argument("--clock", choices=CLOCKS, default="wall")
    parser.add_argument("--cluster", help="profile to plan for")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if "WORLD_SIZE" not in os.environ:
        parser.error("start with `torchrun --nproc-per-node N -m benchmarks.training.passes ...`")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    try:
        made = {what: build(what, options) for what in WITHOUT if not WITHOUT[what] or what in (options.only or WITHOUT)}
        seconds = interleaved({what: c.step for what, c in made.items()}, options.rounds, repeat=options.repeat, clock=CLOCKS[options.clock])
        if dist.get_rank() == 0:
            report(made, seconds, options)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
