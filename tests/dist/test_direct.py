"""Collectives made of messages give gloo's own results."""
from __future__ import annotations

import random
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

sys.path.insert(0, str(Path(__file__).parent))

from harness import on_ranks  # noqa: E402

from autoshard import _torch  # noqa: E402
from autoshard.runtime.carriers import gloo_messages  # noqa: E402

pytestmark = pytest.mark.dist
DTYPES = (torch.float64, torch.bfloat16, torch.int64, torch.bool)


def same_as_gloo() -> int:
    group, n = dist.group.WORLD, dist.get_world_size()
    name, count = group.group_name, 0
    for dtype in DTYPES:
        x = torch.randn(2 * n, 3, generator=torch.Generator().manual_seed(dist.get_rank())).mul(9).to(dtype)
        calls = [("all_gather", gloo_messages.all_gather, (n,)), ("all_to_all", gloo_messages.all_to_all, ([2] * n, [2] * n))]
        if dtype is not torch.bool:
            calls += [("reduce_scatter", gloo_messages.reduce_scatter, (op, n)) for op in ("sum", "max", "min")]
        pending = [(kind, run(x, *rest, group), _torch.COLLECTIVES[kind](x, *rest, name)) for kind, run, rest in calls]  # all under way
        for kind, flight, functional in pending:
            got, want = gloo_messages.land(flight), _torch.WAIT(functional)
            assert isinstance(flight, gloo_messages.Flight) and got.dtype == want.dtype, kind
            assert torch.allclose(got.double(), want.double(), rtol=1e-12, atol=0.25 if dtype is torch.bfloat16 else 0), f"{kind} {dtype}"
            count += 1
    if n == 2:
        x = torch.randn(5, generator=torch.Generator().manual_seed(dist.get_rank()))
        want = _torch.WAIT(_torch.COLLECTIVES["all_reduce"](x, "sum", name))
        assert torch.equal(gloo_messages.land(gloo_messages.all_reduce_(x, "sum", group)), want) and torch.equal(x, want), "in place"
    return count


@pytest.mark.parametrize("world", [2, 3])
def test_same_as_gloo(world: int) -> None:
    assert on_ranks(world, same_as_gloo) == [17] * world


def in_any_order() -> int:
    """Several calls under way on crossing groups, beside gloo's own, landed in another order than they were issued."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    draw, count = random.Random(0), 0
    for _ in range(100):
        pending = []
        for _ in range(draw.randint(2, 6)):
            group, rows = draw.choice((mesh.get_group("dp"), mesh.get_group("tp"), dist.group.WORLD)), draw.choice((1, 16, 5000))
            n, me = group.size(), group.rank()
            everyone = [torch.arange(n * rows, dtype=torch.float64) + 1e6 * r for r in range(n)]
            kind = draw.choice(("all_gather", "all_to_all", "reduce_scatter", "gloo"))
            if kind == "all_gather":
                pending.append((gloo_messages.all_gather(everyone[me], n, group), torch.cat(everyone)))
            elif kind == "all_to_all":
                pending.append((gloo_messages.all_to_all(everyone[me], [rows] * n, [rows] * n, group), torch.cat([x.chunk(n)[me] for x in everyone])))
            elif kind == "reduce_scatter":
                pending.append((gloo_messages.reduce_scatter(everyone[me], "sum", n, group), sum(everyone).chunk(n)[me]))
            else:
                pending.append((_torch.COLLECTIVES["all_reduce"](everyone[me], "sum", group.group_name), sum(everyone)))
        draw.shuffle(pending)
        for flight, want in pending:
            got = gloo_messages.land(flight) if isinstance(flight, gloo_messages.Flight) else _torch.WAIT(flight)
            assert torch.equal(got, want)
            count += 1
    return count


def test_calls_under_way_do_not_meet_each_other() -> None:
    counts = on_ranks(4, in_any_order)
    assert counts == counts[:1] * 4 and counts[0] > 200
