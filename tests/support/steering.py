"""Tables and formulations of small models, for tests of baselines, propagation and explanations."""
from __future__ import annotations

import importlib
from functools import cache
from typing import Any

import torch

from autoshard.base.mesh import Mesh, parse_mesh
from autoshard.decide.options import Options
from autoshard.formulate.problem_of import Formulation, formulate
from autoshard.planner.one_stage import prices
from autoshard.program.calling import Traced
from autoshard.program.trace import trace

MODELS = ("bert", "dlrm", "gpt", "llama", "mlp", "moe", "resnet", "t5", "vit")


@cache
def traced(name: str, size: str = "tiny", **shape: Any) -> Traced:
    """A model of models/ with its loss, as one training step."""
    module = importlib.import_module(f"models.{name}")
    with torch.device("meta"):
        model, inputs = module.build(size, **shape)
    return trace(model, inputs, loss_fn=module.loss, training=True)


def formulation_of(program: Traced, mesh: str | Mesh, seeds: dict[str, Any] | None = None, cluster: str = "h100-dgx",
                   memory: float | None = None) -> Formulation:
    """What the search sees, without a memory limit unless one is given."""
    mesh = parse_mesh(mesh) if isinstance(mesh, str) else mesh
    options = Options(seeds=seeds or {}, cluster=cluster, memory_budget=memory)
    return formulate(prices(program, mesh, options), memory_limit=memory)
