"""How planning time and memory grow: with layers, mesh axes, ranks, and the number of strategies.

    python -m benchmarks.search.search_scaling layers axes ranks --json scaling.json --plot scaling.html
    python -m benchmarks.search.search_scaling ranks --points 8,64,512,4096

Every point is planned in a process of its own; CPU seconds are the process's with its
solvers' (MIPs run in processes of their own), memory is the process's peak. A slope is
that of a least-squares line through the logarithms: 1 is linear.

    layers   llama with 2 to 128 small layers on dp=8, training
    axes     llama of 4 layers as wide as 1B's, 64 ranks as one, two and three mesh axes
    ranks    llama 8B on dp=N/8,tp=8 (tp=N up to 8 ranks)
    meshes   llama 8B on 4,096 ranks: 512 x 8, 64 x 64, 8 x 8 x 64
"""
from __future__ import annotations

import argparse
import json
import math
import os
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from benchmarks.shared.about import about, line, markdown

POINTS = {"layers": (2, 4, 8, 16, 32, 64, 128), "axes": (1, 2, 3), "ranks": (2, 8, 32, 128, 512, 4096), "meshes": (1, 2, 3)}
AXES = {1: "dp=64", 2: "dp=8,tp=8", 3: "pod=4,dp=4,tp=4"}
MESHES = {1: "dp=512,tp=8", 2: "dp=64,tp=64", 3: "pod=8,dp=8,tp=64"}
LIMIT = 60.0
"""CPU seconds for llama 8B on 4,096 ranks."""
AMPLE = 1e15
"""Bytes per rank: the batch of 4,096 ranks fits no two devices, and every point should ask the same question."""


def subject(sweep: str, n: int) -> tuple[dict[str, Any], str]:
    """(arguments of models.llama.build, mesh)."""
    if sweep == "layers":
        return {"size": "tiny", "layers": n, "batch": 8}, "dp=8"
    if sweep == "axes":
        return {"size": "1B", "layers": 4, "batch": 64, "seq": 2048}, AXES[n]
    mesh = MESHES[n] if sweep == "meshes" else f"dp={n // 8},tp=8" if n > 8 else f"tp={n}"
    return {"size": "8B", "batch": 512, "seq": 2048}, mesh


