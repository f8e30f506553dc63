"""The trainer of examples/: stopped on two ranks and resumed on one, it goes on as one that was never stopped."""
from __future__ import annotations

import re

import pytest
from test_examples import ROOT, TORCHRUN, python


def losses(text: str) -> dict[int, float]:
    return {int(step): float(loss) for step, loss in re.findall(r"step (\d+)  loss ([\d.]+)", text)}


@pytest.mark.dist
def test_it_resumes_on_another_mesh(tmp_path):
    trainer = ROOT / "examples" / "torchtitan_like.py"
    cache = {"AUTOSHARD_CACHE": str(tmp_path / "cache")}
    whole = losses(python(trainer, "--steps", 6, "--folder", tmp_path / "whole", "--save-every", 100, **cache))
    first = losses(python(*TORCHRUN, trainer, "--steps", 4, "--folder", tmp_path / "cut", "--save-every", 4, **cache))
    rest = losses(python(trainer, "--steps", 6, "--folder", tmp_path / "cut", "--save-every", 4, **cache))
    assert list(first) == [1, 2, 3, 4] and list(rest) == [5, 6]
    assert {**first, **rest} == pytest.approx(whole, rel=1e-4)
