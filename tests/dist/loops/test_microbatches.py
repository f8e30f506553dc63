"""Micro-batches compute what the batch computes: random legal plans, uneven counts, dropout, and outputs beside the loss."""
from __future__ import annotations

import copy

import pytest
import torch

from autoshard import Pipeline
from autoshard.decide.options import Passing
from autoshard.runtime.module import CompiledModule
from autoshard.runtime.ranks.place import locate
from models import bert, dlrm, gpt, llama, mlp, moe, t5, vit
from tests.dist.harness import assert_same_training, on_ranks, same_gradients, twins
from tests.dist.planners import by_planner, random_planner

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


def local_inputs() -> None:
    """Every rank passes its own rows; uneven counts; two calls before the update, and numbers of the outputs beside the loss."""
    from torch.nn import functional as F

    import autoshard

    def loss_fn(out: torch.Tensor, target: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": F.cross_entropy(out, target), "right": (out.argmax(1) == target).sum()}

    torch.manual_seed(0)
    reference = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.ReLU(), torch.nn.Linear(8, 5)).double()
    x, y = torch.randn(12, 6, dtype=torch.float64), torch.randint(5, (12,))
    y[[0, 1, 2, 7, 8]] = -100
    settings = by_planner(random_planner(1), loss_fn=loss_fn, passing=Passing("local"), pipeline=Pipeline(3))
    compiled = CompiledModule(copy.deepcopy(reference), locate("dp=2"), settings)
    mine = slice(6 * torch.distributed.get_rank(), 6 * torch.distributed.get_rank() + 6)
    for scale in (1.0, 0.5):
        got, want = compiled(x[mine], y[mine]), loss_fn(reference(x), y)
        assert got["right"] == want["right"] and torch.allclose(got["loss"], want["loss"], rtol=1e-12)
        (scale * got["loss"]).backward()
        (scale * want["loss"]).backward()
    same_gradients(compiled, reference, 1e-10)
    with pytest.raises(autoshard.AutoshardError, match="a rank passes 2 rows of input:0, which do not divide into 3 micro-batches|does not divide into 3"):
        compiled(x[:2], y[:2])


def test_local_inputs() -> None:
    on_ranks(2, local_inputs)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(MODELS))
@pytest.mark.parametrize("world, mesh", [(2, "tp=2"), (4, "dp=2,tp=2")])
def test_random_plans_of_every_model(world: int, mesh: str, name: str) -> None:
    on_ranks(world, train_all, [name], mesh, [1, 2, 4, 3], [0, 2], timeout=600)
