"""Collectives made of messages give gloo's own results."""
from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parent))

from harness import on_ranks  # noqa: E402

from autoshard import _torch  # noqa: E402
from autoshard.runtime import direct  # noqa: E402

pytestmark = pytest.mark.dist
DTYPES = (torch.float64, torch.bfloat16, torch.int64, torch.bool)


def same_as_gloo() -> int:
    group, n = dist.group.WORLD, dist.get_world_size()
    name, count = group.group_name, 0
    for dtype in DTYPES:
        x = torch.randn(2 * n, 3, generator=torch.Generator().manual_seed(dist.get_rank())).mul(9).to(dtype)
        calls = [("all_gather", direct.all_gather, (n,)), ("all_to_all", direct.all_to_all, ([2] * n, [2] * n))]
        if dtype is not torch.bool:
            calls += [("reduce_scatter", direct.reduce_scatter, (op, n)) for op in ("sum", "max", "min")]
        pending = [(kind, run(x, *rest, group), _torch.COLLECTIVES[kind](x, *rest, name)) for kind, run, rest in calls]  # all under way
        for kind, flight, functional in pending:
            got, want = direct.land(flight), _torch.WAIT(functional)
            assert isinstance(flight, direct.Flight) and got.dtype == want.dtype, kind
            assert torch.allclose(got.double(), want.double(), rtol=1e-12, atol=0.25 if dtype is torch.bfloat16 else 0), f"{kind} {dtype}"
            count += 1
    if n == 2:
        x = torch.randn(5, generator=torch.Generator().manual_seed(dist.get_rank()))
        want = _torch.WAIT(_torch.COLLECTIVES["all_reduce"](x, "sum", name))
        assert torch.equal(direct.land(direct.all_reduce_(x, "sum", group)), want) and torch.equal(x, want), "in place"
    return count


@pytest.mark.parametrize("world", [2, 3])
def test_same_as_gloo(world: int) -> None:
    assert on_ranks(world, same_as_gloo) == [17] * world
