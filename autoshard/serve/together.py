"""Prompt and token planned together by the first of the ranks that will run them."""
from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from autoshard.base.mesh import mesh_of
from autoshard.base.plan import Plan
from autoshard.cost.cluster import load_cluster
from autoshard.decide.options import Options
from autoshard.decide.phase_timer import PhaseTimer
from autoshard.runtime.ranks.agree import share
from autoshard.runtime.ranks.heartbeat import JOIN
from autoshard.runtime.ranks.place import cluster_here, locate
from autoshard.seeds.seeds import with_held
from autoshard.serve.phases import Phases
from autoshard.serve.sweep import Decoder, plan_decoder
from autoshard.serve.workload import Workload


def plan_together(decoder: Decoder, mesh: Any, workload: Workload, given: Mapping[str, Any]) -> tuple[Phases, Any]:
    """The plans, equal on every rank, and the mesh to compile for: its process groups are there. `given`: options of `autoshard.compile`.
    Raises what `autoshard.compile` raises."""
    cluster = given.get("cluster") or cluster_here(mesh, given.get("device"))
    options = Options.of(given, seeds=with_held(decoder.model, given.get("seeds")), cluster=cluster)
    mesh_of(mesh), load_cluster(options.cluster)  # a bad one is reported before ranks meet
    place = locate(mesh, given.get("device"), given.get("join_timeout", JOIN))

    def make() -> str:
        profile, clock = load_cluster(options.cluster), PhaseTimer(given.get("progress"))
        return _text(plan_decoder(decoder, place.mesh, options, workload, profile, clock)[0])

    facts = {"requests": str(workload), "options": options.text}
    return _read(share(place, facts, make, options.running.timeout)), place.device_mesh or mesh


def _text(phases: Phases) -> str:
    numbers = {name: getattr(phases, name) for name in ("steps", "decides", "bound_s", "relaid_s", "twice_s")}
    return json.dumps({**numbers, "prompt": phases.prompt.to_json(), "token": phases.token.to_json()})


def _read(text: str) -> Phases:
    said = json.loads(text)
    return Phases(**{**said, "prompt": Plan.from_json(said["prompt"]), "token": Plan.from_json(said["token"])})
