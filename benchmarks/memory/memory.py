"""Predicted against measured peak memory of a training step on gloo processes, as a table.

    python -m benchmarks.memory.memory                              # nine models, five plans each, on 2 and on 4 processes
    python -m benchmarks.memory.memory --mesh dp=2 --model gpt      # some of it
    python -m benchmarks.memory.memory --model gpt --mesh dp=2 --precision bf16 --optimizer adafactor
    python -m benchmarks.memory.memory --results memory.jsonl       # keeps what it found there, and goes on where it stopped

Measured is the peak of live tensor storage of the fullest rank in the second step (the optimizer's state exists by then):
parameters, gradients, optimizer state, the batch, and every tensor an op returns; workspace inside kernels is not seen.
"""
from __future__ import annotations

import argparse
import importlib
import json
import sys
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import autoshard
from autoshard.base.mesh import parse_mesh
from autoshard.base.plan import Plan
from tests.dist.forced import PLANS, on_batch
from tests.dist.harness import on_ranks
from tests.dist.live_bytes import LiveBytes

MESHES = ("dp=2", "dp=2,tp=2")
SIZES: dict[str, dict[str, Any]] = {  # 25 to 35 million parameters: above 100 MB a rank where all is split over four
    "mlp": {"widths": (1024, 4096, 4096, 1024), "batch": 128},
    "gpt": {"layers": 2, "width": 768, "heads": 12, "vocab": 16384, "context": 32, "batch": 4},
    "llama": {"layers": 2, "width": 768, "heads": 12, "kv_heads": 4, "hidden": 2048, "vocab": 12288, "context": 32, "batch": 4},
    "bert": {"layers": 2, "width": 768, "heads": 12, "vocab": 16384, "context": 32, "batch": 4},
    "vit": {"layers": 4, "width": 768, "heads": 12, "patch": 8, "image": 32, "classes": 1024, "batch": 4},
    "resnet": {"width": 96, "image": 32, "classes": 1024, "batch": 8},
    "moe": {"layers": 2, "width": 512, "heads": 8, "hidden": 768, "experts": 8, "vocab": 8192, "context": 32, "batch": 4},
    "t5": {"layers": 2, "width": 768, "heads": 12, "head_dim": 64, "hidden": 2048, "vocab": 8192, "context": 32, "batch": 4},
    "dlrm": {"tables": 8, "rows": 49152, "width": 64, "dense": 16, "bottom": (512, 256), "top": (1024, 512), "batch": 128},
}
SEARCHED = "searched"
SHARDED_BATCH = "batch alone"
"""The batch is cut, parameters are the search's to place."""
OPTIMIZERS = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD, "adafactor": torch.optim.Adafactor}
PRECISIONS = {"fp32": None, "bf16": autoshard.Precision()}


@dataclass(frozen=True)
class Case:
    model: str
    mesh: str
    plan: str
    precision: str = "fp32"
    optimizer: str = "adamw"

    def __str__(self) -> str:
        return f"{self.model} {self.mesh} {self.plan} {self.precision} {self.optimizer}"


@dataclass(frozen=True)
class Result:
    """Bytes of the fullest rank, over the whole step and before the optimizer's update; `failure`: a traceback."""

    case: Case
    predicted: float = 0.0
    measured: float = 0.0
    predicted_before: float = 0.0
    measured_before: float = 0.0
    when: str = ""
    failure: str = ""

    @property
    def off(self) -> float:
        """Relative error: of the peak, or of the peak before the update, whichever is worse."""
        if not self.measured:
            return float("inf")
        return max((self.predicted / self.measured - 1.0, self.predicted_before / self.measured_before - 1.0), key=abs)


# --- on every rank ---

def run(cases: Sequence[Case], results: str | None, time_limit: float) -> list[Result]:
    """Rank 0 adds every result to the file as soon as it has it."""
    found = []
    for case in cases:
        try:
            found.append(measure(case, time_limit))
        except Exception:
            found.append(Result(case, failure=traceback.format_exc()))
        if dist.get_rank() == 0:
            print(line(found[-1]), flush=True)
            if results:
                with open(results, "a") as file:
                    file.write(json.dumps(asdict(found[-1])) + "\n")
    return found


