"""The programs of own models bound to CUDA devices that are not there: everything on the device, calls of NCCL alike on all ranks, no race."""
from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch

from autoshard._torch import WAIT, functional_collective
from autoshard.base.mesh import Mesh
from autoshard.base.plan import Plan
from autoshard.cost.cluster import load_cluster
from autoshard.cost.redistribute import Redistribution
from autoshard.lower.lower import LocalGraph, Lowered, lower
from autoshard.lower.schedule import schedule
from autoshard.program.trace import trace
from autoshard.runtime.execute.backends import backend_of
from autoshard.runtime.params.host_state import keep_on_host
from autoshard.runtime.params.update import local_update
from autoshard.runtime.ranks.place import Place
from autoshard.runtime.step import Function
from tests.dist.random_plans import random_plan
from tests.support.fake_cuda import CUDA, Recorded, fake_cuda, on_cuda

MODELS = ("mlp", "gpt", "llama", "bert", "vit", "resnet", "moe", "t5", "dlrm")
MESH = Mesh(("dp", "tp"), (2, 2))
GATHER = functional_collective("all_gather_into_tensor")
GROUPS = {axis: axis for axis in ("dp", "tp", "dp+tp")}


def lowered(name: str, dtype: torch.dtype = torch.float32, seed: int = 0) -> Lowered:
    module = importlib.import_module(f"models.{name}")
    model, batch = module.build()
    batch = tuple(t.to(dtype) if t.is_floating_point() else t for t in batch)
    graph = trace(model.to(dtype), batch, loss_fn=module.loss).graph
    route = Redistribution(MESH, load_cluster("h100-dgx")).steps
    plan: Plan = random_plan(graph, MESH, route, seed)
    return lower(graph, plan, MESH, schedule(graph, plan, MESH, route))


def bound(local: LocalGraph, rank: int) -> Function:
    place = Place(MESH, None, MESH.coordinates(rank), dict(GROUPS), CUDA)
    return Function.of(local, place, backend_of("eager"), f"rank{rank}")


def run(local: LocalGraph, rank: int, saved: dict[Any, torch.Tensor]) -> dict[Any, torch.Tensor]:
    """What the graph gives on one rank, by port, each compared with what the plan says it is. `saved`: what forward gave."""
    function = bound(local, rank)
    nodes = [n for n, port in zip((n for n in local.graph.nodes if n.op == "placeholder"), local.takes, strict=True) if port.kind != "coord"]
    given = [saved.get(port) if port in saved else _like(n.meta["val"]) for n, port in zip(nodes, function.takes, strict=True)]
    planned = [n.meta["val"] for n in next(n for n in local.graph.nodes if n.op == "output").args[0]]
    results = dict(zip(function.gives, function.call(given), strict=True))
    for port, want in zip(function.gives, planned, strict=True):
        got = results[port]
        assert (got.device, got.shape, _strides(got)) == (CUDA, want.shape, _strides(want)), port
        assert got.dtype == want.dtype or got.dtype == torch.float32 and _is_statistic(port), port
    return results


def _like(value: Any) -> Any:
    return on_cuda(value) if isinstance(value, torch.Tensor) else 0


def _is_statistic(port: Any) -> bool:
    """What a norm saves beside its output: kernels of a GPU keep it in float32, those of CPUs, and so plans, in the type of the input."""
    return port.kind == "saved" and "norm" in port.name.ref.op and port.name.ref.index > 0


def _strides(t: torch.Tensor) -> list[int]:
    """Those that matter."""
    return [stride for stride, size in zip(t.stride(), t.shape, strict=True) if size != 1]


def step(program: Lowered, rank: int) -> Recorded:
    """Forward and backward on one rank."""
    with fake_cuda() as recorder, torch.no_grad():
        given = run(program.forward, rank, {})
        assert program.backward is not None
        run(program.backward, rank, {port: t for port, t in given.items() if port.kind == "saved"})
        return recorder.end()


@pytest.mark.parametrize("name", MODELS)
def test_programs_run_on_every_rank(name: str) -> None:
    program = lowered(name)
    seen = [step(program, rank) for rank in (0, MESH.size - 1)]
    assert seen[0].races == []
    assert seen[0].issued, "a random plan of a training step communicates"
    assert all(s.issued == seen[0].issued for s in seen), "ranks that issue other calls wait for each other for ever"
    planned = [call for local in (program.forward, program.backward) for call in bound(local, 0).issues]
    assert [(i.kind, i.group) for i in seen[0].issued] == [(c.kind, c.axis) for c in planned]


@pytest.mark.parametrize("name", ["gpt", "resnet"])
def test_half_precision(name: str) -> None:
    seen = step(lowered(name, torch.bfloat16), 0)
    assert seen.races == [] and any(i.dtype == torch.bfloat16 for i in seen.issued)


def test_state_on_the_host_is_pinned_and_travels_around_its_update() -> None:
    with fake_cuda() as recorder, torch.no_grad():
        p = torch.empty(64, 64, device=CUDA)
        optimizer = torch.optim.AdamW([p])
        keep_on_host({"p": p}, ["p"], afresh=True)
        local_update(optimizer)
        for _ in range(2):
            p.grad = torch.empty_like(p)
            optimizer.step()
        state = [t for t in optimizer.state[p].values() if t.ndim]
        assert len(state) == 2 and all(t.device.type == "cpu" for t in state)
    moved = 2 * p.nbytes
    seen = recorder.end()
    assert sum(seen.pinned) == moved, "made once"
    assert sum(n for n, _ in seen.to_host) == 2 * moved and sum(n for n, _ in seen.to_device) == moved
    assert not any(free for _, free in seen.to_host), "the host may read it next"


@pytest.mark.parametrize("late", [False, True])
def test_races_are_seen(late: bool) -> None:
    """The recorder of this file: a gather's result read too early, and what it sends overwritten."""
    with fake_cuda() as recorder, torch.no_grad():
        x = torch.empty(4, device=CUDA)
        out = GATHER(x, 2, "dp")
        if late:
            x.add_(1), out.mul(2)
        ready = WAIT(out)
        x.add_(1), ready.mul(2)
    assert len(recorder.end().races) == (2 if late else 0)
    assert [(i.kind, i.group, i.shape) for i in recorder.seen.issued] == [("all_gather", "dp", (4,))]
