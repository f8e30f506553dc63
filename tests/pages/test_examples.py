"""What a new user copies and runs: the README's script, the training example, `make demo`."""
from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


def python(*arguments: object, timeout: float = 300) -> str:
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": ""}
    done = subprocess.run([sys.executable, *map(str, arguments)], capture_output=True, text=True, timeout=timeout, env=env)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def code_blocks(path: Path) -> list[str]:
    return re.findall(r"```python\n(.*?)```", path.read_text(), re.DOTALL)


@pytest.mark.dist
def test_readme_script_copied_into_a_file(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(code_blocks(ROOT / "README.md")[0])
    losses = [float(x) for x in re.findall(r"loss (\d+\.\d+)", python(*TORCHRUN, script))]
    assert len(losses) == 5 and losses[-1] < losses[0]


def test_getting_started_script(tmp_path):
    script = tmp_path / "plan.py"
    blocks = code_blocks(ROOT / "docs" / "getting-started.md")
    script.write_text(f"import os; os.chdir({str(tmp_path)!r})\n" + blocks[0])
    assert "optimal" in python(script)
    assert (tmp_path / "plan.json").exists()


@pytest.mark.dist
def test_training_example_agrees_with_one_process(tmp_path):
    train, one, two = ROOT / "examples" / "train_gpt.py", tmp_path / "one.json", tmp_path / "two.json"
    python(train, "--steps", 2, "--result", one)
    python(*TORCHRUN, train, "--steps", 2, "--result", two)
    assert json.loads(two.read_text())["losses"] == pytest.approx(json.loads(one.read_text())["losses"], rel=1e-5)


@pytest.mark.parametrize("path", sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")]), ids=lambda p: p.name)
def test_links_between_pages_lead_somewhere(path):
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", path.read_text()):
        assert (path.parent / target).exists(), f"{path.name} links to {target}"
