"""What benchmarks/simulation/simulation.py says from what it measured: errors within a round, targets, and how much longer ops take together."""
from __future__ import annotations

import importlib
from dataclasses import replace

import numpy as np
import pytest

import autoshard
from autoshard.cost.cluster import OwnHost, load_cluster
from autoshard.recompute.rewrite import with_recompute
from autoshard.rules.registry import rule_of
from autoshard.runtime.execute.watched import Doing
from autoshard.simulation.program import UPDATE
from autoshard.simulation.simulate import program_for
from autoshard.simulation.source import traced_for
from benchmarks.simulation.sharing import factors, ratio_at, ratios
from benchmarks.simulation.simulated_rows import MODES, Row, figures, row, verdicts


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


def test_ratios_are_of_the_same_round() -> None:
    """A machine that gets three times slower; products take 1.2 times as long together in each of its rounds, and one case was held up in most rounds."""
    single = np.outer([1.0, 1.0, 3.0, 3.0], [1e-3, 2e-3, 4e-3, 1e-3])
    together = single * np.array([1.2, 1.2, 1.2, 1.5])
    together[1:, 1] = 1.0
    mm, update = ("aten::mm", "matmul"), ("adamw", "optimizer")
    found = ratios([mm, mm, mm, update], together, single)
    assert set(found) == {"aten::mm", "matmul", "adamw", "optimizer", ""} and found["aten::mm"] == found["matmul"]
    assert ratio_at(found["matmul"], 2e-3) == pytest.approx(1.2), "one wild case is none"
    assert ratio_at(found["optimizer"], 7.0) == pytest.approx(1.5)


def test_ratios_are_those_of_cases_as_long() -> None:
    """Short ones share nothing, long ones memory."""
    cases = [(1e-5 * 2**i, 1.0 if i < 5 else 1.8) for i in range(10)]
    assert [ratio_at(cases, s) for s in (0.0, 1e-5, 4e-5, 2e-3, 1.0)] == [1.0, 1.0, 1.0, 1.8, 1.8]


def test_calls_take_longer_by_the_ratio_of_their_op_or_family() -> None:
    module = importlib.import_module("models.mlp")
    model, inputs = module.build("tiny", batch=8)
    plan = autoshard.plan(model, "d=2", inputs, loss_fn=module.loss, cluster="cpu-gloo")
    graph = with_recompute(traced_for(plan, model, inputs, {}, module.loss).graph, plan.recompute)
    profile = load_cluster("cpu-gloo")
    works = [w for w in program_for(graph, plan, profile, executed=True).works if w.window != UPDATE]
    views = [name for name, call in graph.calls.items() if rule_of(call.target).family.free]
    doings = [Doing(kind, name, "forward", i) for i, (kind, name) in enumerate([*((w.kind, w.name) for w in works), ("op", views[0]), ("op", "of another")])]
    given = {"matmul": 1.3, "aten::addmm": 1.25, "pointwise": 1.1, "copy": 1.4, "view": 1.01, "optimizer": 1.5, "": 1.2}
    of_all, seconds = {name: [(1e-3, ratio)] for name, ratio in given.items()}, [1e-3] * (len(doings) + 1)
    found = factors(doings, seconds, graph, plan, profile, of_all)
    assert len(found) == len(doings) + 1 and found[-1] == pytest.approx(1.5), "this profile has no Python"
    assert found[-3:-1] == [1.01, 1.2] and {1.25, 1.3, 1.1} <= set(found[:-3]) <= {1.25, 1.3, 1.1, 1.2, 1.4}
    products = [f for d, f in zip(doings, found) if d.kind == "op" and d.name in graph.calls and rule_of(graph.calls[d.name].target).family == "matmul"]
    assert set(products) == {1.25, 1.3} and len(products) > 3, "the op's own cases come before its family's"
    host = replace(profile, device=replace(profile.device, own_host=OwnHost(1e-6, 1e-3, 1e-9)))
    assert 1.01 < factors(doings, seconds, graph, plan, host, of_all)[-1] < 1.5
