"""Is the chosen plan the fastest? The same model and batch under autoshard's plan and under those written by hand.

    torchrun --nproc-per-node 2 benchmarks/train.py --model gpt --size small
    torchrun --nproc-per-node 2 benchmarks/train.py --model llama --plans one,independent,auto,ddp,tp --rounds 20 --json out.json

(`python -m torch.distributed.run` where there is no `torchrun`.) Every process uses one thread. A step is
zero_grad, forward, backward and an AdamW update (as `torch.optim.AdamW(parameters)` does it; --fused for one kernel). All plans start from the same weights and see the same batch, so
their losses agree; the table says how well. Rounds go through the plans in turn, the time of a step is the slowest rank's.

    one           one process, the whole batch: the base of every speed-up
    independent   every process alone with its part of the batch, no communication: the ceiling
    auto          autoshard.compile
    auto-dp       the same, held to weights that every rank has whole and inputs split by the batch
    ddp, fsdp2    DistributedDataParallel; fully_shard on every block
    tp, tp+sp     parallelize_module: Megatron, and with sequence parallelism

"comm" is the share of a step in which some collective is under way; "memory" is what a rank stores plus the
most a step allocates beside it. Ratios are medians over rounds with a 95 % bootstrap interval.
"""
from __future__ import annotations

import argparse
import copy
import importlib
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.profiler import ProfilerActivity, profile

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # `models` lies beside this folder

from by_hand import PLANS, Trained  # noqa: E402
from rounds import interleaved, ratio, spread  # noqa: E402

import autoshard  # noqa: E402

SIZES: dict[str, dict[str, tuple[str, dict[str, Any]]]] = {
    "gpt": {"small": ("tiny", dict(layers=4, width=512, heads=8, vocab=4096, context=128, batch=8)),
            "large": ("tiny", dict(layers=4, width=1024, heads=16, vocab=8192, context=128, batch=8))},
    "llama": {"small": ("tiny", dict(layers=4, width=512, heads=8, kv_heads=4, hidden=1408, vocab=4096, seq=128, batch=8)),
              "large": ("tiny", dict(layers=4, width=1024, heads=16, kv_heads=8, hidden=2816, vocab=8192, seq=128, batch=8))},
    "mlp": {"small": ("tiny", dict(widths=(1024, 4096, 4096, 1024), batch=512)),
            "large": ("tiny", dict(widths=(2048, 8192, 8192, 2048), batch=1024))},
    "resnet": {"small": ("tiny", dict(width=32, image=64, classes=128, batch=32)),
               "large": ("18", dict(image=128, classes=128, batch=32))},
    "moe": {"small": ("tiny", dict(layers=2, width=512, heads=8, hidden=1024, experts=4, vocab=4096, context=128, batch=8)),
            "large": ("tiny", dict(layers=4, width=512, heads=8, hidden=2048, experts=8, vocab=8192, context=256, batch=16))},
    "vit": {"small": ("tiny", dict(layers=4, width=512, heads=8, image=96, patch=8, classes=128, batch=16)),
            "large": ("tiny", dict(layers=6, width=768, heads=12, image=128, patch=8, classes=1024, batch=32))},
}
CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}
DEFAULT = "one,independent,auto,auto-dp,ddp,fsdp2,tp,tp+sp"


@dataclass(frozen=True)
class Row:
    """One plan's figures. Seconds per step, bytes per rank; ratios as (median, low, high)."""

    plan: str
    seconds: tuple[float, float, float]
    samples_per_s: float
    speed_up: tuple[float, float, float] | None
    of_ceiling: tuple[float, float, float] | None
    auto_over_this: tuple[float, float, float] | None
    communication_share: float
    memory: int
    loss_difference: float | None
    rounds: list[float] = field(default_factory=list)


class Contender:
    """A plan ready to train."""

    def __init__(self, name: str, trained: Trained, fused: bool) -> None:
        self.name, self.trained = name, trained
        kinds: dict[type, list[nn.Parameter]] = {}  # a fused update takes DTensors or tensors, not both
        for p in trained.model.parameters():
            kinds.setdefault(type(p.data), []).append(p)
        optimizer = torch.optim.AdamW([{"params": some} for some in kinds.values()], lr=1e-3, fused=fused)
        self.optimizer = autoshard.local_update(optimizer) if name.startswith("auto") else optimizer
        self.losses: list[float] = []

    def step(self) -> None:
        self.optimizer.zero_grad()
        with self.trained.around():
            self.loss = self.trained.loss()
            self.loss.backward()
        self.optimizer.step()

    def train(self, steps: int) -> None:
        """Steps whose losses are kept, as means over the global batch."""
        for _ in range(steps):
            self.step()
            value = self.loss.detach()
            value = value.full_tensor() if hasattr(value, "full_tensor") else value.clone()
            if self.trained.shards and dist.is_initialized():
                dist.all_reduce(value)
                value /= dist.get_world_size()
            self.losses.append(value.item())

    def stored(self) -> int:
        """Bytes this rank holds between steps: weights, buffers, optimizer state."""
        tensors = [*self.trained.model.parameters(), *self.trained.model.buffers()]
        tensors += [v for state in self.optimizer.state.values() for v in state.values() if isinstance(v, torch.Tensor)]
        return sum(getattr(t, "_local_tensor", t).nbytes for t in {id(t): t for t in tensors}.values())


