"""NCCL between the GPUs of this machine: the numbers of one process, and collectives as a profile of the machine has them."""
from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def launched(ranks: int, *arguments: object) -> str:
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), *map(str, arguments)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=600, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def losses(text: str) -> dict[int, float]:
    return {int(step): float(loss) for step, loss in re.findall(r"step (\d+)  loss ([\d.]+)", text)}


@pytest.mark.parametrize("mesh", ["dp", "tp"])
def test_parity_over_nccl(gpus, tmp_path, mesh):
    """Trained on two GPUs, and resumed on one."""
    trainer, cluster = ROOT / "examples" / "torchtitan_like.py", ("--cluster", "h100-dgx", "--save-every", 4)
    whole = losses(launched(1, trainer, "--steps", 6, "--folder", tmp_path / "whole", *cluster))
    first = losses(launched(2, trainer, "--steps", 4, "--folder", tmp_path / "cut", "--mesh", f"{mesh}=2", *cluster))
    rest = losses(launched(1, trainer, "--steps", 6, "--folder", tmp_path / "cut", *cluster))
    assert list(first) == [1, 2, 3, 4] and list(rest) == [5, 6]
    assert {**first, **rest} == pytest.approx(whole, rel=1e-3)


def test_collectives_against_the_profile(gpus, tmp_path):
    """What `calibrate` measures, `doctor` finds again."""
    profile = tmp_path / "mine.toml"
    launched(gpus, "-m", "autoshard", "calibrate", "-o", profile, "--seconds", 60)
    launched(gpus, "-m", "autoshard", "doctor", "--cluster", profile)
