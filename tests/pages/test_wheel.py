"""The package as a wheel, away from its repository: everything it needs is in it, and it plans a user's model."""
from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile

import pytest
from test_examples import ROOT

MODEL = """
import torch
from torch import nn


def factory():
    return nn.Sequential(nn.Embedding(251, 48), nn.Linear(48, 96), nn.ReLU(), nn.Linear(96, 6)), torch.zeros(8, dtype=torch.int64)
"""


@pytest.mark.slow
def test_a_wheel_installs_and_plans_without_the_repository(tmp_path):
    """Its dependencies are those of this environment; the package itself comes from the wheel."""
    site, work = tmp_path / "site", tmp_path / "work"
    work.mkdir()
    (work / "mine.py").write_text(MODEL)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    subprocess.run([*pip, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", tmp_path, ROOT], check=True, timeout=600)
    (wheel,) = tmp_path.glob("autoshard-*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert any(n.endswith("h100-dgx.toml") for n in names) and any(n.endswith("page.html") for n in names) and "autoshard/py.typed" in names
    assert not any(n.split("/")[0] in ("tests", "models", "benchmarks") for n in names)
    subprocess.run([*pip, "install", "--no-deps", "--no-index", "--target", site, wheel], check=True, timeout=600)
    env = {**os.environ, "PYTHONPATH": str(site), "OMP_NUM_THREADS": "1", "HOME": str(tmp_path)}

    def run(*arguments: str) -> str:
        done = subprocess.run([sys.executable, *arguments], cwd=work, env=env, capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, done.stderr[-3000:]
        return done.stdout

    assert str(site) in run("-c", "import autoshard; print(autoshard.__file__)")
    run("-m", "autoshard", "plan", "mine:factory", "--mesh", "d=2", "--cluster", "cpu-gloo", "--inference", "-o", "plan.json", "--html", "plan.html")
    assert json.loads((work / "plan.json").read_text())["mesh"] and "<html" in (work / "plan.html").read_text()
    assert "h100-dgx" in run("-m", "autoshard", "clusters")
    assert "torch" in run("-m", "autoshard", "doctor", "--no-self-test")
