"""Random legal plans on every model compute what one process computes."""
from __future__ import annotations

import pytest
import torch

from autoshard.decide.options import Passing
from autoshard.runtime.module import CompiledModule
from autoshard.runtime.ranks.place import locate
from models import bert, dlrm, gpt, llama, mlp, moe, resnet, t5, vit
from tests.dist.harness import assert_same_training, on_ranks, twins
from tests.dist.planners import by_planner, random_planner

pytestmark = pytest.mark.dist
MODELS = {"mlp": mlp, "gpt": gpt, "llama": llama, "bert": bert, "vit": vit, "resnet": resnet, "moe": moe, "t5": t5, "dlrm": dlrm}


def train(name: str, mesh: str, seed: int) -> None:
    module = MODELS[name]
    model, reference, batch = twins(module.build, torch.float64)
    settings = by_planner(random_planner(seed), loss_fn=module.loss, passing=Passing())
    compiled = CompiledModule(model, locate(mesh), settings)

    def loss_of(model, batch):
        return model(*batch)

    def reference_loss(model, batch):
        return module.loss(model(*batch[:-1]), batch[-1])

    assert_same_training(compiled, reference, [batch] * 3, loss_of, reference_loss)


def train_all(names: list[str], meshes: list[str], seeds: list[int]) -> None:
    for name in names:
        for mesh in meshes:
            for seed in seeds:
                try:
                    train(name, mesh, seed)
                except Exception as e:
                    e.add_note(f"model {name}, mesh {mesh}, plan seed {seed}")
                    raise


@pytest.mark.parametrize("world, mesh, names", [(2, "tp=2", ["mlp", "gpt", "moe"]), (4, "dp=2,tp=2", ["mlp", "gpt"])])
def test_random_plans(world: int, mesh: str, names: list[str]) -> None:
    on_ranks(world, train_all, names, [mesh], [0])  # moe on four: test_ways_in.py


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(MODELS))
@pytest.mark.parametrize("world, mesh", [(2, "tp=2"), (4, "tp=4"), (4, "dp=2,tp=2")])
def test_random_plans_of_every_model(world: int, mesh: str, name: str) -> None:
    on_ranks(world, train_all, [name], [mesh], [1, 2], timeout=600)
