"""Where this process is: its mesh coordinates, process groups and device."""
from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from autoshard import _torch
from autoshard.base.mesh import AUTO, Mesh, parse_mesh
from autoshard.base.spec import Spec
from autoshard.decide.options import default_cluster
from autoshard.errors import MeshError
from autoshard.runtime.carriers.choose import Carrier
from autoshard.runtime.carriers.gloo_messages import Members
from autoshard.runtime.carriers.shared_memory import on_one_machine, share_memory
from autoshard.runtime.ranks.freed_memory import keep_freed_memory
from autoshard.runtime.ranks.heartbeat import JOIN, Pulse, meet
from autoshard.runtime.ranks.leaving import leave_in_order
from autoshard.runtime.ranks.store import PatientStore

NOT_FOR_GPUS = ("", "gloo")
"""What process groups that cannot carry tensors of a GPU name as their carrier."""


@dataclass(frozen=True, eq=False)
class Place:
    """`device_mesh` is None on a mesh of size 1 without a process group; parameters are plain tensors there. `groups`: names of
    process groups by mesh axis; axes that programs take as one join them, see `group`. `join_timeout`: seconds to wait for ranks
    that have not come here. `carried`: what carries collectives, by name of the group, see `carriers`."""

    mesh: Mesh
    device_mesh: DeviceMesh | None
    coordinates: tuple[int, ...]
    groups: dict[str, str]
    device: torch.device
    join_timeout: float = JOIN
    carried: dict[str, Carrier] = field(default_factory=dict)

    @property
    def is_leader(self) -> bool:
        return not any(self.coordinates)

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """Global ranks of the mesh, in mesh order."""
        return (0,) if self.device_mesh is None else tuple(self.device_mesh.mesh.flatten().tolist())

    def group(self, axes: str) -> str:
        """Name of the process group of a mesh axis, or of several taken as one ("dp+tp"). That one is made when it is first asked
        for, so all ranks ask in the same order: they bind the same program."""
        if axes not in self.groups:
            self.groups[axes] = joined_group(self.device_mesh, self.mesh.axes(axes), self.mesh.sizes).group_name
        return self.groups[axes]

    def on(self, mesh: Mesh) -> Place:
        """The same rank on a mesh that has axes of this one in parts: what programs run on, with the groups of both."""
        return self if mesh == self.mesh else replace(self, mesh=mesh, coordinates=mesh.coordinates(self.mesh.rank_at(self.coordinates)))

    @property
    def gloo_groups(self) -> dict[str, dist.ProcessGroup]:
        """Process groups over which CPU tensors travel by gloo, by name."""
        if self.device_mesh is None or self.device.type != "cpu":
            return {}
        found = {name: _torch.process_group(name) for name in self.groups.values()}
        return {name: group for name, group in found.items() if _torch.transport(group, self.device.type) == "gloo"}

    def carriers(self) -> dict[str, Carrier]:
        """What carries collectives of these groups, by name: memory where all ranks of a group are on this machine, else messages. All
        ranks ask in the same order."""
        for name, group in self.gloo_groups.items():
            if name not in self.carried:
                self.carried[name] = share_memory(group, _torch.timeout(group)) or Members(group)
        return dict(self.carried)

    @cached_property
    def store(self) -> PatientStore:
        """Of the default process group."""
        return PatientStore(_torch.default_store())

    @cached_property
    def pulse(self) -> Pulse:
        """Of this rank; starts when it is first asked for. Ranks make their places in the same order."""
        store, rank = self.store, dist.get_rank()
        name = "-".join(map(str, (self.ranks[0], self.ranks[-1], len(self.ranks), self.mesh)))
        return Pulse(store, f"autoshard/pulse/{name}/{store.add(f'autoshard/places/{name}/{rank}', 1)}", rank, self.ranks, self.join_timeout)

    def slice(self, whole: torch.Tensor, spec: Spec) -> torch.Tensor:
        """This rank's piece of a tensor that every rank has whole: a view. Axes in mesh order, major first."""
        for placement, size, c in zip(spec, self.mesh.sizes, self.coordinates, strict=True):
            if placement >= 0:
                length = whole.shape[placement] // size
                whole = whole.narrow(placement, c * length, length)
        return whole

    def whole_shape(self, local: tuple[int, ...], spec: Spec) -> tuple[int, ...]:
        """Global shape of a tensor whose piece is `local`."""
        return tuple(n * prod(s for s, p in zip(self.mesh.sizes, spec, strict=True) if p == d)
                     for d, n in enumerate(local))


