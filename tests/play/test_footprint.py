"""What redistributions of tensors of size 0 take: nothing is sent, so nothing is waited for."""
from __future__ import annotations

from itertools import product

import pytest
import torch

from autoshard.base.graph import Ref, TensorMeta
from autoshard.base.mesh import parse_mesh
from autoshard.base.spec import R, local_tensor_shape
from autoshard.cost.cluster import load_cluster
from autoshard.cost.redistribute import Redistribution
from autoshard.lower.schedule import Held, Instruction
from autoshard.play.footprint import Footprints

CLUSTER, MESH = load_cluster("cpu-gloo"), parse_mesh("dp=2,tp=2")


@pytest.mark.parametrize("factors", [((4, 4), (0,)), ((4,), (4,), (0,)), ((4, 0), (4, 4))])
def test_a_tensor_of_nothing_moves_in_no_time(factors: tuple[tuple[int, ...], ...]) -> None:
    """Rotary embeddings of the whole head leave a rest of size 0, which models put behind the rotated part."""
    shape = tuple(torch.Size(f).numel() for f in factors)
    meta = TensorMeta(shape, torch.float32, factors)
    moves, footprints = Redistribution(MESH, CLUSTER), Footprints(MESH, CLUSTER)
    dims = [R, *(d for d, n in enumerate(meta.logical_shape) if n == 4)]
    sent = 0
    for src, dst in product(product(dims, repeat=2), repeat=2):
        steps = moves.steps(meta.logical_shape, meta.dtype, src, dst)
        move = Instruction("redistribute", reads=(Held(Ref("x"), src),), writes=(Held(Ref("x"), dst),), steps=(steps,))
        found = footprints.of_move([meta], move, [torch.empty(local_tensor_shape(meta, src, MESH)).stride()])
        assert 0 <= found.started <= len(found.pieces) and not any(sum(piece.makes) for piece in found.pieces)
        sent += len(steps) > 0
    assert sent > len(dims) ** 2
