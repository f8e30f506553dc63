"""Bytes on one rank: what a parameter keeps stored, and a value's local size.

A parameter is stored in one spec, shared by its final gradient and its optimizer state, all in the parameter's
stored dtype (the master dtype of a precision policy). Low-precision or gathered copies are values of the
graph, counted where they live, not here.
"""
from __future__ import annotations

from math import prod

from autoshard.cost.compute import optimizer_state_bytes
from autoshard.graph import TensorMeta
from autoshard.mesh import Mesh
from autoshard.spec import Spec, local_shape


def value_bytes(meta: TensorMeta, spec: Spec, mesh: Mesh) -> int:
    """Bytes of a value's local tensor. [1024, 4096] bf16 under S0,S1 on 2x4: 1024 x 4096 x 2 / 8 = 1 MiB."""
    return prod(local_shape(meta.logical_shape, spec, mesh.sizes)) * meta.dtype.itemsize


def stored_parts(meta: TensorMeta, spec: Spec, mesh: Mesh, optimizer: str | None) -> dict[str, int]:
    """Bytes one rank keeps for a parameter: "parameters", "gradients", "optimizer". `optimizer` None: frozen,
    or inference, so the parameter alone. Raises UsageError for an unknown optimizer.

    [4096, 4096] float32, AdamW, replicated: 64 MiB + 64 MiB + 128 MiB."""
    own = value_bytes(meta, spec, mesh)
    if optimizer is None:
        return {"parameters": own, "gradients": 0, "optimizer": 0}
    state = own // meta.dtype.itemsize * optimizer_state_bytes(optimizer, meta.dtype)
    return {"parameters": own, "gradients": own, "optimizer": state}


def stored_bytes(meta: TensorMeta, spec: Spec, mesh: Mesh, optimizer: str | None) -> int:
    """Sum of `stored_parts`."""
    return sum(stored_parts(meta, spec, mesh, optimizer).values())
