"""The lists of torch's own schedules, made without processes."""
from __future__ import annotations

from types import SimpleNamespace

from torch.distributed.pipelining.schedules import ScheduleInterleaved1F1B, ScheduleInterleavedZeroBubble, ScheduleZBVZeroBubble

CLASSES = {"interleaved": ScheduleInterleaved1F1B, "zb1p": ScheduleInterleavedZeroBubble, "zbv": ScheduleZBVZeroBubble}


def torch_schedule(name: str, ranks: int, chunks: int, microbatches: int):
    """torch's schedule on stages that have a number and nothing else."""
    stages = [SimpleNamespace(num_stages=ranks * chunks, group_size=ranks, group_rank=0, stage_index=chunk * ranks, is_first=chunk == 0, is_last=False,
                              submod=None, has_backward=True, stage_index_to_group_rank=None) for chunk in range(chunks)]
    return CLASSES[name](stages, microbatches)


def torch_rows(name: str, ranks: int, chunks: int, microbatches: int) -> list[list[str]]:
    """Its computations, a row per rank, without waiting. ValueError where torch refuses the numbers."""
    order = torch_schedule(name, ranks, chunks, microbatches).pipeline_order
    return [[str(action) for action in order[rank] if action is not None] for rank in sorted(order)]