def joined_group(device_mesh: DeviceMesh, dims: Sequence[int], sizes: Sequence[int] | None = None) -> dist.ProcessGroup:
    """This rank's process group over several dims of a mesh, the earlier dim major. `sizes`: of the dims, where those of the mesh are in parts.
    Every rank of the mesh calls this, in the same order. The group of all processes is there already, as for a mesh of one dim."""
    mesh = device_mesh.mesh if sizes is None else device_mesh.mesh.reshape(tuple(sizes))
    kept = [d for d in range(mesh.ndim) if d not in dims]
    ranks = mesh.permute(*kept, *dims).reshape(-1, prod(mesh.shape[d] for d in dims)).tolist()
    world = list(range(dist.get_world_size()))
    if ranks == [world]:
        return dist.group.WORLD
    here, = (row for row in ranks if dist.get_rank() in row)
    if sorted(sum(ranks, [])) != world:  # other processes do not take part
        return dist.new_group(here, use_local_synchronization=True, sort_ranks=False)
    made = [dist.new_group(row, sort_ranks=False) for row in ranks]
    return made[ranks.index(here)]


def group_names(device_mesh: DeviceMesh) -> dict[str, str]:
    """Process-group name per mesh axis, as functional collectives want it."""
    return {axis: device_mesh.get_group(axis).group_name for axis in device_mesh.mesh_dim_names or ()}


def axes_of_ranks(device_mesh: DeviceMesh, ranks: Sequence[int]) -> str | None:
    """The mesh axes ("dp+tp") on which these ranks differ, where they are just the ranks that differ on them, in mesh order."""
    at = [(device_mesh.mesh == r).nonzero().flatten().tolist() for r in ranks]
    if not all(at):
        return None
    dims = [d for d, along in enumerate(zip(*at, strict=True)) if len(set(along)) > 1]
    whole = prod(device_mesh.shape[d] for d in dims) == len(ranks) and at == sorted(at)
    return "+".join(device_mesh.mesh_dim_names[d] for d in dims) if dims and whole else None


def device_type(mesh: Any, device: Any = None) -> str:
    """The kind of device ("cuda", "cpu") that runs a model compiled for a mesh: that of `device`, else the DeviceMesh's, else GPUs where there are
    any, and the process group, if there is one already, does not move their tensors by gloo."""
    if device is not None:
        return torch.device(device).type
    if isinstance(mesh, DeviceMesh):
        return mesh.device_type
    if not torch.cuda.is_available():
        return "cpu"
    return "cpu" if dist.is_initialized() and _torch.transport(dist.group.WORLD, "cuda") in NOT_FOR_GPUS else "cuda"


def cluster_here(mesh: Any, device: Any = None) -> str:
    """The profile to assume for the devices that run a model, when the user names none. On CPUs of one machine collectives go through shared
    memory; messages between pipeline stages do not, so where there may be stages all is priced as messages."""
    name = default_cluster(device_type(mesh, device))
    return f"{name}:shared" if name == "cpu-gloo" and on_one_machine() and not _may_have_stages(mesh) else name


def _may_have_stages(mesh: Any) -> bool:
    """Whether the mesh has the usual axis of a pipeline, or is open."""
    names = mesh.mesh_dim_names if isinstance(mesh, DeviceMesh) else getattr(mesh, "names", None)
    return "pp" in names if names else isinstance(mesh, int) or any(word in str(mesh) for word in (AUTO, "pp="))


def locate(mesh: Any, device: Any = None, join_timeout: float = JOIN) -> Place:
    """From "dp=2,tp=4", a Mesh or a torch DeviceMesh. Text and Mesh span all ranks; the process group is started
    from the environment of torchrun if nobody did. On CPUs the process keeps from now on what its steps free. Raises MeshError when the mesh does
    not fit the world, AutoshardError when others do not come for `join_timeout` seconds."""
    place = _located(mesh, device, join_timeout)
    if place.device.type == "cpu":
        keep_freed_memory()
    return place


