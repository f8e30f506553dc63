"""A program ends with its own status, in whatever order it lets go of the model and the process group, on a busy machine too."""
from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.dist
ROOT = Path(__file__).resolve().parents[3]
STATUS = {"raise": 1, "exit 3": 3}
KEPT = ("gloo: nothing", "gloo: raise", "gloo: exit 3")
"""Where the program made its process group and never destroyed it, gloo's threads are there to the end; they must be idle."""


def test_every_order_of_ending(tmp_path: Path) -> None:
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, Path(__file__).parents[1] / "endings.py", tmp_path], capture_output=True, text=True, timeout=500, env=env)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert len(found) == 14
    for program, ranks in found.items():
        for rank, (status, left, said) in enumerate(ranks):
            assert status == STATUS.get(program.partition(": ")[2], 0), f"{program}, rank {rank}: status {status}\n{said}"
            assert ("ValueError: mine" in said) == program.endswith("raise"), said
            assert left == 0 or program in KEPT, f"{program}, rank {rank}: {left} threads of gloo's were left"
