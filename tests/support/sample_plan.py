"""A plan written by hand, with repeated layers of which the last differs; shared by tests of reports and CLI."""
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from autoshard.base.mesh import Mesh
from autoshard.base.plan import Collective, Copy, Fallback, OpPlan, PlacedTensor, Plan, StagePlan
from autoshard.base.spec import PSUM, R

LAYERS = 4
MESH = Mesh(("dp", "tp"), (2, 4))


def sample_plan(stage: Mapping[str, object] | None = None, **changes: object) -> Plan:
    """`stage`: changes of its only stage."""
    compute, blocking, exposed, optimizer = 0.9, 0.05, 0.01, 0.04
    values = dict(
        graph_hash="0" * 32, mesh=MESH, cluster={"name": "h100-dgx"},
        model={"reference": "llama:tiny", "batch": 8, "seq": 64, "dtype": "bfloat16"},
        settings={"training": True, "optimizer": "adamw"},
        ops={"wq": OpPlan(((0, R), (R, 0)), ((0, 1),))},
        placements={x.name: x.spec for x in _weights()},
        copies=(Copy("wq", "forward", (R, R), "made"),),
        collectives=tuple(_collectives()),
        fallbacks=(Fallback("cumsum", "aten.cumsum.default", 2e-6, "layers.0.mlp", "model.py:41"),
                   Fallback("cumsum_1", "aten.cumsum.default", 2e-6, "layers.1.mlp", "model.py:41")),
        predicted={"step_s": 1.0, "compute_s": compute, "blocking_s": blocking, "hideable_s": 0.03,
                   "hidden_s": 0.02, "exposed_s": exposed, "optimizer_s": optimizer},
        stages=(StagePlan(memory={"parameters": 2.0 * 2**30, "gradients": 2.0 * 2**30, "optimizer": 8.0 * 2**30,
                                  "saved": 3.0 * 2**30, "buffers": 1024.0, "total": 15.0 * 2**30 + 1024, "limit": 70.0 * 2**30}),),
        objective_s=1.0, bound_s=1.0, gap=0.0, status="optimal",
        seeds={"input:0": "[dp, -]"}, notes=("the vocabulary is split over tp",),
        layouts=(*_weights(), *_others()), search={"nodes": 300, "seconds_limit": 60.0},
        timings={"trace": 1.5, "search": 0.25},
    )
    plan = Plan(**{**values, **changes})
    return replace(plan, stages=(replace(plan.stages[0], **stage),)) if stage else plan


def _weights() -> list[PlacedTensor]:
    rows = [PlacedTensor("weight", "embed.weight", "embed", (512, 64), "bfloat16", (R, 0))]
    for i in range(LAYERS):
        down = (R, R) if i == LAYERS - 1 else (R, 1)
        rows += [PlacedTensor("weight", f"layers.{i}.attn.wq.weight", f"layers.{i}.attn.wq", (64, 64), "bfloat16", (R, 0)),
                 PlacedTensor("weight", f"layers.{i}.mlp.down.weight", f"layers.{i}.mlp.down", (64, 256), "bfloat16", down)]
    return rows


def _others() -> list[PlacedTensor]:
    rows = [PlacedTensor("buffer", "rope", "", (64, 16), "float32", (R, R)),
            PlacedTensor("input", "input:0", "", (8, 64), "int64", (0, R))]
    for i in range(LAYERS):
        rows += [PlacedTensor("activation", f"layers.{i}.attn.wq", f"layers.{i}.attn.wq", (8, 64, 64), "bfloat16", (0, 2)),
                 PlacedTensor("activation", f"layers.{i}", f"layers.{i}", (8, 64, 64), "bfloat16", (0, PSUM))]
    return rows + [PlacedTensor("output", "user:0", "", (), "float32", (R, R))]


def _collectives() -> list[Collective]:
    rows = []
    for i in range(LAYERS):
        for phase in ("forward", "backward"):
            rows.append(Collective("all_reduce", "tp", 65536, 1e-3, phase, f"mm_{i}", f"add_{i}", "sum", "bfloat16",
                                   module=f"layers.{i}.mlp", source="model.py:40"))
        rows.append(Collective("reduce_scatter", "dp", 8192, 2e-4, "backward", f"grad_{i}", f"out_{i}", "sum",
                               "bfloat16", hideable=True, module=f"layers.{i}.attn.wq", source="model.py:20"))
    return rows
