"""Ops before and after simplification, ops in repeated layers, CPU seconds and memory of tracing.

    python -m benchmarks.search.graph_size gpt:tiny llama:tiny gpt:124M llama:8B

The second table of each model says which ops went: target, before, after.
"""
from __future__ import annotations

import importlib
import resource
import sys
import time

import torch

from autoshard.base.precision import Precision
from autoshard.program.simplify import simplify, stats
from autoshard.program.trace import trace
from autoshard.space.layers import repeated_layers


def measure(reference: str) -> None:
    name, _, size = reference.partition(":")
    module = importlib.import_module(f"models.{name}")
    with torch.device("meta"):
        model, example = module.build(size or "tiny")
    start = time.process_time()
    graph = trace(model, example, loss_fn=module.loss, precision=Precision(), raw=True).graph
    traced = time.process_time()
    simple = simplify(graph)
    done = time.process_time()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(f"{reference}: {len(graph.ops)} ops -> {len(simple.ops)}, {len(repeated_layers(simple))} of them in repeated layers; "
          f"trace {traced - start:.2f} CPU s, simplify {done - traced:.2f} CPU s, peak {peak:.2f} GiB")
    before, after = stats(graph), stats(simple)
    for target in sorted(before, key=lambda t: after.get(t, 0) - before[t]):
        if after.get(target, 0) < before[target]:
            print(f"    {target:28} {before[target]:6} {after.get(target, 0):6}")


if __name__ == "__main__":
    for argument in sys.argv[1:] or ["gpt:tiny", "llama:tiny"]:
        measure(argument)
