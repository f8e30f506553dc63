"""What further layouts are worth: plans with and without them, as ratios of predicted steps.

    python -m benchmarks.plans.layouts_worth nestings      # two axes on one dim of a weight in the other order, beside mesh order alone: a minute
    python -m benchmarks.plans.layouts_worth finer         # an axis in parts where heads do not divide over it, beside the axis as it is: ten minutes
    python -m benchmarks.plans.layouts_worth nestings bert # cases whose name has the word
"""
from __future__ import annotations

import argparse
from dataclasses import dataclass, field
from importlib import import_module
from unittest import mock

import torch

import autoshard
from autoshard.base.spec import is_inner
from autoshard.decide.phase_timer import cpu_seconds

QWEN_7B = {"width": 3584, "heads": 28, "kv_heads": 4, "hidden": 18944, "vocab": 152064}
QWEN_1B5 = {"width": 1536, "heads": 12, "kv_heads": 2, "hidden": 8960, "vocab": 151936}


@dataclass(frozen=True)
class Case:
    """A model with fields of its config, and how it is planned. `meshes`: the first is what the others are held against."""

    model: str
    batch: int
    seq: int
    meshes: tuple[str, ...] = ("dp=4,tp=2",)
    config: dict[str, int] = field(default_factory=dict)
    options: dict[str, object] = field(default_factory=dict)
    bf16: bool = False

    @property
    def title(self) -> str:
        return ", ".join((self.model, f"{self.batch} x {self.seq}", *(f"{k} {v}" for k, v in (*self.config.items(), *self.options.items()))))


MIXED = {"precision": autoshard.Precision("bf16")}
NESTINGS = (
    Case("bert:base", 8, 512, config={"layers": 2}, options={"cluster": "cpu-gloo"}),
    Case("gpt:1.5B", 1, 256, config={"layers": 2}, options={"cluster": "cpu-gloo"}),
    Case("gpt:1.5B", 8, 1024, config={"layers": 4}, options=MIXED),
    Case("llama:1B", 8, 4096, config={"layers": 4}, options=MIXED),
    Case("llama:8B", 2, 2048, config={"layers": 4}, options={**MIXED, "memory_budget": "7GiB"}),
    Case("llama:1B", 16, 4096, ("dp=8,tp=8",), {"layers": 4}, bf16=True),
)
PARTS = ("never", "tp=4x2", "tp=2x4")
FINER = (
    Case("llama:8B", 1, 4096, ("tp=8",), {"layers": 2, **QWEN_7B}, bf16=True),
    Case("llama:8B", 8, 2048, ("tp=8",), {"layers": 2, **QWEN_7B}, bf16=True),
    Case("llama:8B", 1, 4096, ("tp=8",), {"layers": 4, **QWEN_1B5}, bf16=True),
    Case("llama:8B", 8, 2048, ("tp=8",), {"layers": 4, **QWEN_1B5}, bf16=True),
    Case("gpt:124M", 1, 1024, ("tp=8",), {"layers": 4}, bf16=True),
)
"""Heads of which 8 ranks share 4 evenly."""


def planned(case: Case, mesh: str, **options: object) -> autoshard.Plan:
    module = import_module(f"models.{case.model.partition(':')[0]}")
    with torch.device("meta"):
        model, inputs = module.build(case.model.partition(":")[2], batch=case.batch, seq=case.seq, **case.config)
    model = model.to(torch.bfloat16) if case.bf16 else model
    return autoshard.plan(model, mesh, inputs, loss_fn=module.loss, time_limit=120.0,
                          **{"cluster": "h100-dgx", **case.options, **options})


def nestings(case: Case) -> None:
    (mesh,) = case.meshes
    with mock.patch("autoshard.space.strategies.nestings", lambda spec, sizes: ()):
        before = planned(case, mesh)
    after = planned(case, mesh)
    count = sum(any(map(is_inner, spec)) for spec in after.placements.values())
    print(f"| {case.title} | {mesh} | {before.objective_s * 1e3:.3f} | {after.objective_s * 1e3:.3f} | "
          f"{after.objective_s / before.objective_s:.4f} | {count} of {len(after.placements)} | {after.status} |", flush=True)


def finer(case: Case) -> None:
    (mesh,), first = case.meshes, None
    for asked in PARTS:
        start = cpu_seconds()
        plan = planned(case, mesh, refine_axes=asked)
        first, taken = first or plan, ", ".join(f"{axis}={'x'.join(map(str, parts))}" for axis, parts in plan.finer.items())
        print(f"| {case.title} | {asked} | {taken or mesh} | {plan.objective_s * 1e3:.3f} | {plan.objective_s / first.objective_s:.4f} | {plan.status} | "
              f"{cpu_seconds() - start:.1f} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("nestings", "finer"))
    parser.add_argument("words", nargs="*")
    given = parser.parse_args()
    heads = {"nestings": "| case | mesh | mesh order alone, ms | both, ms | ratio | inner shards | status |",
             "finer": "| case | refine_axes | plan | ms | ratio | status | CPU s |"}[given.what]
    print(heads + "\n" + "| --- " * (heads.count("|") - 1) + "|")
    for case in {"nestings": NESTINGS, "finer": FINER}[given.what]:
        if all(word in case.title for word in given.words):
            {"nestings": nestings, "finer": finer}[given.what](case)


if __name__ == "__main__":
    main()
