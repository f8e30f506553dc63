"""The timeline of a step with micro-batches against its windows as they run, on tensors that take no memory."""
from __future__ import annotations

import importlib
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from autoshard import _torch
from autoshard.base.graph import BACKWARD, FORWARD, Graph
from autoshard.base.mesh import parse_mesh
from autoshard.base.plan import Plan
from autoshard.base.roles import Role
from autoshard.base.spec import local_tensor_shape
from autoshard.base.windows import batch_dim_of
from autoshard.cost.cluster import load_cluster
from autoshard.cost.redistribute import Redistribution
from autoshard.lower.lower import Lowered, Port, bind, lower
from autoshard.lower.passes.in_place import overwrite
from autoshard.lower.schedule import schedule
from autoshard.pipeline.microbatches.results import Results, piece
from autoshard.play.footprint import Footprints
from autoshard.play.play import play
from autoshard.program.accumulate import accumulating
from autoshard.program.trace import trace
from autoshard.runtime.execute.eager import straight
from autoshard.runtime.microbatches import Micro, Windows
from autoshard.runtime.step import Function
from tests.dist.live_bytes import LiveBytes
from tests.dist.random_plans import random_plan

CLUSTER = load_cluster("cpu-gloo")
ROWS = 4


def graph_of(name: str, microbatches: int) -> Graph:
    """Of one micro-batch of `ROWS` rows, its loss taken to be a mean."""
    module = importlib.import_module(f"models.{name}")
    model, batch = module.build(batch=ROWS)
    graph = trace(model, batch, loss_fn=module.loss).graph
    dims = [0 if op.outputs[0].shape else None for op in graph.of_kind("input")]
    return accumulating(graph, microbatches, dims, [("mean", 0)] * len(graph.outputs(Role.USER)))


def run_fake(graph: Graph, plan: Plan, lowered: Lowered) -> int:
    """Peak bytes of rank 0."""
    mode, metas = _torch.fake_mode(), {op.target: op for op in graph.of_kind("param", "buffer", "input")}

    def fresh(name: str, pieces: int = 1) -> torch.Tensor:
        op = metas[name]
        shape = local_tensor_shape(op.outputs[0], plan.ops[op.name].outputs[0], plan.mesh)
        return torch.empty((pieces * shape[0], *shape[1:]) if pieces > 1 else shape, dtype=op.outputs[0].dtype)

    def function(local) -> Function:
        module, takes = bind(local, (0,) * plan.mesh.ndim, str, plan.mesh, torch.device("cpu"))
        overwrite(module.graph)
        return Function(takes, local.gives, straight(module.graph, "test"), ())

    with torch.no_grad(), mode, LiveBytes(lambda group: 0) as seen:
        stored = {op.target: fresh(op.target) for op in graph.of_kind("param", "buffer")}
        whole = {op.target: fresh(op.target, graph.microbatches if batch_dim_of(op) == 0 else 1) for op in graph.of_kind("input")}
        windows = Windows(graph, SimpleNamespace(mesh=plan.mesh, device=torch.device("cpu")), stored.__getitem__,
                          {w.window: function(w) for w in lowered.windows})
        results = Results(graph)
        windows.begin()
        for m in range(graph.microbatches):
            micro = Micro({n: piece(t, batch_dim_of(metas[n]), m, graph.microbatches) for n, t in whole.items()}, 0)
            out = windows.run(FORWARD, micro)
            results.add(m, [out.pop(Port(Role.USER, i)) for i in graph.outputs(Role.USER)])
            micro.tangents = {op.target: results.tangent(op.target) for op in graph.of_kind("tangent")}
            windows.run(BACKWARD, micro)
        grads = windows.finish()
        assert grads.keys() == {op.target for op in graph.of_kind("param")} and not windows.shared
        return seen.peak


@pytest.mark.parametrize(("name", "mesh"), [("mlp", "d=2"), ("gpt", "d=2"), ("llama", "a=2,b=2"), ("moe", "d=2"), ("dlrm", "d=2")])
def test_every_byte_of_random_plans(name: str, mesh: str) -> None:
    graph, on = graph_of(name, 3), parse_mesh(mesh)
    route, footprints = Redistribution(on, CLUSTER).steps, Footprints(on, CLUSTER)
    for seed in range(2):
        plan = random_plan(graph, on, route, seed)
        order = schedule(graph, plan, on, route)
        played = play(graph, replace(plan, settings={**plan.settings, "inputs": "local"}), order, footprints)
        total, change = 0, {}
        for b in played.buffers:
            change[b.born] = change.get(b.born, 0) + b.nbytes
            change[b.died] = change.get(b.died, 0) - b.nbytes
        predicted = max(total := total + change[t] for t in sorted(change))
        assert predicted == run_fake(graph, plan, lower(graph, plan, on, order)), f"seed {seed}"
