"""The timeline of a plan against the lowered program as it runs, on tensors that take no memory."""
from __future__ import annotations

import importlib
from dataclasses import replace
from typing import Any

import pytest
import torch

from autoshard import _torch
from autoshard.base.graph import Graph
from autoshard.base.mesh import parse_mesh
from autoshard.base.plan import Plan
from autoshard.base.spec import local_tensor_shape
from autoshard.cost.cluster import load_cluster
from autoshard.cost.redistribute import Redistribution
from autoshard.lower.lower import LocalGraph, Lowered, bind, lower
from autoshard.lower.passes.in_place import overwrite
from autoshard.lower.schedule import Route, schedule
from autoshard.play.footprint import Footprints
from autoshard.play.play import play
from autoshard.program.trace import trace
from autoshard.runtime.execute.eager import straight
from tests.dist.live_bytes import LiveBytes
from tests.dist.random_plans import random_plan

MODELS = ("mlp", "gpt", "llama", "bert", "vit", "resnet", "moe", "t5", "dlrm")
CLUSTER = load_cluster("cpu-gloo")
APART = replace(CLUSTER, links=(replace(CLUSTER.links[0], devices=2), replace(CLUSTER.links[0], name="ethernet")))
"""Machines of two ranks."""


def graph_of(name: str) -> Graph:
    module = importlib.import_module(f"models.{name}")
    model, batch = module.build()
    return trace(model, batch, loss_fn=module.loss).graph


def run_fake(graph: Graph, plan: Plan, lowered: Lowered, messages: frozenset[str]) -> int:
    """Peak bytes of rank 0 when the generated code runs on fake tensors. `messages`: mesh axes whose ranks share no memory."""
    mode, metas = _torch.fake_mode(), {op.target: op for op in graph.of_kind("param", "buffer", "input", "tangent")}

    def fresh(port: Any) -> torch.Tensor:
        op = metas[port.name]
        shape = local_tensor_shape(op.outputs[0], plan.ops[op.name].outputs[0], plan.mesh)
        return torch.empty(shape, dtype=op.outputs[0].dtype)

    def function(local: LocalGraph) -> tuple[Any, Any]:
        module, takes = bind(local, (0,) * plan.mesh.ndim, str, plan.mesh, torch.device("cpu"))
        overwrite(module.graph)
        return straight(module.graph, "test"), takes

    def ranks(group: str) -> int:
        return 0 if messages.isdisjoint(group.split("+")) else plan.mesh.ranks(plan.mesh.axes(group))

    with torch.no_grad(), mode, LiveBytes(ranks) as seen:
        call, takes = function(lowered.forward)
        users = {p: 0 if p.kind == "seed" else fresh(p) for p in takes}
        stored = {p: t for p, t in users.items() if p.kind in ("param", "buffer")}
        for op in graph.of_kind("param", "buffer", "input"):  # those that forward does not read are there all the same
            if not any(p.kind == op.kind and p.name == op.target for p in users):
                stored[op.name] = fresh(type(takes[0])(op.kind, op.target))
        outs = dict(zip(lowered.forward.gives, call([users[p] for p in takes]), strict=True))
        kept = [t for p, t in outs.items() if p.kind == "user"]
        saved = {p: t for p, t in outs.items() if p.kind == "saved"}
        del outs
        if lowered.backward is not None:
            call, takes = function(lowered.backward)
            everything = {**stored, **{p: t for p, t in users.items() if p.kind in ("param", "buffer")}}
            tangents = {p: fresh(p) for p in takes if p.kind == "tangent"}  # autograd holds them until backward is through
            arguments = [saved.pop(p) if p.kind == "saved" else 0 if p.kind == "seed" else tangents[p] if p.kind == "tangent"
                         else next((t for q, t in everything.items() if q == p), None) for p in takes]
            grads = call(arguments)
            del grads
        del kept
        return seen.peak


def peak_of(graph: Graph, plan: Plan, route: Route, footprints: Footprints) -> int:
    plan = replace(plan, settings={**plan.settings, "inputs": "local"})
    played = play(graph, plan, schedule(graph, plan, plan.mesh, route), footprints)
    total, change = 0, {}
    for b in played.buffers:
        change[b.born] = change.get(b.born, 0) + b.nbytes
        change[b.died] = change.get(b.died, 0) - b.nbytes
    return max(total := total + change[t] for t in sorted(change))


@pytest.mark.parametrize("mesh", ["d=2", "a=2,b=2"])
@pytest.mark.parametrize("name", MODELS)
def test_every_byte_of_random_plans(name: str, mesh: str) -> None:
    graph, on = graph_of(name), parse_mesh(mesh)
    route, footprints = Redistribution(on, APART).steps, Footprints(on, APART)
    assert footprints.apart == ({"a"} if "a" in on.names else set())
    for seed in range(2):
        plan = random_plan(graph, on, route, seed)
        predicted = peak_of(graph, plan, route, footprints)
        seen = run_fake(graph, plan, lower(graph, plan, on, schedule(graph, plan, on, route)), footprints.apart)
        exact = (name, mesh) != ("bert", "a=2,b=2")  # there 32 KiB that are sent are counted for longer than they live
        assert seen <= predicted <= (seen if exact else 1.02 * seen), f"seed {seed}"
