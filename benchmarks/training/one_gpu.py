"""Training steps of real models on one GPU: measured beside predicted, memory beside planned, compiled beside eager mode.

    python -m benchmarks.training.one_gpu
    python -m benchmarks.training.one_gpu --models llama-1B,resnet50 --rounds 30 --cluster my-gpu.toml --json out.json --ops ops.json

A step is zero_grad, forward, backward and an AdamW update (as `torch.optim.AdamW(parameters)` does it). Eager mode and the compiled model take turns;
a time is the median over rounds, from one synchronization with the device to the next. "predicted" is what the plan says of its step, "busy" the time
in which kernels run, of one profiled step; what is left of a measured step is the host's. Memory is the most that torch allocated in a step, parameters and
optimizer state with it. `--ops` writes what every op took by its shapes, compiled and in eager mode: that is what a cluster profile's numbers can be held against.
"""
from __future__ import annotations

import argparse
import copy
import gc
import importlib
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

import autoshard
from autoshard.errors import AutoshardError
from benchmarks.shared.about import about, line, markdown
from benchmarks.shared.rounds import interleaved, ratio


@dataclass(frozen=True)
class Case:
    """A model of `models/`, what to build it with, and its dtype."""

    module: str
    size: str
    options: dict[str, int]
    dtype: torch.dtype = torch.bfloat16


CASES = {
    "gpt-124M": Case("gpt", "124M", {"batch": 16, "seq": 1024}),
    "gpt-124M-fp32": Case("gpt", "124M", {"batch": 4, "seq": 1024}, torch.float32),
    "llama-1B": Case("llama", "1B", {"batch": 4, "seq": 2048}),
    "bert-base": Case("bert", "base", {"batch": 32, "seq": 512}),
    "vit-b16": Case("vit", "b16", {"batch": 128}),
    "t5-base": Case("t5", "base", {"batch": 16, "seq": 512}),
    "moe-small": Case("moe", "small", {"batch": 8, "seq": 1024}),
    "resnet50-fp32": Case("resnet", "50", {"batch": 64}, torch.float32),
    "dlrm-fp32": Case("dlrm", "small", {"batch": 8192}, torch.float32),
}
TINY = {name: Case(c.module, "tiny", {}, torch.float32) for name, c in CASES.items()}


@dataclass(frozen=True)
class Row:
    """Seconds and bytes of a step. `ratio`: compiled / eager and its interval. `loss_off`: the first losses' relative difference."""

    model: str
    predicted: float
    compiled: float
    eager: float
    busy: float
    planned_bytes: float
    measured_bytes: float
    ratio: tuple[float, float, float]
    loss_off: float
    parts: dict[str, float]


def run_case(name: str, case: Case, device: torch.device, cluster: str | None, rounds: int) -> tuple[Row, dict[str, Any]]:
    """Compile, compare, time."""
    module = importlib.import_module(f"models.{case.module}")
    torch.manual_seed(0)
    with device:
        model, batch = module.build(case.size, **case.options)
    model, batch = model.to(case.dtype), tuple(t.to(case.dtype) if t.is_floating_point() else t for t in batch)
    twin = copy.deepcopy(model)
    compiled = autoshard.compile(model, "one=1", batch, loss_fn=module.loss, cluster=cluster, cache=False, device=device)
    del model
    peak, first = trained(compiled, lambda: compiled(*batch), device)
    eager_step, want = stepper(twin, lambda: module.loss(twin(*batch[:-1]), batch[-1]))
    step, _ = stepper(compiled, lambda: compiled(*batch))
    loss_off = abs(first - want()) / abs(first)
    for _ in range(3):
        eager_step(), step()
    times = interleaved({"eager": eager_step, "compiled": step}, rounds)
    (busy, compiled_ops), (_, eager_ops) = ops_of(step, device), ops_of(eager_step, device)
    plan = compiled.plan
    parts = {k: float(v) for k, v in plan.predicted.items() if isinstance(v, (int, float))}
    row = Row(name, plan.objective_s, median(times["compiled"]), median(times["eager"]), busy, plan.memory["total"], peak,
              ratio(times["compiled"], times["eager"]), loss_off, parts)
    return row, {"compiled": compiled_ops, "eager": eager_ops}


