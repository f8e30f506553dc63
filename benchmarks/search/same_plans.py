"""The same problem, choice and objective, bit for bit: what a change that only moves code must keep.

    python -m benchmarks.search.same_plans before.json                        # at the old commit
    python -m benchmarks.search.same_plans after.json --against before.json   # at the new one: lists what differs, exit code 1
    python -m benchmarks.search.same_plans quick.json --only mlp gpt          # cases whose name contains one of the words

Cases: the eight own models and t5 on (2), (2,2) and (2,4) in training and inference, llama 8B on (8,8), two tight budgets and
five sets of seeds. Only public names of the package are used, but for the class of the search problem, so the script runs on
both sides of a move. Searches that end by the clock are not compared, and are counted.
"""
from __future__ import annotations

import argparse
import hashlib
import json
import sys
import time
from importlib import import_module
from pathlib import Path

import numpy as np
import torch

import autoshard
from autoshard.search.problem import Problem

MODELS = ("mlp", "gpt", "llama", "moe", "vit", "resnet", "bert", "dlrm", "t5")
MESHES = ("a=2", "a=2,b=2", "a=2,b=4")
SEEDS = {
    "megatron mlp": {"h.*.mlp.c_fc.weight": "b,-"},
    "batch": {"input:*": "a,..."},
    "batch and columns": {"input:*": "a,...", "h.*.attn.c_attn.weight": "b,-"},
    "rows": {"h.*.mlp.c_proj.weight": "-,b"},
    "vocabulary": {"wte.weight": "b,-"},
}
BUDGETS = {"llama": "3.2MiB", "gpt": "3.4MiB"}


def cases() -> dict[str, dict]:
    """Name -> model, mesh and further arguments of `autoshard.plan`."""
    found = {}
    for model in MODELS:
        for mesh in MESHES:
            for training in (True, False):
                found[f"{model} {mesh} {'training' if training else 'inference'}"] = dict(model=model, mesh=mesh, training=training)
    for training in (True, False):  # where collectives hide behind compute, what hides has rows of its own
        found[f"llama overlapping {'training' if training else 'inference'}"] = dict(
            model="llama", mesh="a=2,b=4", training=training, cluster="h100-dgx", batch=8)
    for model, budget in BUDGETS.items():
        found[f"{model} tight {budget}"] = dict(model=model, mesh="a=2,b=2", training=True, memory_budget=budget, time_limit=40.0)
    for name, seeds in SEEDS.items():
        found[f"gpt seeds {name}"] = dict(model="gpt", mesh="a=2,b=2", training=True, seeds=seeds)
    found["llama 8b"] = dict(model="llama", size="8B", batch=16, seq=8192, mesh="a=8,b=8", training=True, cluster="h100-dgx", time_limit=600.0)
    return found


class FirstProblem:
    """Notes the digest of the first search problem that is built within `with`."""

    digest = ""

    def __enter__(self) -> "FirstProblem":
        self._init = Problem.__init__

        def noting(problem: Problem, *args: object, **kwargs: object) -> None:
            self._init(problem, *args, **kwargs)
            self.digest = self.digest or digest_of(problem)

        Problem.__init__ = noting
        return self

    def __exit__(self, *error: object) -> None:
        Problem.__init__ = self._init


def digest_of(problem: Problem) -> str:
    """Of every number of a problem, and of how it hangs together. Rows that nothing loads are left out."""
    found = hashlib.sha256()
    items = problem.items
    rows, row = np.unique(items.row, return_inverse=True)
    arrays = [*problem.node_costs, problem.row_limit[rows], problem.row_price[rows], items.node, items.strategy, row, items.amount]
    arrays += [x for e in problem.edges for x in (np.array([e.u, e.v]), e.table, e.rows, e.cols)]
    for array in arrays:
        array = np.ascontiguousarray(array)
        found.update(f"{array.shape}{array.dtype}".encode() + array.tobytes())
    return found.hexdigest()[:16]


def run(model: str, mesh: str, training: bool, size: str = "tiny", batch: int | None = None, seq: int | None = None,
        cluster: str = "cpu-gloo", **options: object) -> dict:
    module = import_module(f"models.{model}")
    sizes = {k: v for k, v in (("batch", batch), ("seq", seq)) if v is not None}
    with torch.device("meta"):
        built, inputs = module.build(size, **sizes)
    loss = getattr(module, "loss", None)
    if not training and loss is not None and model != "t5":
        inputs, loss = inputs[:-1], None
    start = time.process_time()
    with FirstProblem() as first:
        try:
            plan = autoshard.plan(built, mesh, inputs, loss_fn=loss, training=training, cluster=cluster, **options)
        except autoshard.AutoshardError as e:
            return {"problem": first.digest, "error": str(e)}
    data = json.loads(plan.to_json())
    data["ops"] = {name: {"in": op.get("in", op.get("inputs")), "out": op.get("out", op.get("outputs"))} for name, op in data["ops"].items()}
    chosen = json.dumps([data[k] for k in ("ops", "copies", "placements", "recompute", "offload")], sort_keys=True)
    return {"problem": first.digest, "choice": hashlib.sha256(chosen.encode()).hexdigest()[:16], "objective_s": repr(plan.objective_s),
            "memory": plan.memory["total"], "status": plan.status, "cpu_s": round(time.process_time() - start, 2)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", help="where the results go, as JSON")
    parser.add_argument("--against", help="a file of another run")
    parser.add_argument("--only", nargs="*", default=[""], help="words; a case runs when its name contains one of them")
    options = parser.parse_args()
    found = {}
    for name, case in cases().items():
        if any(word in name for word in options.only):
            found[name] = run(**case)
            print(name, *found[name].values(), flush=True)
    Path(options.file).write_text(json.dumps(found, indent=1) + "\n")
    if options.against:
        sys.exit(compare(found, json.loads(Path(options.against).read_text())))


def compare(after: dict[str, dict], before: dict[str, dict]) -> int:
    """Prints the cases that differ; 1 where there are any."""
    both = [name for name in after if name in before]
    bounded = [name for name in both if "time" in str(before[name].get("status", "")) + str(after[name].get("status", ""))]
    differ = [name for name in both if name not in bounded and {k: v for k, v in before[name].items() if k != "cpu_s"} != {
        k: v for k, v in after[name].items() if k != "cpu_s"}]
    for name in differ:
        print(f"differs: {name}\n  before {before[name]}\n  after  {after[name]}")
    print(f"{len(both) - len(differ) - len(bounded)} of {len(both)} cases are equal; {len(differ)} differ; {len(bounded)} ended by the clock")
    return int(bool(differ))


if __name__ == "__main__":
    main()
