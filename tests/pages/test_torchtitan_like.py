"""The trainer of examples/: stopped on two ranks and resumed on one, by hand and by torchrun, it goes on as one that was never stopped."""
from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from test_examples import ROOT, TORCHRUN, python

from tests.dist.ports import free_ports

TRAINER = ROOT / "examples" / "torchtitan_like.py"


def losses(text: str) -> dict[int, float]:
    return {int(step): float(loss) for step, loss in re.findall(r"step (\d+)  loss ([\d.]+)", text)}


@pytest.fixture(scope="module")
def never_stopped(tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    """Of six steps on one process."""
    folder = tmp_path_factory.mktemp("whole")
    return losses(python(TRAINER, "--steps", 6, "--folder", folder, "--save-every", 100, AUTOSHARD_CACHE=str(folder)))


@pytest.mark.dist
def test_it_resumes_on_another_mesh(tmp_path, never_stopped):
    cache = {"AUTOSHARD_CACHE": str(tmp_path / "cache")}
    first = losses(python(*TORCHRUN, TRAINER, "--steps", 4, "--folder", tmp_path / "cut", "--save-every", 4, **cache))
    rest = losses(python(TRAINER, "--steps", 6, "--folder", tmp_path / "cut", "--save-every", 4, **cache))
    assert list(first) == [1, 2, 3, 4] and list(rest) == [5, 6]
    assert {**first, **rest} == pytest.approx(never_stopped, rel=1e-4)


@pytest.mark.dist
@pytest.mark.slow
def test_torchrun_goes_on_with_the_nodes_that_are_left(tmp_path, never_stopped):
    """Two agents of torchrun, each a node with one rank. One node is lost after step 3; the other agent starts its rank anew, which is alone now."""
    endpoint = f"127.0.0.1:{free_ports(1)[0]}"
    kept = agent(endpoint, tmp_path, "kept", is_host="true")
    lost = agent(endpoint, tmp_path, "lost", is_host="false", DOOMED="1")
    try:
        assert kept.wait(timeout=240) == 0, (tmp_path / "kept.log").read_text()[-3000:]
        assert lost.wait(timeout=10) < 0, "killed"
    finally:
        kept.kill(), lost.kill()
    printed = [losses((tmp_path / f"{name}.log").read_text()) for name in ("kept", "lost")]
    assert {4, 5, 6} <= set(printed[0]) and not {4, 5, 6} & set(printed[1])
    assert {**printed[1], **printed[0]} == pytest.approx(never_stopped, rel=1e-4)
    assert "on 1 rank, from step 3" in (tmp_path / "kept.log").read_text()


def agent(endpoint: str, folder: Path, name: str, is_host: str, **environment: str) -> subprocess.Popen[bytes]:
    """A node that torchrun looks after: a dead one is noticed after 3 seconds, and the others waited for as long."""
    settings = f"is_host={is_host},keep_alive_interval=1,keep_alive_max_attempt=3,last_call_timeout=3"
    words = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "1:2", "--nproc-per-node", "1", "--max-restarts", "2", "--rdzv-backend",
             "c10d", "--rdzv-endpoint", endpoint, "--rdzv-id", "elastic", "--rdzv-conf", settings,
             str(Path(__file__).with_name("lost_node.py")), "--steps", "6", "--folder", str(folder / "run"), "--save-every", "3"]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "AUTOSHARD_CACHE": str(folder / name), **environment}
    with (folder / f"{name}.log").open("wb") as out:
        return subprocess.Popen(words, stdout=out, stderr=subprocess.STDOUT, env=env)
