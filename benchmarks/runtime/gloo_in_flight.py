"""Torch alone: what corrupts memory when several collectives are under way over gloo (torch 2.13). No code of autoshard's runs here.

    for i in 1 2 3 4 5 6; do timeout 200 python -c "while True: pass" & done      # the machine must be busy
    torchrun --standalone --nproc-per-node 4 -m benchmarks.runtime.gloo_in_flight many 180

`many`: functional all-gathers on the crossing groups of a 2 x 2 mesh, up to four under way. Seen on two cores: "malloc(): unaligned tcache
chunk detected" (abort) after 12 and 167 s. Ran clean for 130 s each: `one`, the same calls waited
for at once; `c10d`, the same calls as dist.all_gather_into_tensor(async_op=True), as many under way; `reduce`, functional all-reduces.
`messages`: sends and receives between pairs, as the runtime gathers where no memory is shared; not measured with this script yet.
"""
from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

FUNCTIONAL = torch.ops._c10d_functional
Call = tuple[Callable[[torch.Tensor, Any], Any], Callable[[Any], Any]]


def gather(x: torch.Tensor, group: Any) -> torch.Tensor:
    return FUNCTIONAL.all_gather_into_tensor(x, group.size(), group.group_name)


def gather_c10d(x: torch.Tensor, group: Any) -> tuple[torch.Tensor, Any]:
    out = x.new_empty((group.size() * x.shape[0], *x.shape[1:]))
    return out, dist.all_gather_into_tensor(out, x, group=group, async_op=True)


def swap(x: torch.Tensor, group: Any) -> tuple[torch.Tensor, Any]:
    out, other = torch.empty_like(x), 1 - group.rank()
    receiving = group.recv([out], other, 1)
    group.send([x], other, 1).wait()
    return out, receiving


def landed(pending: tuple[torch.Tensor, Any]) -> torch.Tensor:
    pending[1].wait()
    return pending[0]


CALLS: dict[str, Call] = {
    "many": (gather, FUNCTIONAL.wait_tensor),
    "one": (lambda x, group: FUNCTIONAL.wait_tensor(gather(x, group)), lambda x: x),
    "c10d": (gather_c10d, landed),
    "reduce": (lambda x, group: FUNCTIONAL.all_reduce(x, "sum", group.group_name), FUNCTIONAL.wait_tensor),
    "messages": (swap, landed),
}


def work(loops: int) -> None:
    a = torch.randn(64, 64)
    for _ in range(loops):
        a = (a @ a) / 64


def step(start: Callable[..., Any], wait: Callable[..., Any], dp: Any, tp: Any, weights: list[torch.Tensor], tokens: torch.Tensor) -> None:
    """Weights gathered ahead of their layers, and a batch in between, as a sharded program does."""
    one, two = (start(w, tp) for w in weights[:2])
    wait(start(tokens, dp))
    work(6)
    three = start(weights[2], tp)
    wait(one)
    work(20)
    four = start(weights[3], tp)
    for pending in (two, three, four):
        wait(pending)
        work(20)
    wait(start(tokens, dp))
    work(60)


def main() -> None:
    kind, end = sys.argv[1], time.monotonic() + float(sys.argv[2])
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(dist.get_rank())
    weights, tokens = [torch.randn(n, 64) for n in (96, 128, 96, 128)], torch.zeros(4, 32, dtype=torch.long)
    steps, stop = 0, torch.zeros(1)
    while not stop.item():
        step(*CALLS[kind], mesh.get_group("dp"), mesh.get_group("tp"), weights, tokens)
        steps += 1
        if steps % 50 == 0:
            stop[0] = float(time.monotonic() > end)
            dist.broadcast(stop, 0)
    print(f"rank {dist.get_rank()}: {kind}, {steps} steps", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
