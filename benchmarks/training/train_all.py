"""The chosen plan beside the best by hand, for ten models and over both carriers, in one table.

    python -m benchmarks.training.train_all --cluster here.toml --gloo-cluster gloo.toml   # about 30 minutes on a quiet machine of 2 cores
    python -m benchmarks.training.train_all --carrier gloo --models gpt,resnet --plans ddp,auto-ddp,auto --rounds 24
    python -m benchmarks.training.train_all --json measured.jsonl                 # a line per run; what has a line there is not run again
    python -m benchmarks.training.train_all --json measured.jsonl --models ''     # the table of those lines, without a run

`torchrun --nproc-per-node 2 -m autoshard calibrate -o here.toml` measures shared memory, and with AUTOSHARD_SHARED_MEMORY=0 gloo's messages: a plan for
one is not the best for the other. Each model is a run of train.py by torchrun, with its rounds and checks: the best by hand is the fastest whose losses are those of one process.
The table has the median ratio of the rounds with its 95 % bootstrap interval; "held to DDP" is DDP's own layout run by autoshard, over DDP. Below it: in how many
cases the chosen plan is slower than the best by hand beyond the interval, in how many at least 10 % faster, and where DDP's layout is more than 2 %
slower than DDP. Exit code 1 where a run failed.
"""
from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.shared.about import about, line, markdown
from benchmarks.shared.carrier import CARRIERS, GLOO, add_float32_matmul
from benchmarks.shared.rounds import ratio
from benchmarks.training.results import AUTO, BOUNDS, Row, interval

MODELS = ("gpt", "llama", "mlp", "moe", "vit", "dlrm", "resnet", "bert", "t5", "gpt:words")
"""Models and sizes of train.py; small where none is given."""
PLANS = "one,auto,auto-ddp,ddp,fsdp2,tp,tp+sp,hybrid"
SLOWER, FASTER = 1.02, 0.9
"""DDP's layout at most this much of DDP, and a chosen plan that counts as faster than the best by hand."""


def main() -> int:
    options = arguments()
    lines = [json.loads(text) for text in options.json.read_text().splitlines()] if options.json and options.json.exists() else []
    known = {(found["model"], found["size"], found["carrier"]) for found in lines}
    failed = []
    for subject in filter(None, options.models.split(",")):
        model, _, size = subject.partition(":")
        for carrier in options.carrier or CARRIERS:
            if (model, size or "small", carrier) in known:
                continue
            found = measured(model, size or "small", carrier, options)
            if found is None:
                failed.append(f"{subject} over {carrier}")
                continue
            lines.append(found)
            if options.json:
                with options.json.open("a") as out:
                    out.write(json.dumps(found) + "\n")
            print(f"{subject} over {carrier}: {interval(to_beat(rows_of(found))[1])}", file=sys.stderr, flush=True)
    print("\n".join(page(lines, options)))
    print("\n".join(f"failed: {what}" for what in failed), file=sys.stderr)
    return int(bool(failed))


def measured(model: str, size: str, carrier: str, options: argparse.Namespace) -> dict[str, Any] | None:
    """What train.py writes for one model; None where it failed, with its words on the screen."""
    cluster = options.gloo_cluster if carrier == GLOO and options.gloo_cluster else options.cluster
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "found.json")
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(options.processes), "-m", "benchmarks.training.train",
                   "--model", model, "--size", size, "--carrier", carrier, "--plans", options.plans, "--rounds", str(options.rounds), "--clock", options.clock,
                   "--float32-matmul", options.float32_matmul,
                   "--json", out, *(("--cluster", cluster) if cluster else ())]
        done = subprocess.run(command, stdout=subprocess.DEVNULL, env={**os.environ, "OMP_NUM_THREADS": "1"})
        found: dict[str, Any] | None = json.loads(out.read_text()) if done.returncode == 0 else None
        return found


# --- the table ---

def rows_of(found: Mapping[str, Any]) -> dict[str, Row]:
    return {r["plan"]: Row(**r) for r in found["rows"]}


def to_beat(rows: Mapping[str, Row]) -> tuple[str, tuple[float, float, float] | None]:
    """The fastest plan by hand that trains the same model (one process where none does), and the chosen plan over it."""
    by_hand = [r for name, r in rows.items() if name not in (*AUTO, *BOUNDS) and r.same_model] or [r for name, r in rows.items() if name == "one"]
    if not by_hand or "auto" not in rows:
        return "none", None
    best = min(by_hand, key=lambda r: r.seconds[0])
    return best.plan, ratio(rows["auto"].rounds, best.rounds)


def ddps_layout(rows: Mapping[str, Row]) -> tuple[float, float, float] | None:
    return ratio(rows["auto-ddp"].rounds, rows["ddp"].rounds) if {"auto-ddp", "ddp"} <= set(rows) else None


def page(lines: Iterable[Mapping[str, Any]], options: argparse.Namespace) -> list[str]:
    table, chosen, held = [], [], []
    for found in lines:
        rows = rows_of(found)
        best, over = to_beat(rows)
        layout = ddps_layout(rows)
        where = f"{found['model']} {found['size']} over {found['carrier']}"
        chosen += [(where, over)] if over else []
        held += [(where, layout)] if layout else []
        table.append((f"{found['model']} {found['size']}", found["carrier"], best, f"{1e3 * rows['auto'].seconds[0]:.1f}" if "auto" in rows else "", interval(over),
                      interval(layout, digits=3), str(found["rounds"])))
    return [line(about(), f"{options.processes} processes", f"{options.clock} time", f"float32 products: {options.float32_matmul}"), "",
            markdown(("model", "carrier", "best by hand", "chosen, ms", "chosen / best", "held to DDP / DDP", "rounds"), table), "", *summary(chosen, held)]


Ratios = Sequence[tuple[str, tuple[float, float, float]]]


def summary(chosen: Ratios, held: Ratios) -> list[str]:
    """What the targets ask for, in words. A plan is slower, or DDP's layout above its limit, where the whole interval is."""
    slower = [where for where, (_, low, _) in chosen if low > 1]
    faster = {where.split(" over ")[0] for where, (middle, _, _) in chosen if middle <= FASTER}
    above = [where for where, (_, low, _) in held if low > SLOWER]
    return [f"{len(chosen)} cases; chosen plan slower than the best by hand beyond the interval in {len(slower)}{named(slower)}; "
            f"at least 10 % faster for {len(faster)} of {len({where.split(' over ')[0] for where, _ in chosen})} models{named(sorted(faster))}; "
            f"DDP's layout more than 2 % slower than DDP beyond the interval in {len(above)} of {len(held)}{named(above)}."]


def named(cases: Sequence[str]) -> str:
    return f" ({', '.join(cases)})" if cases else ""


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(MODELS), help="MODEL or MODEL:SIZE of train.py, comma separated; default: %(default)s")
    parser.add_argument("--carrier", action="append", choices=CARRIERS, help="default: both")
    parser.add_argument("--plans", default=PLANS, help="default: %(default)s")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall")
    add_float32_matmul(parser)
    parser.add_argument("--cluster", help="profile to plan for (default: by the device)")
    parser.add_argument("--gloo-cluster", help="the same, of runs over gloo (default: --cluster)")
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
