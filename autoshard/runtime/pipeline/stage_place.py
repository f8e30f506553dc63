"""Where this process is inside its stage."""
from __future__ import annotations

from autoshard.base.spec import R, Spec
from autoshard.pipeline.pipelined import submesh
from autoshard.runtime.ranks.place import Place, group_names


def stage_place(place: Place, axis: str) -> Place:
    """This rank on the mesh of its stage. On a mesh of the pipeline's axis alone that is one rank, whose tensors are plain."""
    mesh = submesh(place.mesh, axis)
    if place.mesh.ndim == 1 or place.device_mesh is None:
        return Place(mesh, None, (0,), {}, place.device, place.join_timeout)
    device_mesh = place.device_mesh[mesh.names]
    return Place(mesh, device_mesh, place.coordinates[1:], group_names(device_mesh), place.device, place.join_timeout)


def stage_spec(spec: Spec | None, place: Place) -> Spec | None:
    """A placement on the whole mesh, whose first axis is the pipeline's, on the mesh of a stage."""
    return spec if spec is None or len(spec) == place.mesh.ndim else spec[1:] or (R,)
