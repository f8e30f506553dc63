"""Predicted and measured step times of plans for small models on local processes, priced with a calibrated profile.

    torchrun --nproc-per-node 2 -m autoshard calibrate -o mycluster.toml
    torchrun --nproc-per-node 2 -m benchmarks.simulation.prediction --cluster mycluster.toml [--models gpt,mlp] [--json out.json]

(`python -m torch.distributed.run` where there is no `torchrun`.) A step is zero_grad, forward, backward and an AdamW update; its
measured time is the lower quartile over rounds of the slowest rank, as in the calibration. Rounds go through all plans of a
model in turn. The plans:

    data parallel     parameters whole, the batch split
    fully sharded     parameters and the batch split
    tensor parallel   column, row and vocabulary shards, the batch whole
    mixed             the first half of the parameters as in tensor parallel, the others fully sharded
    chosen            what the search finds without any of this

"predicted" is the plan's price less what the runtime saves by reducing small gradients together, by the same formulas: the plan
prices each by itself. The last lines say what a user of the predictions asks: how far off are they, do they rank plans right, and does the plan that is
predicted fastest lose to the one that is.
"""
from __future__ import annotations

import argparse
import copy
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

import autoshard
from autoshard.base.mesh import Mesh
from benchmarks.shared.about import about, line
from benchmarks.shared.rounds import interleaved
from models import gpt, llama, mlp, resnet
from tests.dist.forced import data_parallel, fully_sharded, tensor_parallel

MODELS = {
    "gpt": (gpt, {"layers": 2, "width": 512, "heads": 8, "vocab": 4096, "context": 128, "batch": 8}),
    "llama": (llama, {"layers": 2, "width": 512, "heads": 8, "kv_heads": 4, "hidden": 1408, "vocab": 4096, "seq": 128, "batch": 4}),
    "mlp": (mlp, {"widths": (512, 2048, 2048, 512), "batch": 512}),
    "resnet": (resnet, {"width": 32, "image": 64, "classes": 128, "batch": 16}),
}
WITHOUT_TENSOR_PARALLEL = ("resnet",)
MEDIAN_ERROR, RANK_CORRELATION, SLOWER = 0.15, 0.9, 0.05


@dataclass(frozen=True)
class Row:
    """Seconds per step, and the parts of the prediction."""

    model: str
    plan: str
    predicted: float
    measured: float
    parts: dict[str, float]

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1


