"""What a new user copies and runs: the README's script, the training example, `make demo`."""
from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.tiny_decoders import save_llama

ROOT = Path(__file__).resolve().parents[2]
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


def python(*arguments: object, timeout: float = 300, cwd: Path | None = None, **environment: str) -> str:
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **environment}
    done = subprocess.run([sys.executable, *map(str, arguments)], capture_output=True, text=True, timeout=timeout, env=env, cwd=cwd)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def code_blocks(path: Path) -> list[str]:
    return re.findall(r"```python\n(.*?)```", path.read_text(), re.DOTALL)


README = (ROOT / "README.md").read_text()


def readme_line(start: str) -> list[str]:
    """The words of the one command in README that begins so."""
    found = [line.strip() for line in README.splitlines() if line.startswith(f"    {start}")]
    assert len(found) == 1, f"{start}: {found}"
    return shlex.split(found[0], comments=True)


@pytest.mark.dist
def test_readme_script_prints_what_readme_says(tmp_path):
    """README's file, made into two processes by README's command; nobody makes a process group before it."""
    block = code_blocks(ROOT / "README.md")[0]
    program, *arguments = readme_line(".venv/bin/python ")
    assert block.startswith(f"# {arguments[-1]}\n") and program == ".venv/bin/python"
    (tmp_path / arguments[-1]).write_text(block)
    printed = python(*arguments, cwd=tmp_path, AUTOSHARD_CACHE=str(tmp_path)).splitlines()
    shown = re.search(r"It prints losses.*?```\n(.*?)```", README, re.DOTALL)[1].splitlines()
    assert len(shown) == 11 and len(printed) == len(shown), printed
    number = re.compile(r"\d+\.\d+")
    assert [number.sub("", line) for line in printed] == [number.sub("", line) for line in shown]
    losses = [[float(x) for line in lines for x in number.findall(line)] for lines in (printed, shown)]
    assert losses[0] == pytest.approx(losses[1], abs=5e-4) and len(losses[1]) == 5


def test_readme_plans_without_devices(run, tmp_path, monkeypatch):  # noqa: F811
    """Every `autoshard` line in order, then the block below them, with the names of the first script. FOLDER is a user's model."""
    monkeypatch.chdir(tmp_path)
    save_llama("FOLDER")
    lines = [line for line in README.splitlines() if line.startswith("    autoshard ")] + re.findall(r"`(autoshard [^`]*)`", README)
    assert len(lines) >= 4
    for line in lines:
        code, out, err = run(*shlex.split(line)[1:])
        assert code == 0 and out, f"{line}: {err}"
    (tmp_path / "plan.json").unlink()
    script, plan = code_blocks(ROOT / "README.md")
    names: dict[str, object] = {}
    for part in (script[:script.index("model = autoshard.compile")], next(x for x in script.splitlines() if x.startswith("x, target")), plan):
        exec(part, names)  # noqa: S102
    assert (tmp_path / "plan.json").exists() and names["plan"].mesh.sizes == (2, 4)


def test_readme_names_targets_of_the_makefile():
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = set(re.findall(r"\bmake ([a-z-]+)(?= |\n|$)", "\n".join(x for x in README.splitlines() if x.startswith("    "))))
    assert {"install", "demo", "test"} <= named <= targets


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


def headings(path: Path) -> set[str]:
    """The anchors of a page, as GitHub makes them."""
    text = re.sub(r"```.*?```", "", path.read_text(), flags=re.DOTALL)
    return {re.sub(r"[^\w\- ]", "", line.lower()).replace(" ", "-") for line in re.findall(r"^#+ (.*)$", text, re.MULTILINE)}


@pytest.mark.parametrize("path", sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]), ids=lambda p: p.name)
def test_links_between_pages_lead_somewhere(path):
    for target, anchor in re.findall(r"\]\(([^)#:\s]*)(?:#([^)\s]*))?\)", path.read_text()):
        page = path.parent / target if target else path
        assert page.exists(), f"{path.name} links to {target}"
        assert not anchor or anchor in headings(page), f"{path.name} links to {target}#{anchor}, and there is no such heading"


def test_every_page_is_reached_from_the_readme():
    seen, todo = set(), [ROOT / "README.md"]
    while todo:
        path = todo.pop().resolve()
        if path not in seen and path.suffix == ".md":
            seen.add(path)
            todo += [path.parent / target for target in re.findall(r"\]\(([^)#:\s]+)", path.read_text())]
    assert {p.resolve() for p in (ROOT / "docs").glob("*.md")} <= seen
