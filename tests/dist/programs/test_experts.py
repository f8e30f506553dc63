"""Layers of experts on real processes: tokens that travel, forward, gradients and three steps of AdamW as on one device."""
from __future__ import annotations

import copy
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

import autoshard
from autoshard.decide.options import Options, Passing, Running
from autoshard.planner import one_stage
from autoshard.planner.one_stage import decide, prices
from autoshard.runtime.module import CompiledModule
from autoshard.runtime.ranks.place import locate
from autoshard.space.strategies import enumerate_strategies
from tests.dist.harness import assert_same_training, on_ranks, twins
from tests.dist.planners import by_planner
from tests.support.experts import InStages, build, that_travel, travelling

pytest.importorskip("transformers")
pytestmark = pytest.mark.dist
SLOW = str(Path(__file__).parents[1] / "slow-device.toml")


def travelling_plan(traced, mesh, *, stored, inputs, pipeline=None) -> autoshard.Plan:
    options = Options(cluster=SLOW, time_limit=20)
    return decide(travelling(prices(traced, mesh, options, fixed={**stored, **inputs})), options)


def train(name: str, mesh: str, travels: bool = True, tol: float = 1e-9, backend: str = "eager", **more: int) -> None:
    model, reference, (ids,) = twins(lambda: build(name, **more), torch.float64)
    settings = by_planner(travelling_plan, passing=Passing(), running=Running(backend=backend))
    compiled = CompiledModule(model, locate(mesh), settings)
    assert_same_training(compiled, reference, [(ids,)] * 3, lambda m, b: m(input_ids=b[0], labels=b[0])["loss"], tol=tol)
    moved = {c.phase for c in compiled.plan.collectives if c.kind == "all_to_all_rows"}
    assert moved == ({"forward", "backward"} if travels else set()), f"rows travel in {moved}"


def train_in_parts(mesh: str, microbatches: int, schedule: str = "1f1b", layers: int = 2) -> None:
    """Tokens travel in micro-batches of four rows, with stages of a layer or without."""
    torch.manual_seed(0)
    model, batch = InStages(layers=layers).double(), torch.randint(1, 251, (2, 4 * microbatches, 6))
    reference = copy.deepcopy(model)
    stages = {"schedule": schedule, "cuts": tuple(f"layers.{i}" for i in range(1, layers))} if mesh.startswith("pp") else {}
    with patch.object(one_stage, "enumerate_strategies", lambda *a, **k: that_travel(enumerate_strategies(*a, **k))):
        compiled = autoshard.compile(model, mesh, tuple(batch), loss_fn=loss, cluster=SLOW, cache=False, time_limit=10,
                                     pipeline=autoshard.Pipeline(microbatches=microbatches, **stages))
    assert_same_training(compiled, reference, [tuple(batch)] * 3, lambda m, b: m(*b), lambda m, b: loss(m(b[0]), b[1]))
    assert {"forward", "backward"} <= {c.phase for c in compiled.plan.collectives if c.kind == "all_to_all_rows"}


def train_in_stages(cases: list[tuple[int, str, int]]) -> None:
    for case in cases:
        train_in_parts("pp=2,ep=2", *case)


def loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(logits, labels.flatten())


def train_all(cases: list[tuple[str, str, dict]]) -> None:
    for name, mesh, more in cases:
        try:
            train(name, mesh, **more)
        except Exception as e:
            e.add_note(f"model {name}, mesh {mesh}, {more}")
            raise


ROUNDED = {"tol": 1e-6}
"""transformers' models compute norms and routers in float32, whatever their weights are."""


def test_two_ranks() -> None:
    on_ranks(2, train_all, [("exact", "ep=2", {}), ("exact", "ep=2", {"experts": 7, "travels": False}), ("deepseek_v3", "ep=2", ROUNDED)])


def test_four_ranks() -> None:
    on_ranks(4, train_all, [("exact", "ep=4", {}), ("exact", "dp=2,ep=2", {"batch": 2, "seq": 6})])


def test_microbatches() -> None:
    on_ranks(2, train_in_parts, "ep=2", 3)


def test_stages() -> None:
    on_ranks(4, train_in_stages, [(3, "1f1b", 2), (4, "zb1p", 2), (4, "zbv", 4)])


@pytest.mark.slow
def test_models_of_transformers() -> None:
    on_ranks(2, train_all, [("mixtral", "ep=2", ROUNDED), ("qwen3_moe", "ep=2", ROUNDED)])


@pytest.mark.slow
def test_inductor() -> None:
    on_ranks(2, train_all, [("exact", "ep=2", {"backend": "inductor"})], timeout=900)
