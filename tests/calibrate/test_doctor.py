"""`autoshard doctor`: alone, on two ranks, and what it says where something is not well."""
from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from autoshard.calibrate import doctor as module
from autoshard.calibrate.doctor import Finding, doctor, fits, speed, versions
from autoshard.calibrate.toml import profile_text
from autoshard.cost.cluster import load_cluster
from autoshard.report.commands.doctor import show
from autoshard.runtime.ranks.place import locate

ROOT = Path(__file__).resolve().parents[2]


def test_alone_it_looks_at_the_machine_and_tests_two_ranks_in_one_process(run):
    code, out, err = run("doctor", "--json", "--seconds", 0.1)
    assert code == 0, err
    found = json.loads(out)
    states = {(f["topic"], f["name"]): f for f in found["findings"]}
    assert found["ok"] and states["versions", "torch"]["value"] == torch.__version__
    assert states["self-test", "parity"]["value"] == "2 ranks in one process: as one device"
    assert "times the predicted time" in states["self-test", "ops"]["value"]
    assert "torchrun" in states["links", "ranks"]["advice"] and ("self-test", "collectives") not in states


def test_without_the_test_it_is_a_table(run):
    code, out, _ = run("doctor", "--no-self-test", "--cluster", "h100-dgx")
    assert code == 0 and "versions" in out and "self-test" not in out
    assert "plans are for another kind of device" in out and "calibrate -o my.toml" in out


def test_a_profile_of_one_s_own_is_tested_too(run, tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(profile_text(replace(load_cluster("cpu-gloo"), name="mine", conditions={"float32_products": "bf16"}), "a test"))
    code, out, err = run("doctor", "--json", "--seconds", 0.1, "--cluster", path)
    assert code == 0, err
    states = {(f["topic"], f["name"]): f for f in json.loads(out)["findings"]}
    assert states["self-test", "parity"]["state"] == "ok"
    assert states["profile", "conditions"]["state"] == "warning" and "bf16 in the profile, ieee here" in states["profile", "conditions"]["value"]
    assert "GFLOP/s" in states["self-test", "float32 products"]["value"]


@pytest.mark.dist
def test_on_two_ranks_it_holds_collectives_against_the_profile():
    done = subprocess.run([sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "autoshard", "doctor", "--json",
                           "--seconds", "0.1"], capture_output=True, text=True, timeout=300,
                          env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)})
    assert done.returncode == 0, done.stderr[-3000:]
    states = {(f["topic"], f["name"]): f for f in json.loads(done.stdout)["findings"]}
    assert "2 ranks, loss and gradients within" in states["self-test", "parity"]["value"]
    assert states["self-test", "parity"]["state"] == "ok"
    assert "times the predicted time" in states["self-test", "collectives"]["value"]
    assert states["links", "local"]["value"].startswith("gloo")


def test_a_profile_that_is_far_off_asks_for_calibration():
    place, profile = locate("d=1"), load_cluster("cpu-gloo")
    slow = replace(profile, device=replace(profile.device, measured={}, kernel_overhead=1.0))
    (found,) = speed(slow, place, 0.05, lambda *_: None)
    assert found.state == "warning" and "calibrate" in found.advice


def test_more_memory_in_the_profile_than_here_is_a_warning():
    place, profile = locate("d=1"), load_cluster("cpu-gloo")
    huge = replace(profile, device=replace(profile.device, memory_capacity=1e18))
    (warned,) = [f for f in fits(huge, place) if f.name == "memory"]
    assert warned.state == "warning" and "memory_budget" in warned.advice


def test_what_is_missing_or_wrong_fails(monkeypatch, capsys, run):
    monkeypatch.setattr(module, "PACKAGES", ("torch", "no-such-package"))
    assert [f.state for f in versions()] == ["ok", "ok", "failed"]
    code, out, _ = run("doctor", "--no-self-test")
    assert code == 1 and "pip install no-such-package" in out
    monkeypatch.setattr(module, "parity", lambda *_: Finding("self-test", "parity", "other numbers", "failed", "report it"))
    found, leads = doctor(None, self_test=True, seconds=0.05, timeout=10, progress=lambda *_: None)
    assert leads and [f.name for f in found if f.topic == "self-test" and f.state == "failed"] == ["parity"]
    show(found)
    assert "report it" in capsys.readouterr().out


def test_an_unknown_profile_is_an_error(run):
    code, _, err = run("doctor", "--cluster", "nothing")
    assert code == 2 and "no cluster profile 'nothing'" in err
