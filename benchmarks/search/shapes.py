"""The mesh that is chosen for a number of devices, held against planning every mesh one by one.

    python -m benchmarks.search.shapes                          # five models, 8 and 16 devices, up to two axes
    python -m benchmarks.search.shapes mlp gpt --devices 8 --axes 3 --cluster cpu-gloo

Without pipeline stages and micro-batches. Prints per case the step of the chosen mesh over the best of all (1: as good), the CPU seconds of both, and
how many meshes were searched for the choice. With --axes 3 the choice is thorough. Meshes whose plan has a gap count with the step that was found.
"""
from __future__ import annotations

import argparse
from collections.abc import Iterator
from importlib import import_module

import torch

import autoshard
from autoshard.decide.phase_timer import cpu_seconds

MODELS = ("mlp", "gpt", "llama", "vit", "moe")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=MODELS)
    parser.add_argument("--devices", type=int, nargs="+", default=[8, 16])
    parser.add_argument("--axes", type=int, choices=(2, 3), default=2)
    parser.add_argument("--size", default="tiny")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--cluster", default="h100-dgx")
    args = parser.parse_args()
    print(f"{'model':>6} {'devices':>7} {'chosen':>18} {'over best':>9} {'best':>18} {'searched':>8} {'CPU s':>7} {'all, CPU s':>10}")
    for name in args.models:
        for devices in args.devices:
            print(compared(name, devices, args), flush=True)


def compared(name: str, devices: int, args: argparse.Namespace) -> str:
    module = import_module(f"models.{name}")
    with torch.device("meta"):
        model, inputs = module.build(args.size, batch=args.batch)

    def planned(mesh: object, **options: object) -> autoshard.Plan:
        return autoshard.plan(model, mesh, inputs, loss_fn=module.loss, cluster=args.cluster, **options)

    start = cpu_seconds()
    found = planned(devices, pipeline=autoshard.Pipeline(microbatches=1), thorough=args.axes == 3)
    middle = cpu_seconds()
    steps = {mesh: planned(mesh).objective_s for mesh in meshes(devices, args.axes)}
    end = cpu_seconds()
    best = min(steps, key=lambda mesh: steps[mesh])
    searched = sum(s.step_s is not None for s in found.shapes)
    return (f"{name:>6} {devices:7} {str(found.mesh):>18} {found.objective_s / steps[best]:9.5f} {best:>18} {f'{searched} of {len(steps)}':>8} "
            f"{middle - start:7.1f} {end - middle:10.1f}")


def meshes(devices: int, axes: int) -> Iterator[str]:
    """Every mesh of at most so many axes with several ranks each, ranks filling nodes in order."""
    for sizes in factorings(devices, axes):
        yield ",".join(f"d{i}={n}" for i, n in enumerate(sizes))


def factorings(number: int, parts: int) -> Iterator[tuple[int, ...]]:
    yield (number,)
    if parts > 1:
        for first in (n for n in range(2, number) if number % n == 0):
            yield from ((first, *rest) for rest in factorings(number // first, parts - 1))


if __name__ == "__main__":
    main()
