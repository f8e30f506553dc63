"""Planning models with layers of experts at real widths on 64 devices: seconds of CPU, gap, and what travels.

    python -m benchmarks.plans.experts                                 # all cases: minutes each
    python -m benchmarks.plans.experts deepseek ep=64 --cluster b200-dgx    # whose weights and state at 61 layers need more than a rank of h100-dgx has
    python -m benchmarks.plans.experts mixtral dp=8 --layers 4         # those whose name and mesh have all of these words, cut to 4 layers

Models are transformers' classes at their published configurations, on the meta device in bf16: 64 x 4096 tokens, trained with AdamW on
`h100-dgx` or another cluster, logits handed out as the plan splits them. Limits of a search are CPU seconds, which a busy machine stretches less. Each case runs in a
process of its own. A collective that is neither of a weight or its gradient nor inside an op moves tokens: these are listed by kind.
"""
from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from autoshard.base.mesh import parse_mesh
from autoshard.base.plan import Plan
from autoshard.decide.backends import find
from autoshard.decide.how import How
from autoshard.decide.options import Options, Passing
from autoshard.decide.phase_timer import PhaseTimer, cpu_seconds
from autoshard.experts.ops import EXPERTS
from autoshard.planner.one_stage import prices, program_of
from autoshard.program.trace import trace
from autoshard.search import Clock

BATCH, SEQ = 64, 4096
MESHES = ("dp=8,ep=8", "ep=64")
HEADER = "| model | mesh | layers (of experts) | trace, all CPU s | step | gap | status | GiB | rows travel | tokens otherwise |\n" + "| --- " * 10 + "|"


def mixtral(layers: int | None) -> nn.Module:
    """8x7B: the defaults of its configuration."""
    import transformers as tf

    return tf.MixtralForCausalLM(tf.MixtralConfig(num_hidden_layers=layers or 32, use_cache=False))


def deepseek_v3(layers: int | None) -> nn.Module:
    """V3: the defaults of its configuration, 256 experts of which a token takes 8, three dense layers at first."""
    import transformers as tf

    return tf.DeepseekV3ForCausalLM(tf.DeepseekV3Config(num_hidden_layers=layers or 61, use_cache=False, num_mtp_layers=0))


MODELS: dict[str, Callable[[int | None], nn.Module]] = {"mixtral": mixtral, "deepseek_v3": deepseek_v3}


def run_case(name: str, mesh: str, layers: int | None, seconds: float, cluster: str) -> dict[str, Any]:
    """Plan one case in this process and measure it."""
    with torch.device("meta"):
        model, ids = MODELS[name](layers).to(torch.bfloat16), torch.zeros(BATCH, SEQ, dtype=torch.int64)
    options, start = Options(cluster=cluster, passing=Passing(outputs="auto")), cpu_seconds()
    clock = PhaseTimer(lambda phase, detail: print(f"  {phase} {detail}", file=sys.stderr))
    with clock("trace"):
        traced = trace(model, (), {"input_ids": ids, "labels": ids}, training=True)
    table = prices(traced, parse_mesh(mesh), options, clock=clock)
    with clock("formulate"):
        program = program_of(table, options)
    with clock("search"):
        found = find(program, How(Clock(seconds, now=time.process_time), progress=clock.search))
    plan = found.plan(table, {}, {})
    count = sum(op.target is EXPERTS for op in traced.graph.of_kind("call"))
    return {"layers": f"{model.config.num_hidden_layers} ({count})", "cpu_s": dict(clock.cpu_seconds), "total_cpu_s": cpu_seconds() - start,
            "step_s": plan.objective_s, "gap": plan.gap, "status": plan.status, "gib": (plan.memory["total"] or 0) / 2**30, "kind": plan.kind,
            "travel": _travelling(plan), "otherwise": _otherwise(plan)}


def _travelling(plan: Plan) -> str:
    found = Counter(c.axis for c in plan.collectives if c.kind == "all_to_all_rows")
    return ", ".join(f"{n} x {axis}" for axis, n in sorted(found.items())) or "none"


def _otherwise(plan: Plan) -> str:
    found = Counter(f"{c.kind} {c.axis}" for c in plan.collectives if not c.hideable and not c.inner and c.nbytes > 2**20)
    return ", ".join(f"{n} {what}" for what, n in sorted(found.items())) or "none"


def line(name: str, mesh: str, row: dict[str, Any]) -> str:
    return (f"| {name} | {mesh} | {row['layers']} | {row['cpu_s']['trace']:.0f}, {row['total_cpu_s']:.0f} | {1e3 * row['step_s']:.1f} ms "
            f"| {row['gap']:.2%} | {row['status']} | {row['gib']:.1f} | {row['travel']} | {row['otherwise']} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*")
    parser.add_argument("--layers", type=int, help="of the model, instead of all")
    parser.add_argument("--seconds", type=float, default=60.0, help="of CPU, for each search")
    parser.add_argument("--cluster", default="h100-dgx", help="a profile's name or file")
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        print(json.dumps(run_case(*given.one, given.layers, given.seconds, given.cluster)))
        return
    print(HEADER, flush=True)
    more = ["--seconds", str(given.seconds), "--cluster", given.cluster, *(["--layers", str(given.layers)] if given.layers else [])]
    for name, mesh in ((name, mesh) for name in MODELS for mesh in MESHES):
        if all(word in f"{name} {mesh}" for word in given.words):
            done = subprocess.run([sys.executable, "-m", __spec__.name, "--one", name, mesh, *more], stdout=subprocess.PIPE, text=True,
                                  env={**os.environ, "OMP_NUM_THREADS": "1"})
            print(line(name, mesh, json.loads(done.stdout)) if not done.returncode else f"| {name} | {mesh} | **failed** |", flush=True)


if __name__ == "__main__":
    main()
