"""Models of known sizes planned in part of the memory that their fastest plan takes, as a table: step times, gaps and CPU seconds.

    python -m benchmarks.memory.tight                              # all cases, in 60 % of their memory
    python -m benchmarks.memory.tight gpt:350m t5:base --share 0.7 --time-limit 120

The ratio is the step in little memory over the step with ample memory: what the memory saved costs. Nothing runs; plans are priced.
"""
from __future__ import annotations

import argparse
from typing import Any

from rich.console import Console
from rich.table import Table

from autoshard.api import Options
from autoshard.base.mesh import parse_mesh
from autoshard.decide.phase_timer import PhaseTimer, cpu_seconds
from autoshard.planner.stages import plan_traced
from autoshard.program.load import load_model
from autoshard.program.trace import trace

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    # model: (mesh, sizes of the inputs)
    "gpt:350m": ("dp=2,tp=2", {"batch": 32, "seq": 1024}),
    "bert:large": ("dp=2,tp=2", {"batch": 32, "seq": 512}),
    "vit:l16": ("dp=2,tp=2", {"batch": 64}),
    "t5:base": ("dp=2,tp=2", {"batch": 16, "seq": 512}),
    "llama:1b": ("dp=2,tp=2", {"batch": 16, "seq": 2048}),
    "gpt:774m": ("dp=4", {"batch": 16, "seq": 1024}),
}


def measured(name: str, share: float, limit: float, cluster: str) -> tuple[str, ...]:
    """A row of the table."""
    mesh, sizes = CASES[name]
    spec = load_model(name, dtype="bf16", **sizes)
    traced = trace(spec.model, spec.example_inputs, spec.example_kwargs, loss_fn=spec.loss_fn)

    def planned(budget: float | None) -> Any:
        options = Options(time_limit=limit, cluster=cluster, memory_budget=budget)
        return plan_traced(traced, parse_mesh(mesh), options, clock=PhaseTimer(lambda *_: None), has_loss=True)

    ample = planned(None)
    budget, begun = share * ample.memory["total"], cpu_seconds()
    tight = planned(budget)
    return (name, mesh, f"{1e3 * ample.objective_s:.2f}", f"{budget / 1e9:.2f}", f"{1e3 * tight.objective_s:.2f}",
            f"{tight.objective_s / ample.objective_s:.3f}", f"{tight.gap:.1%}", f"{cpu_seconds() - begun:.0f}")


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"any of: {', '.join(CASES)} (default: all)")
    parser.add_argument("--share", type=float, default=0.6, help="of the memory that the fastest plan takes (default: %(default)s)")
    parser.add_argument("--time-limit", type=float, default=60.0, help="seconds for each search (default: %(default)s)")
    parser.add_argument("--cluster", default="h100-dgx", help="built-in profile or file (default: %(default)s)")
    options = parser.parse_args(argv)
    if unknown := [name for name in options.cases if name not in CASES]:
        parser.error(f"unknown case {unknown[0]!r}; the cases are {', '.join(CASES)}")
    table = Table("model", "mesh", "ample ms", "budget GB", "ms", "ratio", "gap", "CPU s", title=f"in {options.share:.0%} of the memory")
    for name in options.cases or CASES:
        table.add_row(*measured(name, options.share, options.time_limit, options.cluster))
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
