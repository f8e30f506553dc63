"""Same inputs, same plan file, byte for byte: in one process twice, and in a process whose hashes are seeded otherwise."""
from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import autoshard
from autoshard.program.load import load_model

SLOW = str(Path(__file__).parent / "dist" / "slow-device.toml")
MODEL, MESH = "gpt:tiny", "dp=2,tp=2"
CODE = f"""
import sys
from autoshard.program.load import load_model
import autoshard
spec = load_model({MODEL!r})
plan = autoshard.plan(spec.model, {MESH!r}, spec.example_inputs, loss_fn=spec.loss_fn, cluster={SLOW!r})
sys.stdout.write(plan.to_json())
"""


def planned() -> str:
    spec = load_model(MODEL)
    return autoshard.plan(spec.model, MESH, spec.example_inputs, loss_fn=spec.loss_fn, cluster=SLOW).to_json()


def elsewhere(seed: str) -> str:
    return subprocess.run([sys.executable, "-c", CODE], env={**os.environ, "PYTHONHASHSEED": seed}, check=True,
                          capture_output=True, text=True).stdout


def test_the_same_inputs_give_the_same_bytes():
    first = planned()
    assert sum("S" in "".join(op["outputs"]) for op in json.loads(first)["ops"].values()) > 100, "a plan that splits nothing shows nothing"
    assert planned() == first, "twice in one process"
    assert elsewhere("4711") == first, "in another process, which hashes otherwise"
