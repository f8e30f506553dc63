"""Collectives over memory that ranks share: gloo's own results, when the ring is full too, and an end when a rank is gone."""
from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from autoshard import _torch
from autoshard.collectives import RUN
from autoshard.collectives.reduce_ops import COMBINE
from autoshard.errors import AutoshardError, CollectiveError
from autoshard.runtime.carriers import gloo_messages, over_shared_memory
from autoshard.runtime.carriers.choose import start
from autoshard.runtime.carriers.shared_memory import LAP, RING, Post, Shared, share_memory
from tests.dist.harness import on_ranks

pytestmark = pytest.mark.dist
DTYPES = (torch.float64, torch.bfloat16, torch.int64)


def shared() -> Shared:
    found = share_memory(dist.group.WORLD, 30.0)
    if found is None:
        pytest.skip("this machine lets no rank see the memory of another")
    return found


def all_reduce_(x: torch.Tensor, op: str, memory: Shared) -> gloo_messages.Flight:
    return over_shared_memory.exchange(RUN["all_reduce"], x, op, memory, in_place=True)


def same_as_gloo() -> int:
    memory, n, name, count = shared(), dist.get_world_size(), dist.group.WORLD.group_name, 0
    for dtype in DTYPES:
        x = torch.randn(2 * n, 3, generator=torch.Generator().manual_seed(dist.get_rank())).mul(9).to(dtype)
        calls = [(c, op) for c in RUN.values() if c.holds_input and not c.runs.sized for op in (COMBINE if c.runs.reduces else ("",))]
        wanted = [_torch.WAIT(c.target(x, *c.arguments(2 * n, n, op), name)) for c, op in calls]  # one at a time: docs/runtime.md
        pending = [(c.name, over_shared_memory.exchange(c, x, op, memory), want) for (c, op), want in zip(calls, wanted, strict=True)]  # all under way
        for kind, flight, want in pending[::-1]:  # landed in another order than issued
            got = gloo_messages.land(flight)
            assert not flight.works and got.dtype == want.dtype, kind
            assert torch.allclose(got.double(), want.double(), rtol=1e-12, atol=0.25 if dtype is torch.bfloat16 else 0), f"{kind} {dtype}"
            count += 1
        for op in ("sum", "max"):
            want = _torch.WAIT(RUN["all_reduce"].target(x, op, name))
            gloo_messages.land(all_reduce_(x, op, memory))
            assert torch.allclose(x.double(), want.double(), rtol=1e-12, atol=0.5 if dtype is torch.bfloat16 else 0), f"all_reduce {dtype}"
            count += 1
    return count


def laps_of_the_ring() -> None:
    """Posts of odd sizes until the ring has been used three times over, some of them under way for long."""
    memory, rank, n = shared(), dist.get_rank(), dist.get_world_size()
    sent, size, flying = 0, 0, []
    while sent < 3 * RING:
        size = (size * 7 + 5_000_011) % (RING // 12)
        flying.append((size, all_reduce_(torch.full((size,), float(rank + size % 11)), "sum", memory)))
        sent += 4 * size
        if len(flying) > 2:
            size_then, flight = flying.pop(0)
            assert (gloo_messages.land(flight) == n * (size_then % 11) + n * (n - 1) / 2).all()
    for _, flight in flying:
        gloo_messages.land(flight)


def many_small_ones() -> None:
    """Thousands of posts, and what is remembered of them stays little."""
    memory = shared()
    for _ in range(2000):
        gloo_messages.land(all_reduce_(torch.ones(1), "sum", memory))
    assert len(memory._old) <= 600


def shared_pages() -> int:
    """Bytes of shared memory that this process has touched."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssShmem"))


def one_at_a_time() -> None:
    """Posts of which none is under way beside another write one lap of each rank's ring, however many there are."""
    before, memory, n = shared_pages(), shared(), dist.get_world_size()
    for _ in range(24):
        gloo_messages.land(all_reduce_(torch.ones(RING // 48), "sum", memory))  # 32 MiB in all
    assert LAP < shared_pages() - before < n * (LAP + (2 << 20))


def full_ring() -> None:
    memory = shared()
    half, third = (torch.ones(RING // 4 // k) for k in (2, 3))
    flights = [all_reduce_(x, "sum", memory) for x in (half, third, half.clone())]
    assert [len(memory._flying)] == [2], "the third had no room"
    assert all((gloo_messages.land(f) == dist.get_world_size()).all() for f in flights)


def another_program() -> None:
    with pytest.raises(AutoshardError, match="exchanges .* bytes where this rank"):
        gloo_messages.land(all_reduce_(torch.ones(3 + dist.get_rank()), "sum", shared()))


def everything() -> int:
    one_at_a_time()
    laps_of_the_ring()
    many_small_ones()
    full_ring()
    another_program()
    return same_as_gloo()


def one_is_gone() -> str:
    memory = shared()
    if dist.get_rank() == 1:
        os._exit(0)
    start = time.monotonic()
    try:
        memory.wait(Post(0, 0, 8))
    except AutoshardError as e:
        named = "rank 1 ended" in str(e)
        os._exit(0 if named and time.monotonic() - start < 25 and names_the_call(gloo_messages.Members(dist.group.WORLD)) else 3)
    os._exit(4)


def names_the_call(group: gloo_messages.Members) -> bool:
    """Whether the error of messages to a rank that is gone says which collective it was, and that of gloo's own call."""
    said = []
    for late, rows in ((False, 2), (True, 1 << 15)):
        try:
            gloo_messages.land(start(RUN["all_reduce"], group, in_place=False, late=late)(torch.ones(rows, 3), "sum", group))
        except CollectiveError as e:
            said.append(str(e).startswith(f"all_reduce of torch.float32 ({rows}, 3) among ranks 0, 1 failed: "))
    return said == [True, True]


@pytest.mark.parametrize("world", [2, 3])
def test_same_as_gloo_however_full_the_ring(world: int) -> None:
    assert on_ranks(world, everything) == [24] * world


def test_a_rank_that_is_gone_ends_the_wait() -> None:
    """Whatever carries the collectives. Both ranks end with status 0 on their own, without a result."""
    with pytest.raises(FileNotFoundError, match="result0"):
        on_ranks(2, one_is_gone, timeout=60)
