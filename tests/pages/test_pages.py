"""The programs on the pages run on real processes as they stand there, and compute what plain torch does on one device."""
from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from test_examples import ROOT, TORCHRUN, code_blocks

END = "dist.destroy_process_group()\n"


def run_page(page: str, folder: Path, check: str) -> str:
    """Output of the page's blocks as one program on two processes, with `page_checks.CHECK` before its last line."""
    code = "\n".join(code_blocks(ROOT / "docs" / page))
    assert code.count(END) == 1 and code.endswith(END), "the program ends with the process group"
    checks = f"import page_checks\npage_checks.{check}(globals())\nprint('checked', flush=True)\n"
    program = folder / "program.py"
    program.write_text(code.removesuffix(END) + checks + END)
    env = {**os.environ, "OMP_NUM_THREADS": "1", "AUTOSHARD_CACHE": str(folder / "cache"), "PYTHONPATH": f"{ROOT}:{ROOT / 'tests' / 'support'}"}
    done = subprocess.run([sys.executable, *TORCHRUN, program.name], capture_output=True, text=True, timeout=400, env=env, cwd=folder)
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.count("checked") == 2
    return done.stdout


@pytest.mark.dist
def test_your_training_loop(tmp_path):
    assert run_page("training-loop.md", tmp_path, "training_loop").count("epoch ") == 2


@pytest.mark.dist
def test_with_hugging_face(tmp_path):
    out = run_page("hugging-face.md", tmp_path, "hugging_face")
    assert out.count("[[") == 1  # the tokens, printed by rank 0
