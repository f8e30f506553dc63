"""Micro-batches compute what the batch computes: random legal plans, uneven counts, dropout, and outputs beside the loss."""
from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

from harness import assert_same_training, on_ranks, twins  # noqa: E402
from planners import by_planner, random_planner  # noqa: E402

from autoshard import Pipeline  # noqa: E402
from autoshard.decide.options import Passing  # noqa: E402
from autoshard.runtime.module import CompiledModule  # noqa: E402
from autoshard.runtime.ranks.place import locate  # noqa: E402
from models import bert, dlrm, gpt, llama, mlp, moe, t5, vit  # noqa: E402

pytestmark = pytest.mark.dist
MODELS = {"mlp": mlp, "gpt": gpt, "llama": llama, "bert": bert, "vit": vit, "moe": moe, "t5": t5, "dlrm": dlrm}
BATCH = 12


def train(name: str, mesh: str, microbatches: int, seed: int) -> None:
    module = MODELS[name]
    model, reference, batch = twins(lambda: module.build(batch=BATCH), torch.float64)
    settings = by_planner(random_planner(seed), loss_fn=module.loss, passing=Passing(), pipeline=Pipeline(microbatches))
    compiled = CompiledModule(model, locate(mesh), settings)
    assert_same_training(compiled, reference, [batch] * 3, lambda m, b: m(*b), lambda m, b: module.loss(m(*b[:-1]), b[-1]))


def train_all(names: list[str], mesh: str, counts: list[int], seeds: list[int]) -> None:
    for name in names:
        for count in counts:
            for seed in seeds:
                try:
                    train(name, mesh, count, seed)
                except Exception as e:
                    e.add_note(f"model {name}, mesh {mesh}, {count} micro-batches, plan seed {seed}")
                    raise


def test_random_plans() -> None:
    on_ranks(2, train_all, ["gpt", "moe"], "tp=2", [3], [0])
    on_ranks(2, train_all, ["llama", "dlrm"], "tp=2", [2], [1])


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(MODELS))
@pytest.mark.parametrize("world, mesh", [(2, "tp=2"), (4, "dp=2,tp=2")])
def test_random_plans_of_every_model(world: int, mesh: str, name: str) -> None:
    on_ranks(world, train_all, [name], mesh, [1, 2, 4, 3], [0, 2], timeout=600)