def measure(case: Case, time_limit: float) -> Result:
    """Plan (rank 0 searches), then two steps, the second one watched."""
    from torch.distributed.device_mesh import init_device_mesh

    torch.manual_seed(0)
    module, on = importlib.import_module(f"models.{case.model}"), parse_mesh(case.mesh)
    model, batch = module.build(**SIZES[case.model])
    compiled = autoshard.compile(model, init_device_mesh("cpu", on.sizes, mesh_dim_names=on.names), batch, loss_fn=module.loss,
                                 training=True, seeds=seeds_of(case, model, batch), cluster="cpu-gloo", time_limit=time_limit,
                                 cache=False, memory_budget="8GiB", precision=PRECISIONS[case.precision], optimizer=case.optimizer)
    del model
    optimizer = OPTIMIZERS[case.optimizer](compiled.parameters(), lr=1e-4)
    step(compiled, optimizer, batch)
    with LiveBytes() as seen:
        seen.track(list(compiled.parameters()), list(compiled.buffers()), [list(s.values()) for s in optimizer.state.values()], batch)
        before = step(compiled, optimizer, batch, seen)
    fullest = torch.tensor([seen.peak, before])
    dist.all_reduce(fullest, dist.ReduceOp.MAX)
    return compared(case, compiled.plan, *map(float, fullest))


def seeds_of(case: Case, model: torch.nn.Module, batch: Sequence[torch.Tensor]) -> dict[str, Any]:
    shapes, on = [tuple(t.shape) for t in batch], parse_mesh(case.mesh)
    if case.plan == SEARCHED:
        return {}
    return on_batch(shapes, on, on.names) if case.plan == SHARDED_BATCH else PLANS[case.plan](model, shapes, on)


def step(model: Any, optimizer: Any, batch: Any, seen: LiveBytes | None = None) -> int:
    """The peak before the update."""
    loss = model(*batch)
    loss.backward()
    before = seen.peak if seen else 0
    optimizer.step()
    optimizer.zero_grad()
    return before


def compared(case: Case, plan: Plan, peak: float, before: float) -> Result:
    earlier = max(m.total for m in plan.fullest.timeline if m.window != "update")
    return Result(case, float(plan.memory["total"]), peak, float(earlier), before, f"{plan.fullest.peak.window}: {plan.fullest.peak.op}")


# --- the table ---

def main() -> int:
    options = arguments()
    if options.page:
        print(table(earlier(options.results)))
        return 0
    found = earlier(options.results)
    done = {r.case for r in found if not r.failure}
    print(HEAD, flush=True)
    for mesh, cases in jobs(options):
        todo = [c for c in cases if c not in done]
        if todo:
            found += on_ranks(parse_mesh(mesh).size, run, todo, options.results, options.time_limit, timeout=900.0 * len(todo))[0]
    wanted = {c for _, cases in jobs(options) for c in cases}
    worst = max(abs(r.off) for r in latest(found) if r.case in wanted)
    print(f"\nworst of {len(wanted)}: {100 * worst:.2f} %")
    return worst > 0.05


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Predicted against measured peak memory.")
    parser.add_argument("--model", action="append", choices=list(SIZES))
    parser.add_argument("--mesh", action="append", help=f"default: {' '.join(MESHES)}")
    parser.add_argument("--plan", action="append", choices=[*PLANS, SHARDED_BATCH, SEARCHED])
    parser.add_argument("--precision", choices=list(PRECISIONS), default="fp32")
    parser.add_argument("--optimizer", choices=list(OPTIMIZERS), default="adamw")
    parser.add_argument("--time-limit", type=float, default=10.0, help="seconds of search per plan")
    parser.add_argument("--results", help="file of results, a JSON object per line: what is there is not run again")
    parser.add_argument("--page", action="store_true", help="run nothing, print the table of --results")
    return parser.parse_args()


def jobs(options: argparse.Namespace) -> Iterator[tuple[str, list[Case]]]:
    """Cases that share their processes."""
    for mesh in options.mesh or MESHES:
        for model in options.model or SIZES:
            yield mesh, [Case(model, mesh, plan, options.precision, options.optimizer)
                         for plan in options.plan or [*PLANS, SHARDED_BATCH, SEARCHED]]


def earlier(results: str | None) -> list[Result]:
    """What a file holds."""
    if results is None or not Path(results).exists():
        return []
    rows = [json.loads(text) for text in Path(results).read_text().splitlines()]
    return [Result(**{**row, "case": Case(**row["case"])}) for row in rows]


def latest(found: Sequence[Result]) -> list[Result]:
    """The last result of every case: a failure may have been tried again."""
    return list({r.case: r for r in found}.values())


HEAD = ("| model, mesh, plan, precision, optimizer | predicted MB | measured MB | before the update | measured MB | off | peak at |\n"
        + "|---" * 7 + "|")


def table(found: Sequence[Result]) -> str:
    return "\n".join([HEAD, *map(line, latest(found))])


def line(r: Result) -> str:
    if r.failure:
        return f"| {r.case} | failed | | | | | {r.failure.strip().splitlines()[-1]} |"
    return (f"| {r.case} | {r.predicted / 1e6:.1f} | {r.measured / 1e6:.1f} | "
            f"{r.predicted_before / 1e6:.1f} | {r.measured_before / 1e6:.1f} | {100 * r.off:+.2f} % | {r.when} |")


if __name__ == "__main__":
    sys.exit(main())