def contender(name: str, kind: str, model: nn.Module, batch: tuple[torch.Tensor, ...], loss: Callable, mesh: DeviceMesh,
              options: argparse.Namespace) -> Contender | None:
    model = copy.deepcopy(model)
    if name.startswith("auto"):
        compiled = autoshard.compile(model, mesh, batch, loss_fn=loss, cluster=options.cluster, cache=False, seeds=_seeds(name, batch, mesh),
                                     backend="inductor" if name == "auto-inductor" else "eager")
        return Contender(name, Trained(compiled, lambda: compiled(*batch), False), options.fused)
    trained = PLANS[name](model, kind, mesh, batch, loss)
    return None if trained is None else Contender(name, trained, options.fused)


def _seeds(name: str, batch: tuple[torch.Tensor, ...], mesh: DeviceMesh) -> dict[str, Any]:
    if name != "auto-dp":
        return {}
    return {**{f"input:{i}": [Shard(0)] * mesh.ndim for i in range(len(batch))}, "*": [Replicate()] * mesh.ndim}


# --- what a step does ---

def profiled(step: Callable[[], None]) -> tuple[float, int]:
    """(share of the step in which a collective is under way, most bytes a step allocates at once)."""
    on_gpu = torch.cuda.is_available()
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * on_gpu
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    with profile(activities=activities, profile_memory=not on_gpu) as seen:
        step()
    events = seen.events()
    start, end = min(e.time_range.start for e in events), max(e.time_range.end for e in events)
    busy = _union((e.time_range.start, e.time_range.end) for e in events
                  if e.name.startswith("gloo:") or "ncclDevKernel" in e.name)
    if on_gpu:
        return busy / (end - start), torch.cuda.max_memory_allocated() - before
    held = peak = 0
    for e in sorted((e for e in seen.profiler.kineto_results.events() if e.name() == "[memory]"), key=lambda e: e.start_ns()):
        held += e.nbytes()
        peak = max(peak, held)
    return busy / (end - start), peak


def _union(intervals: Any) -> float:
    total, reached = 0.0, float("-inf")
    for start, end in sorted(intervals):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


# --- results ---

def rows(contenders: dict[str, Contender], seconds: dict[str, list[float]], shares: dict[str, tuple[float, int]],
         samples: int) -> list[Row]:
    base = contenders.get("one") or next(iter(contenders.values()))

    def over(above: str, below: str) -> tuple[float, float, float] | None:
        return ratio(seconds[above], seconds[below]) if above in seconds and below in seconds else None

    return [Row(name, spread(seconds[name]), samples / spread(seconds[name])[0], over("one", name), over("independent", name),
                over("auto", name), shares[name][0], c.stored() + shares[name][1],
                max(abs(a - b) / abs(b) for a, b in zip(c.losses, base.losses, strict=True)) if c.losses else None, seconds[name])
            for name, c in contenders.items()]


def show(found: list[Row], title: str) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    for column in ("plan", "ms/step", "25..75 %", "samples/s", "speed-up", "of ceiling", "auto / this", "comm", "MiB", "loss diff"):
        table.add_column(column, justify="left" if column == "plan" else "right", no_wrap=True)
    for r in found:
        table.add_row(r.plan, f"{1e3 * r.seconds[0]:.1f}", f"{1e3 * r.seconds[1]:.1f}..{1e3 * r.seconds[2]:.1f}", f"{r.samples_per_s:.1f}",
                      _interval(r.speed_up), _interval(r.of_ceiling), _interval(r.auto_over_this), f"{r.communication_share:.0%}",
                      f"{r.memory / 2**20:.0f}", "" if r.loss_difference is None else f"{r.loss_difference:.0e}")
    Console(width=150).print(table)


def _interval(r: tuple[float, float, float] | None) -> str:
    return "" if r is None else f"{r[0]:.2f} [{r[1]:.2f},{r[2]:.2f}]"


