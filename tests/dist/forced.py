"""Seeds that force the classic plans onto any model, from its parameters' names and shapes."""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from autoshard.base.mesh import Mesh

VALUE = tuple[Any, ...]
COLUMN = {"c_attn", "c_fc", "wq", "wk", "wv", "w1", "w3", "query", "key", "value", "up", "q", "k", "v", "wi",
          "q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "intermediate"}
ROW = {"c_proj", "wo", "w2", "output", "down", "o", "o_proj", "down_proj"}
WORDS = {"wte", "tok_embeddings", "words", "tokens", "shared", "embed_tokens", "word_embeddings", "lm_head"}


def on_batch(shapes: Sequence[Sequence[int]], mesh: Mesh, axes: Sequence[str]) -> dict[str, VALUE]:
    """Every input cut on dim 0 over `axes`."""
    return {f"input:{i}": (tuple(axes), *[None] * (len(s) - 1)) for i, s in enumerate(shapes)}


def data_parallel(model: nn.Module, shapes: Sequence[Sequence[int]], mesh: Mesh) -> dict[str, VALUE]:
    """Parameters whole, the batch over all axes."""
    return {n: (None,) * p.ndim for n, p in model.named_parameters()} | on_batch(shapes, mesh, mesh.names)


def fully_sharded(model: nn.Module, shapes: Sequence[Sequence[int]], mesh: Mesh) -> dict[str, VALUE]:
    """Parameters cut over all axes on the first dim that divides (whole where none does), the batch too."""
    return {n: _first(p, mesh) for n, p in model.named_parameters()} | on_batch(shapes, mesh, mesh.names)


def tensor_parallel(model: nn.Module, shapes: Sequence[Sequence[int]], mesh: Mesh) -> dict[str, VALUE]:
    """Column, row and vocabulary shards by module name over the last axis; the batch over the others. Linear
    layers with other names take turns; 3-D parameters are experts, cut on dim 0."""
    axis, seeds, turn = mesh.names[-1], {}, 0
    for name, p in model.named_parameters():
        kind = _kind(name)
        if kind == "other" and p.ndim in (2, 4):
            kind, turn = ("row" if turn else "column"), 1 - turn
        seeds[name] = _cut(p, _dim(model, name, p, kind), (axis,), mesh)
    return seeds | on_batch(shapes, mesh, mesh.names[:-1])


PLANS = {"data parallel": data_parallel, "fully sharded": fully_sharded, "tensor parallel": tensor_parallel}


def _kind(name: str) -> str:
    parts = name.split(".")[:-1]
    if "norm" in name.lower() or "position" in name or "bias.table" in name or parts[-1:] == ["wpe"]:
        return "whole"
    words = [w for w in parts if w != "dense"]
    last = words[-1] if words else ""
    if last in WORDS or name == "output.weight":  # the head of the decoders here is named as BERT's row layer
        return "vocabulary"
    return "column" if last in COLUMN else "row" if last in ROW else "other"


def _dim(model: nn.Module, name: str, p: torch.Tensor, kind: str) -> int | None:
    if p.ndim == 3:
        return 0
    if p.ndim == 1:
        return 0 if kind == "column" and name.endswith("bias") else None
    transposed = type(model.get_submodule(name.rpartition(".")[0])).__name__ == "Conv1D"
    return {"column": int(transposed), "vocabulary": 0, "row": 1 - int(transposed)}.get(kind)


def _first(p: torch.Tensor, mesh: Mesh) -> VALUE:
    dims = [d for d, n in enumerate(p.shape) if n % mesh.size == 0]
    return _cut(p, dims[0] if dims else None, mesh.names, mesh)


def _cut(p: torch.Tensor, dim: int | None, axes: Sequence[str], mesh: Mesh) -> VALUE:
    sizes: Mapping[str, int] = dict(zip(mesh.names, mesh.sizes, strict=True))
    pieces = 1
    for a in axes:
        pieces *= sizes[a]
    if dim is None or p.shape[dim] % pieces:
        return (None,) * p.ndim
    return tuple(tuple(axes) if d == dim else None for d in range(p.ndim))
