"""Planning with mesh, stages, micro-batches, schedule and cuts all open: CPU seconds, memory and gap.

    python -m benchmarks.search.free_mesh llama:8B llama:70B              # minutes each
    python -m benchmarks.search.free_mesh llama:405B --time-limit 400     # limits are wall clock: give more on a busy machine
    python -m benchmarks.search.free_mesh gpt:39B --lines                 # and what each shape was found to take, as it is searched

llama in bf16 on h100-dgx, at the batches of `CASES`; gpt as in Megatron's table of 2021 (fp16 with fp32 masters, a100-dgx). Models are on the meta
device. A case runs in a process of its own, so that its peak memory is its own.
"""
from __future__ import annotations

import argparse
import resource
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

import autoshard
from autoshard.decide.phase_timer import cpu_seconds
from models import gpt, llama


@dataclass(frozen=True)
class Case:
    devices: int
    batch: int
    seq: int
    cluster: str
    build: Callable[[], torch.nn.Module]
    loss: Callable[..., torch.Tensor]
    options: dict[str, Any]


def _llama(size: str, devices: int, batch: int) -> Case:
    return Case(devices, batch, 8192, "h100-dgx", lambda: llama.Llama(llama.SIZES[size]).to(torch.bfloat16), llama.loss, {})


def _gpt(layers: int, width: int, heads: int, devices: int, batch: int) -> Case:
    def build() -> torch.nn.Module:
        return gpt.build(batch=1, seq=2048, layers=layers, width=width, heads=heads, vocab=51200, context=2048)[0]

    return Case(devices, batch, 2048, "a100-dgx", build, gpt.loss, {"precision": autoshard.Precision(param="fp16", master="fp32", reduce="fp16")})


CASES = {
    "llama:8B": _llama("8B", 64, 16), "llama:70B": _llama("70B", 4096, 1024), "llama:405B": _llama("405B", 16384, 2048),
    "gpt:1.7B": _gpt(24, 2304, 24, 32, 512), "gpt:18.4B": _gpt(40, 6144, 48, 256, 1024), "gpt:39B": _gpt(48, 8192, 64, 512, 1536),
}
HEADER = "| model | devices, batch | chosen | step | bound | gap | shapes, searched | CPU s | GiB |\n" + "| --- " * 9 + "|"


def run(name: str, time_limit: float, lines: bool) -> None:
    case, start = CASES[name], cpu_seconds()
    with torch.device("meta"):
        model, x = case.build(), torch.zeros(case.batch, case.seq, dtype=torch.int64)

    def tell(phase: str, detail: str) -> None:
        if lines and phase == "shapes":
            print(f"{cpu_seconds() - start:8.1f} s {_peak():5.2f} GiB  {detail}", file=sys.stderr, flush=True)

    plan = autoshard.plan(model, case.devices, (x, x), loss_fn=case.loss, cluster=case.cluster, time_limit=time_limit, progress=tell, **case.options)
    own = plan.pipeline or {}
    chosen = ", ".join([str(plan.mesh), *(f"{word} {own[key]}" for key, word in (("schedule", ""), ("microbatches", "M")) if own.get(key))])
    searched = sum(s.step_s is not None or s.about_s is not None for s in plan.shapes)
    print(f"| {name} | {case.devices}, {case.batch} x {case.seq} | {chosen} | {plan.objective_s:.4g} s | {plan.bound_s:.4g} s | {plan.gap:.1%} | "
          f"{len(plan.shapes)}, {searched} | {cpu_seconds() - start:.0f} | {_peak():.2f} |", flush=True)


def _peak() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help=f"of {', '.join(CASES)}; default: llama:8B llama:70B")
    parser.add_argument("--time-limit", type=float, default=60.0, help="of one search, seconds of wall clock; searches of blocks get an eighth")
    parser.add_argument("--lines", action="store_true")
    parser.add_argument("--here", action="store_true", help="in this process, without the header")
    args = parser.parse_args()
    names = args.names or ["llama:8B", "llama:70B"]
    if unknown := [name for name in names if name not in CASES]:
        parser.error(f"no case {unknown[0]}; there are {', '.join(CASES)}")
    if args.here:
        for name in names:
            run(name, args.time_limit, args.lines)
        return
    print(HEADER, flush=True)
    for name in names:
        more = ["--lines"] if args.lines else []
        subprocess.run([sys.executable, "-m", __spec__.name, name, "--here", "--time-limit", str(args.time_limit), *more], check=True)


if __name__ == "__main__":
    main()
