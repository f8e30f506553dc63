"""A shortened soak: every way of carrying collectives on a busy machine. The long one is `python -m benchmarks.runtime.soak --seconds 1800`."""
from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.dist, pytest.mark.slow]
ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.parametrize("ranks", [2, 4])
def test_soak(ranks: int) -> None:
    command = [sys.executable, "-m", "benchmarks.runtime.soak", "--ranks", str(ranks), "--seconds", "30", "--busy", "4", "--stall", "120"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1500)
    assert done.returncode == 0 and done.stdout.count("losses as in a quiet run, status 0") == 3, done.stdout + done.stderr


def test_faults() -> None:
    """Every fault once, over both carriers."""
    done = subprocess.run([sys.executable, "-m", "benchmarks.runtime.soak_faults"], cwd=ROOT, capture_output=True, text=True, timeout=3000)
    assert done.returncode == 0 and len(done.stdout.splitlines()) == 18, done.stdout + done.stderr
