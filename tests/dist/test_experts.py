"""Layers of experts on real processes: tokens that travel, forward, gradients and three steps of AdamW as on one device."""
from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

from harness import assert_same_training, on_ranks, twins  # noqa: E402
from planners import by_planner  # noqa: E402

import autoshard  # noqa: E402
from autoshard.decide.options import Options, Passing, Running  # noqa: E402
from autoshard.planner.one_stage import decide, prices  # noqa: E402
from autoshard.runtime.module import CompiledModule  # noqa: E402
from autoshard.runtime.ranks.place import locate  # noqa: E402
from tests.support.experts import build, travelling  # noqa: E402

pytest.importorskip("transformers")
pytestmark = pytest.mark.dist
SLOW = str(Path(__file__).with_name("slow-device.toml"))


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


@pytest.mark.slow
def test_models_of_transformers() -> None:
    on_ranks(2, train_all, [("mixtral", "ep=2", ROUNDED), ("qwen3_moe", "ep=2", ROUNDED)])


@pytest.mark.slow
def test_inductor() -> None:
    on_ranks(2, train_all, [("exact", "ep=2", {"backend": "inductor"})], timeout=900)
