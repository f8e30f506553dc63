"""`autoshard calibrate` as a user meets it: mistakes first, then the whole thing on two processes."""
from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest

from autoshard import cli
from autoshard.calibrate.run import launched_mesh
from autoshard.collectives import KINDS
from autoshard.cost.cluster import load_cluster
from tests.dist.ports import free_ports

ALONE = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}


def refused(monkeypatch, capsys, *arguments) -> str:
    monkeypatch.setattr(sys, "argv", ["autoshard", "calibrate", *map(str, arguments)])
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    assert stopped.value.code == 2
    return capsys.readouterr().err


def test_output_is_checked_before_measuring(monkeypatch, capsys, tmp_path):
    assert "a profile is a .toml file" in refused(monkeypatch, capsys, "-o", tmp_path / "x.json")
    assert "there is no folder" in refused(monkeypatch, capsys, "-o", tmp_path / "no" / "x.toml")


def test_a_mesh_of_another_size_is_refused_before_waiting_for_peers(monkeypatch, capsys, tmp_path):
    for key, value in {**ALONE, "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(key, value)
    start = time.monotonic()
    assert "mesh dp=3 has 3 ranks, but 2 processes run" in refused(monkeypatch, capsys, "-o", tmp_path / "x.toml", "--mesh", "dp=3")
    assert time.monotonic() - start < 50, "a peer is waited for 60 s"


@pytest.mark.parametrize("world, local, mesh", [("1", "1", "local=1"), ("8", "8", "local=8"), ("16", "8", "node=2,local=8")])
def test_axes_follow_the_launcher(monkeypatch, world, local, mesh):
    monkeypatch.setenv("WORLD_SIZE", world)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", local)
    assert str(launched_mesh(None)) == mesh


@pytest.mark.dist
@pytest.mark.parametrize("rank", ["0", "1"])
def test_a_peer_that_never_comes_is_a_message_within_the_limit(tmp_path, rank):
    port, = free_ports(1)
    done = subprocess.run([sys.executable, "-m", "autoshard", "calibrate", "-o", str(tmp_path / "x.toml"), "--timeout", "1"],
                          env={**os.environ, **ALONE, "RANK": rank, "MASTER_PORT": str(port)}, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert f"could not reach all 2 processes at 127.0.0.1:{port} within 1 s" in done.stderr


@pytest.mark.slow
@pytest.mark.dist
def test_two_processes_make_a_profile_that_plans(tmp_path):
    path = tmp_path / "mine.toml"
    done = subprocess.run([sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "autoshard",
                           "calibrate", "-o", str(path), "--seconds", "1", "--float32-matmul", "medium"], env={**os.environ, "OMP_NUM_THREADS": "1"},
                          capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert "Held-out sizes" in done.stdout and "Overlap of a matmul" in done.stdout
    assert "<svg" in path.with_suffix(".html").read_text()
    cluster = load_cluster(path)
    assert set(cluster.links[0].measured) == set(KINDS) - {"all_to_all_rows"}, "that one has the curve of all_to_all"
    assert cluster.conditions == {"collectives": "shared memory", "float32_products": "bf16"}
    assert 1e-7 < cluster.device.kernel_overhead < 1e-3 and cluster.device.memory_bandwidth > 1e8
    planned = subprocess.run([sys.executable, "-m", "autoshard", "plan", "gpt:tiny", "--mesh", "tp=2", "--cluster", str(path), "-q"],
                             capture_output=True, text=True, timeout=300)
    assert planned.returncode == 0, planned.stderr
