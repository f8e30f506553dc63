"""Predicted against measured peak memory of a training step on gloo processes, as a table.

    python benchmarks/memory.py                              # everything
    python benchmarks/memory.py --mesh dp=2 --model gpt      # some of it

Measured is the peak of live tensor storage of rank 0 in the second step (the optimizer's state exists by then): parameters,
gradients, optimizer state, the batch, and every tensor an op returns; workspace inside kernels is not seen.
"""
from __future__ import annotations

import argparse
import importlib
import sys

import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "dist")]

from forced import PLANS, on_batch  # noqa: E402
from harness import on_ranks  # noqa: E402
from live_bytes import LiveBytes  # noqa: E402

import autoshard  # noqa: E402
from autoshard.mesh import parse_mesh  # noqa: E402
from autoshard.plan import Plan  # noqa: E402

MESHES = ("dp=2", "dp=2,tp=2")
SIZES: dict[str, dict[str, Any]] = {
    "mlp": {"widths": (1024, 4096, 4096, 1024), "batch": 8192},
    "gpt": {"layers": 3, "width": 512, "heads": 8, "vocab": 8192, "context": 128, "batch": 16, "seq": 128},
    "llama": {"layers": 3, "width": 512, "heads": 8, "kv_heads": 4, "hidden": 1536, "vocab": 8192, "context": 128, "batch": 16, "seq": 128},
    "bert": {"layers": 3, "width": 512, "heads": 8, "vocab": 8192, "context": 128, "batch": 16, "seq": 128},
    "vit": {"layers": 4, "width": 512, "heads": 8, "patch": 8, "image": 64, "classes": 1024, "batch": 32},
    "resnet": {"width": 64, "image": 64, "classes": 1024, "batch": 16},
    "moe": {"layers": 2, "width": 384, "heads": 6, "hidden": 1024, "experts": 8, "vocab": 8192, "context": 128, "batch": 16, "seq": 128},
    "t5": {"layers": 2, "width": 512, "heads": 8, "head_dim": 64, "hidden": 1536, "vocab": 8192, "context": 128, "batch": 16, "seq": 128},
    "dlrm": {"tables": 8, "rows": 32768, "width": 64, "dense": 16, "bottom": (512, 256), "top": (1024, 512), "batch": 2048},
}
SEARCHED = "searched"
SHARDED_BATCH = "batch alone"
"""The batch is cut, parameters are the search's to place."""


@dataclass(frozen=True)
class Result:
    """Bytes of rank 0, over the whole step and before the optimizer's update; `failure`: a traceback."""

    model: str
    mesh: str
    plan: str
    predicted: float = 0.0
    measured: float = 0.0
    predicted_before: float = 0.0
    measured_before: float = 0.0
    when: str = ""
    failure: str = ""

    @property
    def off(self) -> float:
        return max((self.predicted / self.measured - 1.0, self.predicted_before / self.measured_before - 1.0), key=abs) \
            if self.measured else float("inf")


def run(model: str, mesh: str, plan: str, folder: str) -> Result:
    """On every rank: plan (rank 0 searches), two steps, the second one watched."""
    try:
        return _run(model, mesh, plan)
    except Exception:
        return Result(model, mesh, plan, failure=traceback.format_exc())


def _run(name: str, mesh: str, plan: str) -> Result:
    from torch.distributed.device_mesh import init_device_mesh

    torch.manual_seed(0)
    module, on = importlib.import_module(f"models.{name}"), parse_mesh(mesh)
    model, batch = module.build(**SIZES[name])
    shapes = [tuple(t.shape) for t in batch]
    seeds = PLANS[plan](model, shapes, on) if plan in PLANS else on_batch(shapes, on, on.names) if plan == SHARDED_BATCH else {}
    compiled = autoshard.compile(model, init_device_mesh("cpu", on.sizes, mesh_dim_names=on.names), batch, loss_fn=module.loss,
                                 training=True, seeds=seeds, cluster="cpu-gloo", time_limit=20, cache=False, memory_budget="8GiB")
    del model
    optimizer = torch.optim.AdamW(compiled.parameters(), lr=1e-4)
    step(compiled, optimizer, batch)
    with LiveBytes() as seen:
        seen.track(list(compiled.parameters()), list(compiled.buffers()), [list(s.values()) for s in optimizer.state.values()], batch)
        before = step(compiled, optimizer, batch, seen)
    found: Plan = compiled.plan
    moments = [m for m in found.timeline if m.window != "update"]
    return Result(name, mesh, plan, float(found.memory["total"]), float(seen.peak), float(max(m.total for m in moments)),
                  float(before), f"{found.peak.window}: {found.peak.op}")


def step(model: Any, optimizer: Any, batch: Any, seen: LiveBytes | None = None) -> int:
    """The peak before the update."""
    loss = model(*batch)
    loss.backward()
    before = seen.peak if seen else 0
    optimizer.step()
    optimizer.zero_grad()
    return before


def main() -> int:
    parser = argparse.ArgumentParser(description="Predicted against measured peak memory.")
    parser.add_argument("--model", action="append", choices=list(SIZES))
    parser.add_argument("--mesh", action="append", help=f"default: {' '.join(MESHES)}")
    parser.add_argument("--plan", action="append", choices=[*PLANS, SHARDED_BATCH, SEARCHED])
    options = parser.parse_args()
    print("| model | mesh | plan | predicted MB | measured MB | before the update | measured MB | off | peak at |\n" + "|---" * 9 + "|", flush=True)
    worst = 0.0
    for mesh in options.mesh or MESHES:
        for model in options.model or SIZES:
            for plan in options.plan or [*PLANS, SHARDED_BATCH, SEARCHED]:
                r = on_ranks(parse_mesh(mesh).size, run, model, mesh, plan, "", timeout=900)[0]
                print(line(r), flush=True)
                worst = max(worst, abs(r.off))
    print(f"\nworst: {100 * worst:.1f} %")
    return worst > 0.05


def line(r: Result) -> str:
    if r.failure:
        return f"| {r.model} | {r.mesh} | {r.plan} | failed | | | | | {r.failure.strip().splitlines()[-1]} |"
    return (f"| {r.model} | {r.mesh} | {r.plan} | {r.predicted / 1e6:.1f} | {r.measured / 1e6:.1f} | "
            f"{r.predicted_before / 1e6:.1f} | {r.measured_before / 1e6:.1f} | {100 * r.off:+.1f} % | "
            f"{r.when} |")


if __name__ == "__main__":
    sys.exit(main())
