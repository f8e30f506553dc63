"""Which condition a read of data decides: before and after Python has replaced instructions by faster ones, and in every version of Python."""
from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from torch import nn

import autoshard
from tests.program import conditions_found

HERE = json.loads(json.dumps(conditions_found.found()))


@pytest.mark.parametrize("case", [pytest.param(case, id=f"{i // 2}-{case[1]}") for i, case in enumerate(HERE)])
def test_a_hot_function_is_read_as_a_cold_one(case):
    form, _, cold, hot = case
    assert hot == cold, form


def test_most_forms_are_found():
    of = {(form, truth): cold for form, truth, cold, _ in HERE}
    assert of["if x > 0: raise ValueError", True] == [["If", "x > 0", True, False, True, True, [], []], "raises"]
    assert of["if not bool(x > 0): raise ValueError", True] == [["If", "bool(x > 0)", False, True, True, True, [], []]]
    assert sum(None not in cold for _, _, cold, _ in HERE) == 54


def _python(version: str) -> str | None:
    installed = sorted(Path.home().glob(f".pyenv/versions/{version}.*/bin/python"))
    return str(installed[-1]) if installed else shutil.which(f"python{version}")


@pytest.mark.parametrize("version", ["3.11", "3.12", "3.13", "3.14"])
def test_other_versions_of_python_find_the_same(version):
    python = _python(version)
    if python is None:
        pytest.skip(f"no Python {version} here")
    out = subprocess.run([python, conditions_found.__file__], capture_output=True, text=True, timeout=120)
    assert out.returncode == 0, out.stderr[-500:]
    assert json.loads(out.stdout) == HERE


class Checked(nn.Module):
    """Asks for a truth by name."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if bool((x > 9).any()):
            raise ValueError("too large")
        return self.out(x)


def test_a_model_that_ran_before_is_planned():
    model, x = Checked(), torch.rand(4, 4)
    for _ in range(conditions_found.HOT):
        model(x)
    assert autoshard.plan(model, "d=2", (x,), training=False, cluster="cpu-gloo").status
