"""What benchmarks/simulation.py says from what it measured: errors within a round, targets, and how much longer ops take together."""
from __future__ import annotations

import importlib
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import autoshard
from autoshard.cost.cluster import load_cluster
from autoshard.recompute.rewrite import with_recompute
from autoshard.runtime.execute.watched import Doing
from autoshard.simulation.program import UPDATE
from autoshard.simulation.simulate import program_for
from autoshard.simulation.source import traced_for

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

from sharing import factors  # noqa: E402
from simulated_rows import MODES, Row, figures, row, verdicts  # noqa: E402


def test_errors_of_op_times_are_of_their_round() -> None:
    """A machine that takes three times as long in the second half: op times of each round are 4 % below its steps, and so is their row."""
    steps = [(0.9, 1.1), (1.0, 1.0), (3.1, 2.9), (3.0, 3.0)]
    found = row("gpt", "chosen", steps, {"profile": 1.0, "earlier": 4.0}, {"one": [0.96, 0.96, 2.88, 2.88]})
    assert found.measured == 2.0 and found.rounds == 4 and found.floor == pytest.approx(0.0)
    assert found.errors == pytest.approx({"profile": -0.5, "earlier": 1.0, "one": -0.04})
    assert found.seconds["one"] == pytest.approx(1.92)


def made(model: str, plan: str, measured: float, error: float) -> Row:
    return Row(model, plan, 5, measured, measured, measured, dict.fromkeys(MODES, measured * (1 + error)), dict.fromkeys(MODES, error))


def test_every_target_is_said_to_be_met_or_not() -> None:
    rows = [made("gpt", str(i), 1.0 + i, error) for i, error in enumerate((0.01, -0.01, 0.02, -0.02))]
    said = {(mode, what): (found, verdict) for mode, what, found, _, verdict in verdicts(rows)}
    assert {verdict for key, (_, verdict) in said.items() if key[0] in ("one", "shared")} == {"met"}
    assert said["one", "signed mean"][0] == "+0.0%" and said["one", "rank correlation"][0] == "1.000" and said["beside", "median error"][1] == ""
    rows.append(made("resnet", "chosen", 9.0, -0.2))
    said = {(mode, what): verdict for mode, what, _, _, verdict in verdicts(rows)}
    assert said["profile", "median error, resnet"] == said["one", "90 % of errors within"] == said["one", "signed mean"] == "NOT MET"
    assert said["profile", "median error"] == said["one", "median error"] == "met"
    assert figures([*rows, made("vit", "chosen", 1.5, 0.9)], "one")["rank correlation"] < 0.98


def test_calls_take_longer_by_the_ratio_of_two_profiles() -> None:
    """Twice as slow in all: twice the seconds of every call, of the rest, and of what has no price of its own; slower in products alone: of those alone."""
    module = importlib.import_module("models.mlp")
    model, inputs = module.build("tiny", batch=8)
    plan = autoshard.plan(model, "d=2", inputs, loss_fn=module.loss, cluster="cpu-gloo")
    graph = with_recompute(traced_for(plan, model, inputs, {}, module.loss).graph, plan.recompute)
    single = load_cluster("cpu-gloo")
    device = single.device
    works = [w for w in program_for(graph, plan, single, executed=True).works if w.window != UPDATE]
    doings = [*(Doing(w.kind, w.name, w.window, i) for i, w in enumerate(works)), Doing("op", "of another program", "forward", len(works))]
    assert factors(doings, graph, plan, single, single) == pytest.approx([1.0] * (len(doings) + 1)) and len(works) > 10
    slow = replace(single, device=replace(device, memory_bandwidth=device.memory_bandwidth / 2, kernel_overhead=2 * device.kernel_overhead,
                                          peak={dtype: rate / 2 for dtype, rate in device.peak.items()}))
    assert factors(doings, graph, plan, slow, single) == pytest.approx([2.0] * (len(doings) + 1))
    late = replace(single, device=replace(device, kernel_overhead=3 * device.kernel_overhead))
    found = factors(doings, graph, plan, late, single)
    assert max(found) == pytest.approx(3.0) and found[-1] == pytest.approx(1.0), "what is no kernel's overhead takes as long as before"
    assert torch.tensor(found).min() >= 1.0 - 1e-12