def mixed(model: nn.Module, shapes: Sequence[Sequence[int]], mesh: Mesh) -> dict[str, tuple[Any, ...]]:
    """Tensor parallel in the first half of the parameters, fully sharded in the second; inputs are left to the search."""
    tensor, sharded = tensor_parallel(model, shapes, mesh), fully_sharded(model, shapes, mesh)
    names = [n for n, _ in model.named_parameters()]
    return {n: tensor[n] if i < len(names) // 2 else sharded[n] for i, n in enumerate(names)}


PLANS: dict[str, Callable[..., dict[str, tuple[Any, ...]]] | None] = {
    "data parallel": data_parallel, "fully sharded": fully_sharded, "tensor parallel": tensor_parallel, "mixed": mixed, "chosen": None}


def run_model(name: str, cluster: str, rounds: int, say: Callable[[str], None]) -> list[Row]:
    """Compile the model under every plan, then time them in turn."""
    module, options = MODELS[name]
    mesh = Mesh(("d",), (dist.get_world_size(),))
    torch.manual_seed(0)
    model, batch = module.build("tiny", **options)
    steps, plans, predicted = {}, {}, {}
    for label, seeds_of in PLANS.items():
        if name in WITHOUT_TENSOR_PARALLEL and label in ("tensor parallel", "mixed"):
            continue
        seeds = seeds_of(model, [tuple(x.shape) for x in batch], mesh) if seeds_of else None
        compiled = autoshard.compile(copy.deepcopy(model), str(mesh), batch, loss_fn=module.loss, cluster=cluster, seeds=seeds,
                                     cache=False, time_limit=20)
        steps[label], plans[label] = _step(compiled, batch), compiled.plan
        for _ in range(3):
            steps[label]()
        predicted[label] = plans[label].predicted["bucketed_s"]  # as it runs
        say(f"{name}, {label}: planned, {plans[label].objective_s * 1e3:.1f} ms")
    times = interleaved(steps, rounds)
    return [Row(name, label, predicted[label], float(np.percentile(times[label], 25)), parts_of(plan)) for label, plan in plans.items()]


def _step(model: nn.Module, batch: tuple[Any, ...]) -> Callable[[], None]:
    optimizer = autoshard.local_update(torch.optim.AdamW(model.parameters(), lr=1e-4))

    def run() -> None:
        optimizer.zero_grad()
        model(*batch).backward()
        optimizer.step()

    return run


def parts_of(plan: autoshard.Plan) -> dict[str, float]:
    return {k: float(v) for k, v in plan.predicted.items() if isinstance(v, (int, float))} if isinstance(plan.predicted, Mapping) else {}


def rank_correlation(a: Sequence[float], b: Sequence[float]) -> float:
    """Spearman's: Pearson correlation of the ranks."""
    ranks = [np.argsort(np.argsort(x)).astype(float) for x in (a, b)]
    return float(np.corrcoef(*ranks)[0, 1])


def loss_of_choosing(rows: Sequence[Row]) -> float:
    """Per model: how much slower the plan predicted fastest is than the one measured fastest; the worst model."""
    out = 0.0
    for model in dict.fromkeys(r.model for r in rows):
        mine = [r for r in rows if r.model == model]
        out = max(out, min(mine, key=lambda r: r.predicted).measured / min(r.measured for r in mine) - 1)
    return out


def show(rows: Sequence[Row]) -> None:
    print(f"\n{line(about())}")
    print(f"\n{'model':8} {'plan':16} {'predicted ms':>12} {'measured ms':>12} {'error':>7}   parts of the prediction, ms")
    for r in rows:
        parts = ", ".join(f"{k.removesuffix('_s')} {v * 1e3:.1f}" for k, v in r.parts.items() if v > 5e-5)
        print(f"{r.model:8} {r.plan:16} {r.predicted * 1e3:12.1f} {r.measured * 1e3:12.1f} {r.error:+7.0%}   {parts}")
    error = median(abs(r.error) for r in rows)
    rank = rank_correlation([r.predicted for r in rows], [r.measured for r in rows])
    slower = loss_of_choosing(rows)
    print(f"\n{len(rows)} plans of {len({r.model for r in rows})} models")
    for text, value, good in ((f"median error {error:.1%}", f"at most {MEDIAN_ERROR:.0%}", error <= MEDIAN_ERROR),
                              (f"rank correlation {rank:.3f}", f"at least {RANK_CORRELATION}", rank >= RANK_CORRELATION),
                              (f"predicted fastest is at most {slower:.1%} slower than the fastest", f"at most {SLOWER:.0%}",
                               slower <= SLOWER)):
        print(f"{text:62} wanted {value:14} {'yes' if good else 'NO'}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cluster", required=True, help="the calibrated profile, a .toml file")
    parser.add_argument("--models", default=",".join(MODELS), help=f"some of {','.join(MODELS)}")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    names = options.models.split(",")
    if unknown := set(names) - set(MODELS):
        parser.error(f"no model {min(unknown)!r}; choose from {', '.join(MODELS)}")
    if "RANK" not in os.environ:
        parser.error("start it with: python -m torch.distributed.run --nproc-per-node 2 -m benchmarks.simulation.prediction ...")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    lead = dist.get_rank() == 0
    rows = []
    for name in names:
        rows += run_model(name, options.cluster, options.rounds, print if lead else lambda text: None)
    if lead:
        show(rows)
        if options.json:
            options.json.write_text(json.dumps([{**asdict(r), "error": r.error} for r in rows], indent=1) + "\n")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
