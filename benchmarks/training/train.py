"""Is the chosen plan the fastest? The same model and batch under autoshard's plan and under those written by hand.

    torchrun --nproc-per-node 2 -m benchmarks.training.train --model gpt --size small
    torchrun --nproc-per-node 2 -m benchmarks.training.train --model llama --plans one,independent,auto,ddp,tp --rounds 20 --json out.json

(`python -m torch.distributed.run` where there is no `torchrun`.) Every process uses one thread. A step is
zero_grad, forward, backward and an AdamW update (as `torch.optim.AdamW(parameters)` does it; --fused for one kernel). All plans
start from the same weights and see the same batch, so their losses agree; the table says how well, and the plan to beat is the
fastest by hand whose losses are those of one process. Rounds go through the plans in turn, the time of a step is the slowest rank's.

    one           one process, the whole batch: the base of every speed-up
    independent   every process alone with its part of the batch, no communication: the ceiling of data parallelism
    auto          autoshard.compile
    auto-dp       the same, held to weights that every rank has whole and inputs split by the batch; the search lays out the rest
    auto-ddp      autoshard running DDP's layout: the baseline of `autoshard compare`, every op on the rank's part of the batch
    ddp, fsdp2    DistributedDataParallel; fully_shard on every block
    tp, tp+sp     parallelize_module: Megatron, and with sequence parallelism
    hybrid        ddp, but experts (moe) or embedding tables (dlrm) are dealt out, and tokens or rows sent to them

"comm" is the share of a step in which some collective is under way; "memory" is what a rank stores plus the
most a step allocates beside it. Ratios are medians over rounds with a 95 % bootstrap interval.
"""
from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.profiler import ProfilerActivity, profile

import autoshard
from autoshard.runtime.carriers.shared_memory import Shared
from benchmarks.shared.about import about, line
from benchmarks.shared.carrier import add_carrier, add_float32_matmul, take_carrier
from benchmarks.shared.rounds import CLOCKS, interleaved
from benchmarks.training.by_hand import PLANS
from benchmarks.training.contenders import AUTO, SIZES, contender, subject
from benchmarks.training.results import Row, plot, rows, show, verdict

DEFAULT = "one,independent,auto,ddp,fsdp2,tp,tp+sp,hybrid"


# --- what a step does ---

def profiled(step: Callable[[], None]) -> tuple[float, int]:
    """(share of the step in which a collective is under way, most bytes a step allocates at once)."""
    on_gpu = torch.cuda.is_available()
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * on_gpu
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    with profile(activities=activities, profile_memory=not on_gpu) as seen, _shared_memory_seen():
        step()
    events = seen.events()
    start, end = min(e.time_range.start for e in events), max(e.time_range.end for e in events)
    busy = _union((e.time_range.start, e.time_range.end) for e in events
                  if e.name.startswith(("gloo:", "shared:")) or "ncclDevKernel" in e.name)
    if on_gpu:
        return busy / (end - start), torch.cuda.max_memory_allocated() - before
    held = peak = 0
    for e in sorted((e for e in seen.profiler.kineto_results.events() if e.name() == "[memory]"), key=lambda e: e.start_ns()):
        held += e.nbytes()
        peak = max(peak, held)
    return busy / (end - start), peak


@contextmanager
def _shared_memory_seen() -> Iterator[None]:
    """Posts, waits and copies in shared memory, which the profiler knows nothing of, under names "shared:..."."""
    def named(name: str) -> Callable:
        method = getattr(Shared, name)
        return lambda *args: torch.profiler.record_function(f"shared:{name}")(method)(*args)

    with ExitStack() as patched:
        for name in ("post", "wait", "copy"):
            patched.enter_context(patch.object(Shared, name, named(name)))
        yield


def _union(intervals: Any) -> float:
    total, reached = 0.0, float("-inf")
    for start, end in sorted(intervals):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


def measure(options: argparse.Namespace, mesh: DeviceMesh) -> tuple[list[Row], list[str]]:
    """Rows, and what was left out and why."""
    model, batch, loss = subject(options.model, options.size, options.batch)
    device = torch.device(mesh.device_type, torch.cuda.current_device() if torch.cuda.is_available() else None)
    model, batch = model.to(device), tuple(t.to(device) for t in batch)
    contenders, skipped = {}, []
    for plan in options.plans.split(","):
        made = contender(plan, options.model, model, batch, loss, mesh, options)
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
    parser.add_argument("--size", default="small", help="small, large; gpt and llama also words: a large vocabulary")
    parser.add_argument("--batch", type=int, help="global batch, instead of the size's")
    parser.add_argument("--plans", default=DEFAULT, help="by default %(default)s; auto-dp, auto-ddp and auto-inductor too")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--repeat", type=int, default=1, help="steps per round")
    parser.add_argument("--fused", action="store_true", help="AdamW(fused=True) for every plan")
    parser.add_argument("--check", type=int, default=3, help="steps before timing, whose losses are compared")
    parser.add_argument("--clock", choices=CLOCKS, default="wall", help="cpu: seconds of work, without waiting, for a busy machine")
    add_carrier(parser)
    add_float32_matmul(parser)
    parser.add_argument("--cluster", help="profile to plan for (default: by the device)")
    parser.add_argument("--show-plan", action="store_true", help="print the chosen layouts")
    parser.add_argument("--markdown", action="store_true", help="the table as docs/performance.md has it")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path, help="write an HTML page (needs plotly)")
    options = parser.parse_args()
    unknown = set(options.plans.split(",")) - {*PLANS, *AUTO}
    if unknown:
        parser.error(f"no plan {sorted(unknown)[0]!r}; choose from {', '.join([*PLANS, *AUTO])}")
    if options.size not in SIZES[options.model]:
        parser.error(f"no size {options.size!r} of {options.model}; choose from {', '.join(SIZES[options.model])}")
    if options.rounds < 2:
        parser.error("--rounds must be 2 or more: a spread needs them")
    if "WORLD_SIZE" not in os.environ:
        parser.error("start with `torchrun --nproc-per-node N -m benchmarks.training.train ...`")
    take_carrier(options.carrier)
    torch.set_num_threads(1)
    torch.set_float32_matmul_precision(options.float32_matmul)
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if on_gpu else "gloo")
    try:
        mesh = init_device_mesh("cuda" if on_gpu else "cpu", (dist.get_world_size(),), mesh_dim_names=("d",))
        found, skipped = measure(options, mesh)
        if dist.get_rank() == 0:
            report(found, skipped, options)
    finally:
        dist.destroy_process_group()


def report(found: list[Row], skipped: list[str], options: argparse.Namespace) -> None:
    facts = {"model": options.model, "size": options.size, "processes": dist.get_world_size(), "rounds": options.rounds, "carrier": options.carrier,
             "float32_matmul": options.float32_matmul, **about()}
    title = f"{options.model} {options.size}: " + line(facts, f"{facts['processes']} processes", f"{options.rounds} rounds of {options.clock} time",
                                                               f"autoshard over {options.carrier}", f"float32 products: {options.float32_matmul}")
    show(found, title, options.markdown)
    print("\n".join([*verdict(found), *skipped]))
    if options.json:
        options.json.write_text(json.dumps({**facts, "rows": [asdict(r) for r in found]}, indent=1) + "\n")
    if options.plot:
        plot(found, title, options.plot)


if __name__ == "__main__":
    main()