def _located(mesh: Any, device: Any, join_timeout: float) -> Place:
    if isinstance(mesh, DeviceMesh):
        names = mesh.mesh_dim_names
        if not names:
            raise MeshError("the DeviceMesh has no axis names; make it with mesh_dim_names=(\"dp\", \"tp\")")
        return _placed(Mesh(tuple(names), tuple(mesh.shape)), mesh, device, join_timeout, started=False)
    mesh = parse_mesh(mesh) if isinstance(mesh, str) else mesh
    kind = device_type(mesh, device)
    if not dist.is_initialized() and "RANK" not in os.environ:
        if mesh.size > 1:
            raise MeshError(f"mesh {mesh} needs {mesh.size} processes and there is no process group; start this script with "
                            f"`python -m torch.distributed.run --nproc-per-node {mesh.size} ...`")
        return Place(mesh, None, (0,) * mesh.ndim, {}, numbered(torch.device(device or kind)))
    world = dist.get_world_size() if dist.is_initialized() else int(os.environ["WORLD_SIZE"])
    if world != mesh.size:
        raise MeshError(f"mesh {mesh} has {mesh.size} ranks, but {world} processes run; start {mesh.size} (--nproc-per-node), "
                        f"or give a mesh of {world}")
    if dist.is_initialized() and mesh.ndim > 1:  # one axis takes the group that is there
        store, rank = PatientStore(_torch.default_store()), dist.get_rank()
        meet(store, f"autoshard/meet/{mesh}/{store.add(f'autoshard/meets/{mesh}/{rank}', 1)}", rank, range(world), join_timeout)
    started = not dist.is_initialized()
    return _placed(mesh, init_device_mesh(kind, mesh.sizes, mesh_dim_names=mesh.names), device, join_timeout, started)


def _placed(mesh: Mesh, device_mesh: DeviceMesh, device: Any, join_timeout: float, started: bool) -> Place:
    coordinates = device_mesh.get_coordinate()
    if coordinates is None:
        raise MeshError(f"rank {dist.get_rank()} is not part of the mesh; call compile on its ranks only")
    _check_order(device_mesh)
    device = numbered(torch.device(device_mesh.device_type if device is None else device))
    if device.type == "cuda":
        _check_gpu(device, _torch.transport(device_mesh.get_group(0), "cuda"))
    if device.type == "cpu":
        leave_in_order(device_mesh, started)
    return Place(mesh, device_mesh, tuple(coordinates), group_names(device_mesh), device, join_timeout)


def _check_order(device_mesh: DeviceMesh) -> None:
    """Raises MeshError, on all ranks, where a process group has its ranks in another order than the mesh: torch sorts those it makes."""
    for axis, name in enumerate(device_mesh.mesh_dim_names):
        rows = device_mesh.mesh.movedim(axis, -1).reshape(-1, device_mesh.shape[axis]).tolist()
        there = dist.get_process_group_ranks(device_mesh.get_group(axis))
        turned = [row for row in rows if row != sorted(row)]
        if turned and there == sorted(there):
            raise MeshError(f"axis {name!r} of the DeviceMesh has ranks {turned[0]}, and its process group has them as {sorted(turned[0])}, so "
                            "pieces would be put together in the wrong order; give the ranks of every axis in ascending order")


def numbered(device: torch.device) -> torch.device:
    """With its index: tensors name theirs, and "cuda" does not equal "cuda:0"."""
    return torch.device("cuda", torch.cuda.current_device()) if device.type == "cuda" and device.index is None else device


def _check_gpu(device: torch.device, carrier: str) -> None:
    """Raises MeshError where ranks of one machine would share a GPU because nobody chose one for each, or gloo would carry its tensors."""
    local = int(os.environ.get("LOCAL_RANK", "0"))
    if device.index == 0 and 0 < local < torch.cuda.device_count():
        raise MeshError(f"this process has LOCAL_RANK={local} and would compute on cuda:0, as the first rank of its machine does; call "
                        'torch.cuda.set_device(int(os.environ["LOCAL_RANK"])) before anything else uses the GPU')
    if carrier in NOT_FOR_GPUS:
        raise MeshError(f"the mesh is of GPUs, and its process group moves their tensors by {carrier or 'nothing'}: gloo corrupts memory with "
                        'several collectives under way; start it with init_process_group("nccl"), or give a mesh of device type "cpu"')
