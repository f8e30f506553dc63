"""autoshard: finds how to shard a PyTorch model over a device mesh, and runs it that way.

    model = autoshard.compile(model, mesh)
    plan = autoshard.plan(model, "dp=2,tp=4", example_inputs=(x,))

Names are imported when first used: `autoshard --help` need not wait for torch.
"""
from __future__ import annotations

import os
import sys
from importlib import import_module
from typing import Any

_HOMES = {
    "annotate": "autoshard.seeds.marks",
    "check_rule": "autoshard.rules.outside",
    "clip_grad_norm_": "autoshard.runtime.params.clip",
    "clocked": "autoshard.simulation.clocked",
    "compile": "autoshard.api",
    "generator": "autoshard.serve.api",
    "pad_to_bucket": "autoshard.runtime.lengths",
    "plan": "autoshard.api",
    "register_rule": "autoshard.rules.outside",
    "local_update": "autoshard.runtime.params.update",
    "stage": "autoshard.seeds.grammar",
    "stale_pipeline": "autoshard.api",
    "sweep": "autoshard.study.planner",
    "shard_batch": "autoshard.runtime.inputs",
    "transformers_cuts": "autoshard.seeds.from_transformers",
    "transformers_plan": "autoshard.report.as_transformers",
    "transformers_seeds": "autoshard.seeds.from_transformers",
    "simulate": "autoshard.simulation.simulate",
    "verify": "autoshard.verification.check",
    "AutoshardError": "autoshard.errors",
    "Mesh": "autoshard.base.mesh",
    "Pipeline": "autoshard.decide.pipeline_options",
    "Planner": "autoshard.study.planner",
    "Plan": "autoshard.base.plan",
    "Precision": "autoshard.base.precision",
    "ShardingSpec": "autoshard.base.spec",
}
__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'autoshard' has no attribute {name!r}; it has {', '.join(__all__)}")
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__


if os.environ.get("AUTOSHARD_LOGS") and not sys.argv[0].endswith("autoshard"):
    from autoshard.base.logs import configure

    configure(os.environ["AUTOSHARD_LOGS"])
