"""The compiled module binds arguments as Python does: random signatures and forms of call, against eager mode."""
from __future__ import annotations

import copy
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parent / "dist"))

from call_forms import BATCH, case  # noqa: E402
from call_forms_run import check  # noqa: E402
from planners import whole_planner  # noqa: E402

import autoshard  # noqa: E402
from autoshard.errors import UsageError  # noqa: E402
from autoshard.runtime.compile import Settings  # noqa: E402
from autoshard.runtime.module import CompiledModule  # noqa: E402
from autoshard.runtime.place import locate  # noqa: E402

FAST, ALL = 16, 200


@pytest.mark.parametrize("seeds", [range(FAST), pytest.param(range(FAST, ALL), marks=pytest.mark.slow)], ids=["few", "all"])
def test_random_calls(seeds: range) -> None:
    for seed in seeds:
        found = case(seed)
        compiled = CompiledModule(copy.deepcopy(found.model), locate("one=1"), Settings(whole_planner, loss_fn=found.loss_fn))
        for calls in found.calls:
            before = len(compiled._steps)
            for args, kwargs in calls:
                check(f"seed {seed}", compiled, found, args, kwargs)
            assert len(compiled._steps) <= before + 1, f"seed {seed}: one call written in other ways was planned again"