def point(sweep: str, n: int) -> dict[str, Any]:
    """Plan one point in this process and measure it."""
    from autoshard.api import mesh_of
    from autoshard.decide.options import Options
    from autoshard.decide.phase_timer import PhaseTimer, cpu_seconds
    from autoshard.planner.stages import plan_traced
    from autoshard.program.trace import trace
    from models import llama

    options, mesh = subject(sweep, n)
    with torch.device("meta"):
        model, inputs = llama.build(**options)
    clock, start = PhaseTimer(), cpu_seconds()
    with clock("trace"):
        traced = trace(model, inputs, {}, loss_fn=llama.loss)
    plan = plan_traced(traced, mesh_of(mesh), Options(time_limit=600.0, memory_budget=AMPLE), clock=clock, has_loss=True)
    return {"sweep": sweep, "n": n, "mesh": mesh, "ops": len(traced.graph.ops), "choices": plan.search["choices"],
            "cpu_s": cpu_seconds() - start, "phases": clock.cpu_seconds,
            "gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, "status": plan.status, "gap": plan.gap}


def slope(xs: list[float], ys: list[float]) -> float:
    """Of the least-squares line through (log x, log y)."""
    a, b = [math.log(x) for x in xs], [math.log(y) for y in ys]
    mean_a, mean_b = sum(a) / len(a), sum(b) / len(b)
    return sum((x - mean_a) * (y - mean_b) for x, y in zip(a, b, strict=True)) / sum((x - mean_a) ** 2 for x in a)


COLUMNS = ("sweep", "point", "mesh", "ops", "strategies", "trace", "tables and formulation", "search", "CPU s in all", "GiB", "status")


def cells(p: dict[str, Any]) -> list[str]:
    phases = p["phases"]
    build = sum(phases[k] for k in ("strategies", "costs", "formulate", "assemble"))
    return [p["sweep"], str(p["n"]), p["mesh"], f"{p['ops']:,}", f"{p['choices']:,}", f"{phases['trace']:.1f}", f"{build:.1f}",
            f"{phases['search']:.1f}", f"{p['cpu_s']:.1f}", f"{p['gib']:.2f}", f"{p['status']} (gap {p['gap']:.1%})"]


def slopes(found: list[dict[str, Any]]) -> list[str]:
    """Per sweep, of CPU seconds and memory; over all points, against the number of strategies."""
    lines = []
    for sweep in ("layers", "axes", "ranks"):
        mine = [p for p in found if p["sweep"] == sweep]
        if len(mine) > 1:
            ns = [p["n"] for p in mine]
            lines.append(f"slope against {sweep}: CPU seconds {slope(ns, [p['cpu_s'] for p in mine]):.2f}, memory {slope(ns, [p['gib'] for p in mine]):.2f}")
    if len({p["choices"] for p in found}) > 2:
        choices, seconds = [p["choices"] for p in found], [p["cpu_s"] - p["phases"]["trace"] for p in found]
        lines.append(f"slope against strategies, over all points, without tracing: {slope(choices, seconds):.2f}")
    return lines


def limits(found: list[dict[str, Any]]) -> list[str]:
    largest = {p["mesh"]: p for p in found if p["sweep"] == "meshes" or p["sweep"] == "ranks" and p["n"] == 4096}
    return [f"llama 8B on 4,096 ranks, {mesh}: {p['cpu_s']:.0f} CPU s, wanted under {LIMIT:.0f}: {'yes' if p['cpu_s'] < LIMIT else 'no'}"
            for mesh, p in largest.items()]


def plot(found: list[dict[str, Any]], path: Path) -> None:
    """Log-log lines, one per sweep; an HTML page that needs no network."""
    import plotly.graph_objects as go

    figure = go.Figure(layout={"title": "CPU seconds to plan", "xaxis": {"type": "log", "title": "layers, axes or ranks"},
                               "yaxis": {"type": "log", "title": "CPU seconds"}})
    for sweep in ("layers", "axes", "ranks"):
        mine = [p for p in found if p["sweep"] == sweep]
        ns, seconds = [p["n"] for p in mine], [p["cpu_s"] for p in mine]
        name = f"{sweep}, slope {slope(ns, seconds):.2f}" if len(mine) > 1 else sweep
        figure.add_scatter(x=ns, y=seconds, name=name, mode="lines+markers")
    figure.write_html(path, include_plotlyjs=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sweeps", nargs="*", metavar="SWEEP", help=f"any of {', '.join(POINTS)} (default: all)")
    parser.add_argument("--points", help="instead of the sweep's own: numbers, comma-separated")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path, help="write an HTML page (needs plotly)")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        sweep, _, n = options.one.partition(":")
        print(json.dumps(point(sweep, int(n))))
        return
    unknown = set(options.sweeps) - set(POINTS)
    if unknown:
        parser.error(f"no sweep {sorted(unknown)[0]!r}; choose from {', '.join(POINTS)}")
    found = []
    for sweep in options.sweeps or POINTS:
        for n in map(int, options.points.split(",")) if options.points else POINTS[sweep]:
            found.append(planned(sweep, n))
            print(f"{sweep} {n}: {found[-1]['cpu_s']:.1f} CPU s", file=sys.stderr)
    facts = about()
    print(f"{line(facts)}\n\n{markdown(COLUMNS, map(cells, found))}\n")
    print("\n".join([*slopes(found), *limits(found)]))
    if options.json:
        options.json.write_text(json.dumps({**facts, "points": found}, indent=1) + "\n")
    if options.plot:
        plot(found, options.plot)


def planned(sweep: str, n: int) -> dict[str, Any]:
    """`point` in a process of its own."""
    done = subprocess.run([sys.executable, "-m", __spec__.name, "--one", f"{sweep}:{n}"], stdout=subprocess.PIPE, text=True,
                          env={**os.environ, "OMP_NUM_THREADS": "1"})
    if done.returncode:
        sys.exit(f"{sweep} {n} failed with exit code {done.returncode}")
    return json.loads(done.stdout.splitlines()[-1])


if __name__ == "__main__":
    main()
