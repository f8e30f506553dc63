"""What is open in a call of `compile`, the mesh or the number of micro-batches, chosen by one rank for all."""
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from autoshard.base.mesh import AnyMesh, Mesh, mesh_or_any
from autoshard.base.plan import Plan
from autoshard.cost.cluster import Cluster
from autoshard.decide.arguments import loaded
from autoshard.decide.options import Options, planned_under
from autoshard.decide.phase_timer import PhaseTimer
from autoshard.errors import UsageError
from autoshard.pipeline.microbatches import batch
from autoshard.planner.open_mesh import is_open, plan_batch
from autoshard.runtime.cache import cached, key_of, planner_key
from autoshard.runtime.ranks.agree import share
from autoshard.runtime.ranks.place import locate


def closed(mesh: Any, options: Options, profile: Cluster, given: Mapping[str, Any]) -> tuple[Any, Options, Plan | None]:
    """Mesh, options and plan with nothing left open. `given`: the arguments of `compile`."""
    wanted, plan = mesh_or_any(mesh), loaded(given["plan"])
    if not is_open(wanted, options):
        return mesh, options, plan
    plan = plan or _agreed_choice(wanted, options, profile, given)
    return plan.mesh if isinstance(wanted, AnyMesh) else mesh, replace(options, pipeline=planned_under(plan)["pipeline"]), plan


def _agreed_choice(mesh: Mesh | AnyMesh, options: Options, profile: Cluster, given: Mapping[str, Any]) -> Plan:
    """The plan that one rank chooses for all, where mesh or micro-batches are open; from the cache where it is there."""
    model, loss_fn, training = given["model"], given["loss_fn"], given["training"]
    if given["example_inputs"] is None:
        what = f"the mesh {mesh}" if isinstance(mesh, AnyMesh) else "microbatches='auto'"
        named = f", or give a mesh with names, such as 'd={mesh.size}'" if isinstance(mesh, AnyMesh) else ""
        raise UsageError(f"{what} is chosen for a batch: pass example_inputs to compile{named}")
    place = locate(Mesh(("devices",), (mesh.size,)) if isinstance(mesh, AnyMesh) else given["mesh"], given["device"], given["join_timeout"])
    asked = batch.Batch(model, tuple(given["example_inputs"]), dict(given["example_kwargs"] or {}), options.tracing(loss_fn, training))

    def search() -> Plan:
        return plan_batch(asked, mesh, options, clock=PhaseTimer(given["progress"]), has_loss=loss_fn is not None, interruptible=False)

    def text() -> str:
        key = key_of(asked.whole.graph.hash, str(mesh), planner_key(options, profile))
        return cached(options.running.cache, key, search).to_json()

    with torch.set_grad_enabled(torch.is_grad_enabled() and model.training if training is None else training):
        return Plan.from_json(share(place, {"mesh": str(mesh), "options": options.text}, text, options.running.timeout))
