"""However a program makes its process group, the same program runs: by shared memory, or by messages where none is shared; and never a
functional collective, several of which at once corrupt memory over gloo (docs/runtime.md)."""
from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import autoshard
from autoshard import _torch
from autoshard.collectives import KIND_OF
from autoshard.lower.lower import Lowered
from autoshard.lower.overwrite_table import SWAP
from autoshard.runtime.carriers.gloo_messages import Members
from autoshard.runtime.carriers.shared_memory import SWITCH, Shared
from autoshard.runtime.module import CompiledModule
from autoshard.runtime.ranks.place import locate
from autoshard.runtime.step import Function
from models import moe, resnet
from tests.dist.harness import assert_same_training, on_ranks, twins
from tests.dist.planners import by_planner, random_planner
from tests.dist.ports import free_ports

pytestmark = pytest.mark.dist
README = "text alone, as in README"
WAYS: dict[str, Callable[[], Any]] = {  # what a program does before, and the mesh that it gives
    README: lambda: "dp=2,tp=2",
    "a DeviceMesh alone": lambda: init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp")),
    "gloo, then text": lambda: (dist.init_process_group("gloo"), "dp=2,tp=2")[1],
    "no back end named, then a DeviceMesh": lambda: (dist.init_process_group(), init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp")))[1],
    "a back end for each device, then text": lambda: (dist.init_process_group("cpu:gloo"), "dp=2,tp=2")[1],
}


class Refuse(_torch.DispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func not in KIND_OF and func is not _torch.WAIT, f"{func} runs"
        return func(*args, **(kwargs or {}))


BIND = Function.of


def refusing(*args: Any) -> Function:
    """A bound graph that fails where a functional collective runs."""
    made = BIND(*args)

    def call(values: list[Any]) -> Any:
        with Refuse():
            return made.call(values)

    return Function(made.takes, made.gives, call, made.issues)


class Wide(nn.Module):
    """Its gradients are too large for two ranks to swap: gloo reduces them where no memory is shared."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(512, SWAP // 8 // 512 + 64), nn.Linear(SWAP // 8 // 512 + 64, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x).relu())

    @staticmethod
    def build() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
        return Wide(), (torch.randn(8, 512), torch.randn(8, 8))


def train(mesh: Any, build: Callable[[], Any], loss: Callable[..., torch.Tensor], compiled_of: Callable[[nn.Module], CompiledModule]) -> CompiledModule:
    model, reference, batch = twins(build, torch.float64)
    compiled = compiled_of(model)
    assert_same_training(compiled, reference, [batch] * 2, lambda model, batch: model(*batch), lambda model, batch: loss(model(*batch[:-1]), batch[-1]))
    assert any(step.issues for step in compiled._steps.values())
    return compiled


def data_parallel(mesh: Any) -> CompiledModule:
    return train(mesh, Wide.build, nn.functional.mse_loss, lambda model: autoshard.compile(
        model, mesh, loss_fn=nn.functional.mse_loss, cluster="cpu-gloo", cache=False, seeds={"input:*": "dp,-", "*.weight": "-,-"}))


def every_way(ports: list[int]) -> None:
    rank = dist.get_rank()
    os.environ.update(RANK=str(rank), WORLD_SIZE="4", MASTER_ADDR="localhost")
    for port, (name, way) in zip(ports, WAYS.items(), strict=True):
        dist.barrier()
        dist.destroy_process_group()
        os.environ["MASTER_PORT"] = str(port)
        mesh = way()
        for shared in (True, False) if name == README else (True,):
            with patch.object(Function, "of", staticmethod(refusing)), no_memory(not shared):
                place = data_parallel(mesh).place
                carriers = place.carriers()
                assert set(carriers) == set(place.groups.values()) and all(isinstance(c, Shared if shared else Members) for c in carriers.values()), (
                    f"{name}: {carriers}")
    once: dict[str, Lowered] = {}  # the same program, which only its binding tells how ranks reach each other
    for shared in (True, False):
        for module, sizes in ((moe, {"layers": 1}), (resnet, {"blocks": (1, 1, 1, 1)})):
            with patch.object(Function, "of", staticmethod(refusing)), no_memory(not shared):
                train(mesh, partial(module.build, **sizes), module.loss, lambda model: CompiledModule(
                    model, locate(mesh), by_planner(random_planner(1), loss_fn=module.loss, once=once)))
    issued = {(KIND_OF[n.target].name, n.meta["part"].kind) for lowered in once.values() for w in lowered.windows for n in w.graph.nodes
              if n.target in KIND_OF}
    moves = ("all_gather", "all_reduce", "all_to_all", "reduce_scatter")
    assert issued >= {*((kind, "redistribute") for kind in moves), ("all_reduce", "compute"), ("mirror", "compute")}, "of every kind, some inside ops"


def no_memory(really: bool) -> Any:
    return patch.dict(os.environ, {SWITCH: "0"}) if really else nullcontext()


def test_every_way_in_runs_the_same_program() -> None:
    on_ranks(4, every_way, free_ports(len(WAYS)), timeout=600)

