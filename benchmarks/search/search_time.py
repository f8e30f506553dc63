"""Planning cost per phase, beside the closest peer's published-here measurements.

    python -m benchmarks.search.search_time [CASE ...] [--json out.json]

Each case runs in a process of its own (peak RSS is the process's). CPU seconds are process time, which
survives a noisy machine better than wall time. The peer's figures are those of meta-pytorch/autoparallel
(commit a54c252, Llama-3 shaped models of its own, H100 constants) on a 2-core CPU machine.
"""
from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

CASES = {
    # name: (model, mesh, batch, seq, peer: CPU s (trace, strategies + costs + model, solve) and peak RSS GiB)
    "llama-1b 8x8": ("llama:1b", "dp=8,tp=8", 16, 8192, {"trace": 10.0, "build": 50.7, "solve": 76.4, "rss": 2.84}),
    "llama-8b 8x8": ("llama:8b", "dp=8,tp=8", 16, 8192, {"trace": 17.8, "build": 58.3, "solve": 54.0, "rss": 4.20}),
    "llama-1b 2x4x8": ("llama:1b", "a=2,dp=4,tp=8", 16, 8192, {"note": "no plan after 900 s"}),
    "llama-8b 2x2x4x8": ("llama:8b", "a=2,b=2,dp=4,tp=8", 64, 2048, {"note": "not run"}),
    "hf-gpt2 8": ("hf-gpt2", "dp=8", 16, 1024, {"total": 26.5, "rss": 0.62}),
}
GPT2 = {"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "n_layer": 12, "n_head": 12, "n_embd": 768,
        "vocab_size": 50304, "n_positions": 1024}


def run_case(name: str) -> dict:
    """Plan one case in this process and measure it."""
    from autoshard.api import Options, mesh_of
    from autoshard.decide.phase_timer import PhaseTimer, cpu_seconds
    from autoshard.planner.stages import plan_traced
    from autoshard.program.load import load_model
    from autoshard.program.trace import trace

    reference, mesh, batch, seq, _ = CASES[name]
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "config.json"
        config.write_text(json.dumps(GPT2))
        hf = str(config) if reference == "hf-gpt2" else None
        spec = load_model(None if hf else reference, batch=batch, seq=seq, dtype="bf16", hf=hf)
    clock, start = PhaseTimer(lambda phase, detail: print(f"  {phase} {detail}", file=sys.stderr)), cpu_seconds()
    with clock("trace"):
        traced = trace(spec.model, spec.example_inputs, spec.example_kwargs, loss_fn=spec.loss_fn)
    plan = plan_traced(traced, mesh_of(mesh), Options(time_limit=600.0), clock=clock, has_loss=spec.loss_fn is not None)
    return {"case": name, "ops": len(traced.graph.ops), "planned_ops": len(plan.ops), "cpu_s": clock.cpu_seconds,
            "total_cpu_s": cpu_seconds() - start, "peak_rss_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
            "objective_s": plan.objective_s, "gap": plan.gap, "status": plan.status, "search": dict(plan.search),
            "memory_gib": (plan.memory["total"] or 0) / 2**30, "fallbacks": len(plan.fallbacks)}


def show(rows: list[dict]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title="CPU seconds to plan, beside the peer's")
    for column in ("case", "ops", "trace", "strategies+costs+formulate", "search", "total without trace", "total", "peak RSS GiB",
                   "status", "peer total", "peer RSS", "ours / peer"):
        table.add_column(column, justify="left" if column in ("case", "status") else "right")
    for row in rows:
        cpu, peer = row["cpu_s"], CASES[row["case"]][-1]
        build = sum(cpu.get(k, 0) for k in ("strategies", "costs", "formulate"))
        theirs = peer.get("total") or (sum(peer[k] for k in ("trace", "build", "solve")) if "trace" in peer else None)
        table.add_row(row["case"], str(row["ops"]), f"{cpu['trace']:.1f}", f"{build:.1f}", f"{cpu['search']:.1f}",
                      f"{row['total_cpu_s'] - cpu['trace']:.1f}", f"{row['total_cpu_s']:.1f}", f"{row['peak_rss_gib']:.2f}",
                      f"{row['status']} ({row['gap']:.2%})", f"{theirs:.1f}" if theirs else peer["note"],
                      f"{peer.get('rss', 0):.2f}", f"{row['total_cpu_s'] / theirs:.2f}" if theirs else "-")
    Console(width=180).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", help=f"any of: {', '.join(CASES)} (default: all)")
    parser.add_argument("--json", help="write the rows to this file as well")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print(json.dumps(run_case(args.one)))
        return
    rows = []
    for name in args.cases or CASES:
        if name not in CASES:
            parser.error(f"unknown case {name!r}; the cases are {', '.join(CASES)}")
        done = subprocess.run([sys.executable, "-m", __spec__.name, "--one", name], stdout=subprocess.PIPE, text=True,
                              env={**os.environ, "OMP_NUM_THREADS": "1"})
        if done.returncode:
            sys.exit(f"{name} failed with exit code {done.returncode}")
        rows.append(json.loads(done.stdout.splitlines()[-1]))
    show(rows)
    if args.json:
        Path(args.json).write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
