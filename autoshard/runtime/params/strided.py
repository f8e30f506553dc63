"""DTensor placements of specs, and tensors whose pieces are not one block: dims made of parts (q|k|v), where a rank has a share of each part, and
dims whose axes nest out of mesh order, where torch counts what the later axes have cut as parts.

torch's word for such a piece is a strided shard. `full_tensor`, `redistribute` and optimizers know it. Three things of torch 2.13 do not, and
give wrong numbers without a word, so they are taught it once a tensor is stored this way:

* checkpoints take the piece for one block at the place of its first element. DTensor's three hooks for them list one block per part;
* so do whole tensors that the first rank sends (`broadcast_from_rank0`). They are cut by `distribute_tensor`;
* DTensors whose makers leave open what strided shards mean (`distribute_tensor`, `redistribute`, optimizer states of whole tensors) are put
  together wrong where two of them split one dim."""
from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from itertools import product
from math import prod
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from autoshard._torch import StridedShard, on_whole_tensors, take_strided_shards_in_turn
from autoshard.base.graph import TensorMeta
from autoshard.base.spec import Spec, is_inner, split_by

Block = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]
"""Offsets in the whole tensor, offsets in the local one, sizes."""


def placements(spec: Spec, sizes: Sequence[int], meta: TensorMeta | None = None) -> tuple[Any, ...]:
    """DTensor placements of a spec without Partial on mesh axes of `sizes`; `meta`: of a tensor that may have dims made of parts."""
    out: list[Any] = []
    for a, p in enumerate(spec):
        if p < 0:
            out.append(Replicate())
            continue
        dim = split_by(p) if meta is None else meta.tensor_dim(split_by(p))
        cut_already = prod(n for n, q in zip(sizes[a + 1:], spec[a + 1:], strict=True) if is_inner(p) and q == split_by(p))
        factor = cut_already * (1 if meta is None else meta.parts_of(dim))
        out.append(Shard(dim) if factor == 1 else StridedShard(dim, split_factor=factor))
    if _is_strided(out):
        _teach_torch()
    return tuple(out)


def cut(whole: torch.Tensor, placed: Sequence[Any], sizes: Sequence[int], coordinates: Sequence[int]) -> torch.Tensor:
    """The piece of the rank at `coordinates` on a mesh of `sizes`; a view where it is one block. Axes in mesh order, major first. Of a
    dim that does not divide, the last pieces are shorter, or empty, as DTensor has them."""
    for p, size, c in zip(placed, sizes, coordinates, strict=True):
        if type(p) is Shard:
            n = whole.shape[p.dim]
            start = min(c * -(-n // size), n)
            whole = whole.narrow(p.dim, start, min(-(-n // size), n - start))
        elif isinstance(p, StridedShard):
            parts = whole.unflatten(p.dim, (getattr(p, "split_factor", 1), -1))
            length = parts.shape[p.dim + 1] // size
            whole = parts.narrow(p.dim + 1, c * length, length).flatten(p.dim, p.dim + 1)
    return whole


def blocks(shape: Sequence[int], placed: Sequence[Any], sizes: Sequence[int], coordinates: Sequence[int]) -> list[Block]:
    """The blocks of a whole tensor of `shape` that a rank has. Dims divide evenly."""
    runs = [_runs(n, [_along(p, d) for p in placed], sizes, coordinates) for d, n in enumerate(shape)]
    return [tuple(zip(*block, strict=True)) if block else ((), (), ()) for block in product(*runs)]


def _runs(length: int, placed: Sequence[Any], sizes: Sequence[int], coordinates: Sequence[int]) -> list[tuple[int, int, int]]:
    """(offset in the whole, offset here, length) of every run of positions along a dim."""
    found = cut(torch.arange(length), placed, sizes, coordinates).tolist()
    starts = [i for i, x in enumerate(found) if i == 0 or x != found[i - 1] + 1]
    return [(found[i], i, end - i) for i, end in zip(starts, [*starts[1:], len(found)], strict=True)]


def _along(p: Any, dim: int) -> Any:
    """What a placement does to one dim by itself."""
    if not isinstance(p, (Shard, StridedShard)) or p.dim != dim:
        return Replicate()
    return StridedShard(0, split_factor=p.split_factor) if isinstance(p, StridedShard) else Shard(0)


def _is_strided(placed: Sequence[Any]) -> bool:
    return any(isinstance(p, StridedShard) for p in placed)


@cache
def _teach_torch() -> None:
    """Once per process, for tensors with a strided shard alone."""
    take_strided_shards_in_turn()
    on_whole_tensors(_where_sent_whole)
    for name, ours in (("__create_write_items__", _write_items), ("__create_chunk_list__", _chunk_list), ("__get_tensor_shard__", _shard)):
        setattr(DTensor, name, _where_strided(ours, getattr(DTensor, name)))


def _where_strided(ours: Callable[..., Any], others: Callable[..., Any]) -> Callable[..., Any]:
    def hook(self: DTensor, *args: Any) -> Any:
        return (ours if _is_strided(self.placements) else others)(self, *args)

    return hook


def _where_sent_whole(others: Callable[..., None]) -> Callable[..., None]:
    """torch's function, which replaces pairs of a DTensor and its whole value in a state dict, by one that cuts strided shards itself."""
    def cut_all(state: dict[str, Any], keys: Sequence[str], *args: Any) -> None:
        ours = {key for key in keys if isinstance(state.get(key), tuple) and _is_strided(state[key][0].placements)}
        for key in ours:
            mine, whole = state[key]
            piece = distribute_tensor(whole, mine.device_mesh, mine.placements, src_data_rank=None)
            if not mine.is_meta:
                mine.to_local().copy_(piece.to_local())
            state[key] = piece if mine.is_meta else mine
        others(state, [key for key in keys if key not in ours], *args)

    return cut_all


def _here(t: DTensor) -> list[Block]:
    return blocks(t.shape, t.placements, t.device_mesh.shape, t.device_mesh.get_coordinate())


def _write_items(t: DTensor, fqn: str, _: Any) -> list[WriteItem]:
    properties = TensorProperties.create_from_tensor(t.to_local())
    return [WriteItem(index=MetadataIndex(fqn, chunk.offsets), type=WriteItemType.SHARD,
                      tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=t.size())) for chunk in _chunk_list(t)]


def _chunk_list(t: DTensor) -> list[ChunkStorageMetadata]:
    return [ChunkStorageMetadata(offsets=torch.Size(at), sizes=torch.Size(sizes)) for at, _, sizes in _here(t)]


def _shard(t: DTensor, index: MetadataIndex) -> torch.Tensor:
    """The block at the offset of `index`, a view."""
    local = t.to_local()
    here, sizes = next((here, sizes) for at, here, sizes in _here(t) if torch.Size(at) == index.offset)
    for dim, (start, length) in enumerate(zip(here, sizes, strict=True)):
        local = local.narrow(dim, start, length)
    return local
