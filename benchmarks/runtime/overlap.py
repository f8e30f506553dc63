"""What really overlaps: a matmul loop and a collective, alone and started together, on local processes.

    torchrun --nproc-per-node 2 -m benchmarks.runtime.overlap [--rounds 11]

(`python -m torch.distributed.run` where there is no `torchrun`.) "hidden" is the share of the shorter of the two that running them
together saved: 100 % is perfect overlap, 0 % one after the other, below 0 % they disturb each other. Times are lower quartiles
over rounds of the slowest rank. The collective is started first, as the schedule does with gathers and reductions.
"""
from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist

from autoshard.calibrate.overlap import fitted, timing
from autoshard.runtime.ranks.place import locate

KINDS = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")
SHARES = (0.5, 1.0, 2.0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=11)
    options = parser.parse_args()
    if int(os.environ.get("WORLD_SIZE", "1")) < 2:
        parser.error("start it with: python -m torch.distributed.run --nproc-per-node 2 -m benchmarks.runtime.overlap")
    torch.set_num_threads(1)
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    place = locate(f"d={dist.get_world_size()}")
    if place.is_leader:
        print(f"{'collective':16} {'compute ms':>11} {'alone ms':>9} {'together ms':>12} {'hidden':>7}")
    for kind in KINDS:
        found = [timing(place, kind, share, options.rounds) for share in SHARES]
        for t in found if place.is_leader else ():
            print(f"{kind:16} {t.compute * 1e3:11.1f} {t.collective * 1e3:9.1f} {t.both * 1e3:12.1f} {t.hidden:7.0%}")
        if place.is_leader:
            numbers = fitted(found[0], found[-1])
            print(f"{'':16} eta {numbers.eta:.2f}, interference {numbers.interference:.2f}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
