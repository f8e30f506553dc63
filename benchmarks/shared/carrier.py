"""`--carrier` and `--float32-matmul` of benchmarks with several processes on one machine."""
from __future__ import annotations

import argparse
import os

from autoshard.runtime.carriers.shared_memory import SWITCH

SHARED, GLOO = CARRIERS = "shared", "gloo"


def add_carrier(parser: argparse.ArgumentParser) -> None:
    """What carries autoshard's collectives on CPUs."""
    parser.add_argument("--carrier", choices=CARRIERS, default=SHARED,
                        help="what carries autoshard's collectives on CPUs; gloo: as between machines, and as those of plans by hand")


def add_float32_matmul(parser: argparse.ArgumentParser) -> None:
    """How torch multiplies float32 matrices, in plans by hand too."""
    parser.add_argument("--float32-matmul", choices=("highest", "high", "medium"), default="highest",
                        help="torch.set_float32_matmul_precision for every plan alike; calibrate the profile with the same")


def take_carrier(name: str) -> None:
    """For this process, before anything is compiled in it."""
    os.environ[SWITCH] = "0" if name == GLOO else "1"
