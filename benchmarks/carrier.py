"""`--carrier` of benchmarks with several processes on one machine."""
from __future__ import annotations

import argparse
import os

from autoshard.runtime.carriers.shared_memory import SWITCH

SHARED, GLOO = CARRIERS = "shared", "gloo"


def add_carrier(parser: argparse.ArgumentParser) -> None:
    """What carries autoshard's collectives on CPUs."""
    parser.add_argument("--carrier", choices=CARRIERS, default=SHARED,
                        help="what carries autoshard's collectives on CPUs; gloo: as between machines, and as those of plans by hand")


def take_carrier(name: str) -> None:
    """For this process, before anything is compiled in it."""
    os.environ[SWITCH] = "0" if name == GLOO else "1"
