"""Bytes on one rank: what a parameter keeps stored, and a value's local size.

A parameter is stored in one spec, shared by its final gradient and its optimizer state, all in the parameter's
stored dtype (the master dtype of a precision policy). Low-precision or gathered copies are values of the
graph, counted where they live, not here.
"""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod

import torch

from autoshard.base.graph import TensorMeta
from autoshard.base.mesh import Mesh
from autoshard.base.spec import Spec, local_shape
from autoshard.cost.optimizers import optimizer_row


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
    state = state_bytes(optimizer, local_shape(meta.logical_shape, spec, mesh.sizes), meta.dtype)
    return {"parameters": own, "gradients": own, "optimizer": state}


def state_bytes(optimizer: str, shape: tuple[int, ...], dtype: torch.dtype) -> int:
    """Bytes of optimizer state for a parameter of local `shape`, in the parameter's dtype (step counters left out, see
    `scalar_bytes`). Raises UsageError for an unknown optimizer.

    >>> state_bytes("adafactor", (1024, 4096), torch.float32)      # 4 x (1024 + 4096)
    20480
    """
    return optimizer_row(optimizer).state_bytes(shape, dtype.itemsize)


def scalar_bytes(optimizer: str, parameters: int) -> int:
    """Bytes of the scalars that an optimizer keeps for a number of parameters. AdamW, 100 parameters: 400."""
    return 4 * optimizer_row(optimizer).scalars * parameters


def stored_bytes(meta: TensorMeta, spec: Spec, mesh: Mesh, optimizer: str | None) -> int:
    """Sum of `stored_parts`."""
    return sum(stored_parts(meta, spec, mesh, optimizer).values())


def update_workspace(optimizer: str, parameters: Sequence[int], together: bool) -> int:
    """Bytes an update needs beside parameters, gradients and state. `parameters`: bytes per parameter on this rank, in
    the order of the model; `together`: all in one call, as torch.optim does on GPUs (foreach), else one by one, where a variable
    of one parameter's update (Adam: the denominator) lives until the next has its own."""
    own, carried, each = optimizer_row(optimizer).workspace
    if together:
        return each * sum(parameters)
    return max((own * n + carried * before for before, n in zip((0, *parameters), parameters)), default=0)


def host_workspace(optimizer: str, parts: Sequence[Mapping[str, int]], together: bool) -> int:
    """Bytes that updates of parameters whose state lies on the host need beside parameters and gradients: of the one that takes
    most, its state while it is here and the temporaries of its update alone. `parts`: `stored_parts` of each; `together`: as in
    `update_workspace`, for how one parameter's temporaries are made."""
    return max((p["optimizer"] + update_workspace(optimizer, [p["parameters"]], together) for p in parts), default=0)
