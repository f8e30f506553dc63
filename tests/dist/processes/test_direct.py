"""Collectives made of messages give gloo's own results."""
from __future__ import annotations

import random

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from autoshard import _torch
from autoshard.collectives import RUN
from autoshard.collectives.reduce_ops import COMBINE
from autoshard.lower.overwrite_table import LATE_SWAP, SWAP
from autoshard.runtime.carriers import gloo_messages
from tests.dist.harness import on_ranks

pytestmark = pytest.mark.dist
DTYPES = (torch.float64, torch.bfloat16, torch.int64, torch.bool)


def same_as_gloo() -> int:
    group, n, count = gloo_messages.Members(dist.group.WORLD), dist.get_world_size(), 0
    for dtype in DTYPES:
        x = torch.randn(2 * n, 3, generator=torch.Generator().manual_seed(dist.get_rank())).mul(9).to(dtype)
        calls = [(kind, op) for kind, c in RUN.items() if c.holds_input and kind != "all_to_all_rows" and (dtype is not torch.bool or not c.runs.reduces)
                 for op in (COMBINE if c.runs.reduces else ("",))]
        wanted = [gloos(kind, x, op) for kind, op in calls]
        pending = [(kind, gloo_messages.exchange(RUN[kind], x, op, group)) for kind, op in calls]  # all under way
        for (kind, flight), want in zip(pending, wanted, strict=True):
            got = gloo_messages.land(flight)
            assert isinstance(flight, gloo_messages.Flight) and got.dtype == want.dtype, kind
            assert torch.allclose(got.double(), want.double(), rtol=1e-12, atol=0.25 if dtype is torch.bfloat16 else 0), f"{kind} {dtype}"
            count += 1
    for size, late in ((5, False), ((SWAP >> 2) + 7, False), (5, True), ((LATE_SWAP >> 2) + 7, True)):  # of two ranks messages, and gloo's own
        x = torch.randn(size, generator=torch.Generator().manual_seed(dist.get_rank()))
        want, before = gloos("all_reduce", x, "max"), x.clone()
        for in_place, left in ((False, before), (True, want)):
            flight = gloo_messages.exchange(RUN["all_reduce"], x, "max", group, in_place, late)
            assert len(flight.works) == (2 if n == 2 and size == 5 else 1)
            assert torch.equal(gloo_messages.land(flight), want) and torch.equal(x, left), "in place" if in_place else "into a copy"
        count += 1
    return count


def gloos(kind: str, x: torch.Tensor, op: str) -> torch.Tensor:
    """One at a time: several under way corrupt memory."""
    return _torch.WAIT(RUN[kind].target(x, *RUN[kind].arguments(len(x), dist.get_world_size(), op), dist.group.WORLD.group_name))


@pytest.mark.parametrize("world", [2, 3])
def test_same_as_gloo(world: int) -> None:
    assert on_ranks(world, same_as_gloo) == [25] * world


def in_any_order() -> int:
    """Several calls under way on crossing groups, some of them gloo's own, landed in another order than they were issued."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    draw, count = random.Random(0), 0
    groups = [gloo_messages.Members(g) for g in (mesh.get_group("dp"), mesh.get_group("tp"), dist.group.WORLD)]
    for _ in range(100):
        pending = []
        for _ in range(draw.randint(2, 6)):
            group, rows = draw.choice(groups), draw.choice((1, 16, 5000))
            n, me = group.n, group.me
            everyone = [torch.arange(n * rows, dtype=torch.float64) + 1e6 * r for r in range(n)]
            kind = draw.choice(("all_gather", "all_to_all", "reduce_scatter", "all_reduce"))
            wide = 120 if kind == "all_reduce" and rows == 5000 else 1  # 4.8 MB, which two ranks do not swap
            flight = gloo_messages.exchange(RUN[kind], everyone[me].repeat(wide), "sum", group)
            wanted = {"all_gather": lambda: torch.cat(everyone), "all_to_all": lambda: torch.cat([x.chunk(n)[me] for x in everyone]),
                      "reduce_scatter": lambda: sum(everyone).chunk(n)[me], "all_reduce": lambda: sum(everyone).repeat(wide)}
            pending.append((flight, wanted[kind]()))
        draw.shuffle(pending)
        for flight, want in pending:
            assert torch.equal(gloo_messages.land(flight), want)
            count += 1
    return count


def test_calls_under_way_do_not_meet_each_other() -> None:
    counts = on_ranks(4, in_any_order)
    assert counts == counts[:1] * 4 and counts[0] > 200
