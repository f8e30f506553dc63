"""Attention of lowered graphs on a device that is not the CPU, here torch's meta device; whole programs: tests/runtime/test_fake_cuda.py."""
from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from torch import nn

from autoshard.base.mesh import Mesh
from autoshard.cost.cluster import load_cluster
from autoshard.cost.redistribute import Redistribution
from autoshard.errors import UsageError
from autoshard.lower.lower import LocalGraph, bind, lower
from autoshard.lower.passes.in_place import overwrite
from autoshard.lower.schedule import schedule
from autoshard.program.trace import trace
from autoshard.rules import attention_kernels
from autoshard.runtime.compile import Settings
from autoshard.runtime.execute.eager import straight
from autoshard.runtime.module import CompiledModule
from autoshard.runtime.ranks.place import Place
from tests.dist.random_plans import random_plan

META = torch.device("meta")


def local_graphs(name: str, dtype: torch.dtype = torch.float32, seed: int = 0) -> tuple[LocalGraph, LocalGraph, Mesh]:
    module, mesh = importlib.import_module(f"models.{name}"), Mesh(("dp", "tp"), (2, 2))
    model, batch = module.build()
    batch = tuple(t.to(dtype) if t.is_floating_point() else t for t in batch)
    graph = trace(model.to(dtype), batch, loss_fn=module.loss).graph
    route = Redistribution(mesh, load_cluster("h100-dgx")).steps
    plan = random_plan(graph, mesh, route, seed)
    lowered = lower(graph, plan, mesh, schedule(graph, plan, mesh, route))
    return lowered.forward, lowered.backward, mesh


def run(local: LocalGraph, mesh: Mesh) -> None:
    """The bound graph on the meta device."""
    module, _ = bind(local, (1, 1), str, mesh, META)
    overwrite(module.graph)
    straight(module.graph, "meta")([_on_meta(n.meta["val"]) for n in module.graph.nodes if n.op == "placeholder"])


def _on_meta(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return 0
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=META)


def test_attention_becomes_the_kernel_of_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    choose = attention_kernels.kernel_of
    monkeypatch.setattr(attention_kernels, "kernel_of", lambda *args: seen.append(choose(*args)) or seen[-1])
    for dtype, kernel in ((torch.bfloat16, "flash"), (torch.float32, "efficient")):
        forward, backward, mesh = local_graphs("gpt", dtype)
        run(forward, mesh), run(backward, mesh)
        assert len(seen) >= 4 and set(seen) == {kernel}, "two layers, forward and backward; a split sequence calls it in parts"
        seen.clear()


def test_autocast_of_another_device_is_refused() -> None:
    place = Place(Mesh(("one",), (1,)), None, (0,), {}, torch.device("cpu"))
    model = CompiledModule(nn.Linear(2, 2), place, Settings(lambda variant: None))
    object.__setattr__(place, "device", torch.device("cuda"))  # weights cannot be there
    before = torch.is_autocast_enabled("cuda")
    torch.set_autocast_enabled("cuda", True)
    try:
        with pytest.raises(UsageError, match="precision=autoshard.Precision"):
            model(torch.ones(1, 2))
    finally:
        torch.set_autocast_enabled("cuda", before)
