"""What is worked out once for values that are read alike: the same problem as when each is worked out by itself."""
from __future__ import annotations

from importlib import import_module

import pytest
import torch

from autoshard.base.mesh import parse_mesh
from autoshard.decide.options import Options
from autoshard.decide.program import formulate_within
from autoshard.formulate import problem_of
from autoshard.pipeline.microbatches.batch import Batch
from autoshard.planner.one_stage import prices


@pytest.mark.parametrize("name, mesh, options", [("gpt", "2x4", {}), ("llama", "4", {"offload": "optimizer"}), ("moe", "2x2", {}), ("vit", "2x2", {})])
def test_the_problem_is_the_same(name, mesh, options, monkeypatch):
    module, replayed = import_module(f"models.{name}"), []
    with torch.device("meta"):
        model, inputs = module.build("tiny", layers=5, batch=16)
    graph = Batch(model, inputs, {}, {"loss_fn": module.loss, "training": True}).whole
    table = prices(graph, parse_mesh(mesh), Options(cluster="h100-dgx", **options))
    again = problem_of.again
    monkeypatch.setattr(problem_of, "again", lambda b, known, *rest: replayed.append(known) or again(b, known, *rest))
    short = formulate_within(table, 1e15)
    monkeypatch.setattr(problem_of, "_add_alike", lambda b, ref, layers: problem_of._add_readers(b, ref, None, layers))
    plain = formulate_within(table, 1e15)
    assert replayed and short.problem.key == plain.problem.key and short.copies == plain.copies
    assert short.problem.groups.tolist() == plain.problem.groups.tolist()
    assert [(n, a.tolist()) for n, a in short.saved] == [(n, a.tolist()) for n, a in plain.saved]
    ours, theirs = ((p.items.node, p.items.strategy, p.items.row, p.items.amount) for p in (short.problem, plain.problem))
    assert all(a.tolist() == b.tolist() for a, b in zip(ours, theirs, strict=True))
