"""Which device a rank takes, on machines with GPUs: stand-ins for what torch says of them."""
from __future__ import annotations

from collections.abc import Iterator
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from autoshard import _torch
from autoshard.errors import MeshError
from autoshard.runtime.ranks.place import locate
from tests.support.fake_cuda import said_of_gpus


@pytest.fixture
def mesh(monkeypatch: pytest.MonkeyPatch) -> Iterator[DeviceMesh]:
    """Of two GPUs of a machine with two; this is rank 1, whose current device is the first, as where nobody chose one."""
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=2)
    try:
        made = init_device_mesh("cuda", (2,), mesh_dim_names=("dp",))
        with said_of_gpus(count=2):
            yield made
    finally:
        dist.destroy_process_group()


def test_a_device_has_its_number(mesh: DeviceMesh) -> None:
    assert locate(mesh).device == torch.device("cuda:0")
    assert locate(mesh, "cuda").device == torch.device("cuda:0") != torch.device("cuda")
    assert locate(mesh, "cuda:1").device == torch.device("cuda:1")


def test_ranks_that_would_share_a_gpu_are_told(mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "1")
    with pytest.raises(MeshError, match=r"LOCAL_RANK=1 and would compute on cuda:0.*set_device"):
        locate(mesh)
    assert locate(mesh, "cuda:1").device.index == 1
    with mock.patch.object(torch.cuda, "device_count", lambda: 1):  # each process is shown one GPU
        assert locate(mesh).device.index == 0


def test_gloo_does_not_carry_for_gpus(mesh: DeviceMesh) -> None:
    with mock.patch.object(_torch, "transport", lambda group, kind: "gloo"):
        with pytest.raises(MeshError, match="moves their tensors by gloo"):
            locate(mesh)
        assert locate("dp=2").device.type == "cpu", "a process group by gloo alone is for CPUs"


def test_one_process_without_a_group() -> None:
    with said_of_gpus():
        assert locate("one=1").device == torch.device("cuda:0")
        assert locate("one=1", "cpu").device == torch.device("cpu")
