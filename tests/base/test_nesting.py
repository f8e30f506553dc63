"""Axes that split one dim in another order than that of the mesh: specs, their text, and the pieces of ranks."""
from itertools import permutations, product

import pytest
import torch

from autoshard.base.graph import TensorMeta
from autoshard.base.mesh import Mesh, parse_mesh
from autoshard.base.spec import INNER, R, ShardingSpec, format_spec, is_inner, is_one_nesting, nested, nesting, nestings, parse_spec, shard_offset
from autoshard.errors import MeshError
from autoshard.runtime.params.strided import blocks, cut, placements
from autoshard.verification.one_process import pieces


def every_spec(ndim: int, sizes: tuple[int, ...]) -> list[tuple[int, ...]]:
    plain = list(product((R, *range(ndim)), repeat=len(sizes)))
    return [*plain, *(n for s in plain for n in nestings(s, sizes))]


def test_every_layout_has_one_spec():
    """Text, axes per dim and placements say the same; of three axes on a dim four orders of six have a spec."""
    mesh = Mesh(("a", "b", "c"), (2, 3, 5))
    found = every_spec(2, mesh.sizes)
    assert len(set(found)) == len(found) and any(is_inner(p) for s in found for p in s)
    assert [parse_spec(format_spec(s)) for s in found] == found
    users = [ShardingSpec.from_spec(s, 2, mesh) for s in found]
    assert len(set(users)) == len(found) and [u.to_spec(mesh) for u in users] == found
    assert {nesting(s, 0) for s in found if len(nesting(s, 0)) == 3} == {(0, 1, 2), (1, 2, 0), (0, 2, 1), (2, 0, 1)}
    assert [o for o in permutations(range(3)) if nested(0, o) is None] == [(1, 0, 2), (2, 1, 0)]
    with pytest.raises(MeshError, match="come after"):
        ShardingSpec((("c", "b", "a"), ())).to_spec(mesh)
    with pytest.raises(MeshError, match="splits two dims"):
        ShardingSpec((("b", "a"), ("a",))).to_spec(mesh)


def test_inner_shards_are_inside_of_something():
    assert all(map(is_one_nesting, every_spec(2, (2, 3, 5))))
    assert not any(map(is_one_nesting, [(INNER, R), (0, INNER), (INNER, INNER), (INNER + 1, 0), (R, INNER, 1)]))


def test_axes_of_one_rank_do_not_nest():
    assert list(nestings((0, 0, 0), (2, 1, 2))) == [(INNER, 0, 0)]
    assert not list(nestings((0, 0), (2, 1))) and not list(nestings((0, 1, R), (2, 2, 2)))


@pytest.mark.parametrize("meta", [TensorMeta((60, 30), torch.float64), TensorMeta((90, 30), torch.float64, ((3, 30), (30,)), (0,))])
def test_pieces_are_those_of_the_nesting(meta):
    """Three ways to cut a tensor agree: by the offset of a rank, one process for all ranks, and torch's words for it, whose blocks tile the whole."""
    mesh, whole = parse_mesh("2x3x5"), torch.arange(meta.numel, dtype=torch.float64).reshape(meta.shape)
    logical = whole.reshape(meta.logical_shape)
    for spec in every_spec(meta.ndim, mesh.sizes):
        if any(p % INNER in meta.part_dims for p in spec if p != R):
            continue
        mine, laid, seen = pieces.cut(whole, meta, spec, mesh), placements(spec, mesh.sizes, meta), torch.zeros_like(whole)
        assert torch.equal(pieces.joined(mine, meta, spec, mesh).whole, whole), format_spec(spec)
        for rank, piece in enumerate(mine):
            at, wanted = mesh.coordinates(rank), logical
            for d, n in enumerate(meta.logical_shape):
                length = piece.reshape(-1).numel() and n // max(1, torch.tensor([mesh.sizes[a] for a in nesting(spec, d)]).prod().item())
                wanted = wanted.narrow(d, shard_offset(d, spec, mesh.sizes, at) * length, length)
            assert torch.equal(piece, wanted.reshape(piece.shape)), f"{format_spec(spec)}, rank {rank}"
            assert torch.equal(cut(whole, laid, mesh.sizes, at), piece), f"{laid}, rank {rank}"
            for offsets, here, sizes in blocks(meta.shape, laid, mesh.sizes, at):
                place = tuple(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True))
                assert torch.equal(whole[place], piece[tuple(slice(o, o + n) for o, n in zip(here, sizes, strict=True))])
                seen[place] = 1
        assert seen.all(), f"{laid} leaves something out"
