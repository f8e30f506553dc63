"""Which devices run a compiled model, and the profile that is assumed for them."""
import platform

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import autoshard
from autoshard.base.mesh import Mesh
from autoshard.runtime.ranks.place import cluster_here

MESHES = ("d=2", Mesh(("d",), (2,)))


@pytest.mark.parametrize("mesh", MESHES, ids=["text", "Mesh"])
@pytest.mark.parametrize("gpus, cluster", [(False, "cpu-gloo"), (True, "h100-dgx")])
def test_a_mesh_without_devices_is_of_those_that_are_there(mesh, gpus, cluster, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus)
    assert cluster_here(mesh) == cluster
    assert cluster_here(mesh, "cpu") == "cpu-gloo" and cluster_here(mesh, "cuda:1") == "h100-dgx"


@pytest.mark.parametrize("kind, cluster", [("cpu", "cpu-gloo"), ("cuda", "h100-dgx")])
def test_a_device_mesh_says_its_devices(kind, cluster):
    mesh = object.__new__(DeviceMesh)
    mesh._device_type = kind
    assert cluster_here(mesh) == cluster


@pytest.mark.parametrize("here, world, cluster", [("2", "2", "cpu-gloo:shared"), ("2", "4", "cpu-gloo"), (None, "2", "cpu-gloo")])
def test_processes_of_one_machine_take_the_prices_of_shared_memory(here, world, cluster, monkeypatch):
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    for name, value in (("LOCAL_WORLD_SIZE", here), ("WORLD_SIZE", world)):
        monkeypatch.delenv(name, raising=False) if value is None else monkeypatch.setenv(name, value)
    assert cluster_here("tp=2", "cpu") == cluster and cluster_here("tp=2", "cuda:0") == "h100-dgx"
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    assert cluster_here("tp=2", "cpu") == "cpu-gloo"


@pytest.mark.parametrize("given, used", [({}, "cpu-gloo"), ({"cluster": "a100-dgx"}, "a100-dgx")])
def test_a_compiled_model_is_planned_for_the_devices_that_run_it(given, used, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    model = autoshard.compile(nn.Linear(4, 2), "d=1", (torch.randn(3, 4),), training=False, cache=False, **given)
    assert model.plan.cluster["name"] == used
