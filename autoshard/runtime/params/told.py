"""A rank that waits for the others in an op of DTensors, in `if rank == 0`, waits as long as torch does: half an hour. It says so before."""
from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Timer
from types import FrameType

import torch.distributed as dist

from autoshard.program.tracing.tape import describe, is_user_file

log = logging.getLogger("autoshard")
LONG = 15.0
"""Seconds."""


@contextmanager
def told_if_alone(do_what: str) -> Iterator[None]:
    """`do_what`: what all ranks have to do for the collective inside to end."""
    timer = Timer(LONG, log.warning, (
        "rank %d has waited %.0f s for the other ranks to %s too%s: all ranks have pieces of the DTensor, so every rank must do it; take it outside "
        "of `if rank == 0`", dist.get_rank(), LONG, do_what, _at()))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _at() -> str:
    frame: FrameType | None = sys._getframe()
    while frame is not None and not is_user_file(frame.f_code.co_filename):
        frame = frame.f_back
    return "" if frame is None else f", at {describe(frame.f_code, frame.f_lineno)}"