def plot(found: list[Row], title: str, path: Path) -> None:
    """Step times as bars with their quartiles, an HTML page that needs no network."""
    import plotly.graph_objects as go

    middle = [1e3 * r.seconds[0] for r in found]
    bars = go.Bar(x=[r.plan for r in found], y=middle,
                  error_y={"type": "data", "symmetric": False, "array": [1e3 * (r.seconds[2] - r.seconds[0]) for r in found],
                           "arrayminus": [1e3 * (r.seconds[0] - r.seconds[1]) for r in found]})
    go.Figure(bars, layout={"title": title, "yaxis": {"title": "ms per step"}}).write_html(path, include_plotlyjs=True)


def facts(options: argparse.Namespace, world: int) -> dict[str, Any]:
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=Path(__file__).parent)
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores"
    return {"model": options.model, "size": options.size, "processes": world, "rounds": options.rounds, "device": device,
            "torch": torch.__version__, "commit": commit.stdout.strip()}


def measure(options: argparse.Namespace, mesh: DeviceMesh) -> tuple[list[Row], list[str]]:
    """Rows, and what was left out and why."""
    module = importlib.import_module(f"models.{options.model}")
    name, sizes = SIZES[options.model][options.size]
    torch.manual_seed(0)
    model, batch = module.build(name, **{**sizes, **({"batch": options.batch} if options.batch else {})})
    device = torch.device(mesh.device_type, torch.cuda.current_device() if torch.cuda.is_available() else None)
    model, batch = model.to(device), tuple(t.to(device) for t in batch)
    contenders, skipped = {}, []
    for plan in options.plans.split(","):
        made = contender(plan, options.model, model, batch, module.loss, mesh, options)
        if made is None:
            skipped.append(f"{plan}: no such plan is written for {options.model}")
        else:
            contenders[plan] = made
    for plan, c in contenders.items():
        if plan != "one" or dist.get_rank() == 0:
            c.train(options.check)
    shares = {plan: profiled(c.step) if plan != "one" or dist.get_rank() == 0 else (0.0, 0) for plan, c in contenders.items()}
    seconds = interleaved({plan: c.step for plan, c in contenders.items()}, options.rounds, solo=frozenset({"one"}),
                          repeat=options.repeat, clock=CLOCKS[options.clock])
    if options.show_plan and dist.get_rank() == 0 and "auto" in contenders:
        _show_plan(contenders["auto"].trained.model.plan)
    return rows(contenders, seconds, shares, batch[0].shape[0]) if dist.get_rank() == 0 else [], skipped


def _show_plan(plan: autoshard.Plan) -> None:
    for layout in plan.layouts:
        if layout.kind in ("weight", "input"):
            print(f"  {layout.kind:7} {layout.name:40} {layout.spec}")
    print(f"  predicted {1e3 * plan.objective_s:.1f} ms: {({k: round(1e3 * v, 2) for k, v in plan.predicted.items()})}; {plan.status}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=SIZES, default="gpt")
    parser.add_argument("--size", choices=("small", "large"), default="small")
    parser.add_argument("--batch", type=int, help="global batch, instead of the size's")
    parser.add_argument("--plans", default=DEFAULT, help="by default %(default)s; auto-inductor too")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--repeat", type=int, default=1, help="steps per round")
    parser.add_argument("--fused", action="store_true", help="AdamW(fused=True) for every plan")
    parser.add_argument("--check", type=int, default=3, help="steps before timing, whose losses are compared")
    parser.add_argument("--clock", choices=CLOCKS, default="wall", help="cpu: seconds of work, without waiting, for a busy machine")
    parser.add_argument("--cluster", help="profile to plan for (default: by the device)")
    parser.add_argument("--show-plan", action="store_true", help="print the chosen layouts")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path, help="write an HTML page (needs plotly)")
    options = parser.parse_args()
    unknown = set(options.plans.split(",")) - {*PLANS, "auto", "auto-dp", "auto-inductor"}
    if unknown:
        parser.error(f"no plan {sorted(unknown)[0]!r}; choose from {', '.join([*PLANS, 'auto', 'auto-dp', 'auto-inductor'])}")
    if options.rounds < 2:
        parser.error("--rounds must be 2 or more: a spread needs them")
    if "WORLD_SIZE" not in os.environ:
        parser.error("start with `torchrun --nproc-per-node N benchmarks/train.py ...`")
    torch.set_num_threads(1)
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if on_gpu else "gloo")
    try:
        mesh = init_device_mesh("cuda" if on_gpu else "cpu", (dist.get_world_size(),), mesh_dim_names=("d",))
        found, skipped = measure(options, mesh)
        if dist.get_rank() == 0:
            about = facts(options, dist.get_world_size())
            title = "{model} {size}, {processes} processes, {rounds} rounds, {device}, torch {torch}, commit {commit}".format(**about)
            show(found, title)
            print("\n".join(skipped))
            if options.json:
                options.json.write_text(json.dumps({**about, "rows": [asdict(r) for r in found]}, indent=1) + "\n")
            if options.plot:
                plot(found, title, options.plot)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