def stepper(model: nn.Module, loss: Callable[[], torch.Tensor]) -> tuple[Callable[[], None], Callable[[], float]]:
    """A training step, and one that tells its loss."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def told() -> float:
        optimizer.zero_grad()
        value = loss()
        value.backward()
        optimizer.step()
        return float(value.detach())

    def step() -> None:
        optimizer.zero_grad()
        loss().backward()
        optimizer.step()

    return step, told


def trained(model: nn.Module, loss: Callable[[], torch.Tensor], device: torch.device) -> tuple[float, float]:
    """(the most bytes allocated in the second step, beside what was before it was made; the first loss). Weights are as before."""
    kept = [p.detach().clone() for p in model.parameters()]
    other = allocated(device) - held_by(model)  # the twin's weights, the batch, and what was kept
    step, told = stepper(model, loss)
    first = told()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    step()
    peak = torch.cuda.max_memory_allocated() - other if device.type == "cuda" else float("nan")
    with torch.no_grad():
        for p, before in zip(model.parameters(), kept, strict=True):
            p.copy_(before)
    model.zero_grad()
    return peak, first


def held_by(model: nn.Module) -> int:
    return sum(t.nbytes for t in {id(t): t for t in (*model.parameters(), *model.buffers())}.values())


def allocated(device: torch.device) -> int:
    return torch.cuda.memory_allocated() if device.type == "cuda" else 0


def ops_of(step: Callable[[], None], device: torch.device) -> tuple[float, list[dict[str, Any]]]:
    """(seconds in which the device computes, seconds and count of every op by its shapes) of one step."""
    on_gpu = device.type == "cuda"
    with profile(activities=[ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * on_gpu, record_shapes=True) as seen:
        step()
        if on_gpu:
            torch.cuda.synchronize()
    table = []
    for e in seen.key_averages(group_by_input_shape=True):
        own = (e.self_device_time_total if on_gpu else e.self_cpu_time_total) * 1e-6
        if own > 0 and "::" in e.key and (not on_gpu or str(e.device_type).endswith("CPU")):  # the profiler's own work has no such name
            table.append({"op": e.key, "shapes": str(e.input_shapes), "count": e.count, "seconds": own})
    return sum(r["seconds"] for r in table), sorted(table, key=lambda r: -r["seconds"])


def show(rows: Sequence[Row]) -> None:
    print(f"\n{line(about())}\n")
    print(markdown(
        ("model", "predicted ms", "compiled ms", "error", "busy ms", "eager ms", "compiled / eager", "planned GB", "measured GB", "loss off by"),
        [(r.model, f"{r.predicted * 1e3:.2f}", f"{r.compiled * 1e3:.2f}", f"{r.predicted / r.compiled - 1:+.1%}", f"{r.busy * 1e3:.2f}", f"{r.eager * 1e3:.2f}",
          f"{r.ratio[0]:.3f} [{r.ratio[1]:.3f}, {r.ratio[2]:.3f}]", f"{r.planned_bytes / 1e9:.3f}", f"{r.measured_bytes / 1e9:.3f}", f"{r.loss_off:.1e}")
         for r in rows]))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(CASES), help="with commas: " + ", ".join(CASES))
    parser.add_argument("--tiny", action="store_true", help="the same models, tiny and in float32")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--cluster", default=None, help="profile to predict with; default: that of the device")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--ops", type=Path)
    a = parser.parse_args()
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    rows, ops, failed = [], {}, 0
    for name in a.models.split(","):
        try:
            row, ops[name] = run_case(name, (TINY if a.tiny else CASES)[name], device, a.cluster, a.rounds)
        except (RuntimeError, AutoshardError) as e:  # out of memory, say: the others can be measured
            failed += 1
            print(f"{name}: {type(e).__name__}: {e}", file=sys.stderr, flush=True)
        else:
            rows.append(row)
            print(f"{name}: {row.predicted * 1e3:.2f} ms predicted, {row.compiled * 1e3:.2f} measured", file=sys.stderr, flush=True)
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
        if a.json:
            a.json.write_text(json.dumps({"about": about(), "rows": [asdict(r) for r in rows]}, indent=1))
        if a.ops:
            a.ops.write_text(json.dumps(ops))
    show(rows)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
