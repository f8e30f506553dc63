"""Options: one place that every way in fills, and that plans give back."""
from __future__ import annotations

import inspect
import json
from dataclasses import fields, replace

import numpy as np
import pytest
import torch
from torch import nn

import autoshard
from autoshard import Pipeline, Precision
from autoshard.cli.request import Request
from autoshard.decide.options import Options, Passing, Running, choices_of, planned_under
from autoshard.errors import PlanError, UsageError

PARTS = (Options, Passing, Running)
NAMES = {f.name for part in PARTS for f in fields(part)} - {"passing", "running"}
NO_KEYWORD = {"timeout"}  # of the stores that ranks meet in, for tests
CLI = {"memory_budget": "memory", "pipeline": "microbatches"}
PLANNING = {f.name for part in (Options, Passing) for f in fields(part)} - {"passing", "running", "batch_axes"}


def test_every_option_is_a_keyword_with_help() -> None:
    """Also what a new field asks for: it fills itself from the keyword of its name."""
    keywords = inspect.signature(autoshard.compile).parameters
    assert NAMES - NO_KEYWORD <= set(keywords)
    assert PLANNING <= set(inspect.signature(autoshard.plan).parameters)
    said = autoshard.plan.__doc__ + autoshard.compile.__doc__
    assert [n for n in NAMES - NO_KEYWORD if f"\n    {n} " not in said and f"`{n}`" not in said] == []
    request = {f.name: f for f in fields(Request)}
    assert {CLI.get(n, n) for n in PLANNING - {"inputs", "outputs"}} <= set(request)


def test_defaults_are_those_of_the_public_functions() -> None:
    for function in (autoshard.plan, autoshard.compile):
        given = {n: p.default for n, p in inspect.signature(function).parameters.items() if n in NAMES and n not in ("seeds", "cluster", "cache")}
        assert Options.of(given) == Options()


@pytest.mark.parametrize(("given", "part", "name", "value"), [
    ({"optimizer": torch.optim.SGD}, "", "optimizer", "sgd"), ({"optimizer": None}, "", "optimizer", "none"),
    ({"memory_budget": "1GiB"}, "", "memory_budget", 2.0**30), ({"batch_axes": ["dp"]}, "passing", "batch_axes", ("dp",)),
    ({"batch_axes": "dp"}, "passing", "batch_axes", ("dp",)), ({"batch_axes": "dp, tp"}, "passing", "batch_axes", ("dp", "tp")),
    ({"inputs": "local"}, "passing", "inputs", "local"), ({"check_inputs": "never"}, "running", "check_inputs", "never"),
    ({"time_limit": 1, "search": "milp"}, "", "time_limit", 60.0),
])
def test_arguments_find_their_field(given: dict, part: str, name: str, value: object) -> None:
    options = Options.of({"mesh": "d=2", "model": None, **given}, **({"time_limit": 60.0} if "time_limit" in given else {}))
    assert getattr(getattr(options, part) if part else options, name) == value


def test_a_budget_is_bytes_or_text_wherever_it_is_set() -> None:
    assert Options(memory_budget="14GiB") == Options(memory_budget=14 * 2**30) == replace(Options(), memory_budget="14GiB")
    assert Options(memory_budget=np.int64(2**20)).memory_budget == 2.0**20
    for budget, words in (("lots", "70GiB"), ([1], "70GiB"), (True, "70GiB"), (-1, "positive"), ("0", "positive")):
        with pytest.raises(UsageError, match=words):
            Options(memory_budget=budget)
    with pytest.raises(UsageError, match="time_limit='60': give a positive number of seconds"):
        Options(time_limit="60")


RECORDED = {"optimizer": "sgd", "precision": Precision("bf16"), "seeds": {"weight": "d,-"}, "fallback": "replicate", "offload": "optimizer",
            "passing": Passing("local", "dtensor"), "pipeline": Pipeline(4, cuts=("0",), batch_dims={"mask": None})}


@pytest.mark.parametrize("names", [tuple(RECORDED), ("seeds",), ()])
def test_a_plan_gives_its_options_back(names: tuple[str, ...]) -> None:
    options = Options(**RECORDED)
    plan = autoshard.plan(nn.Linear(4, 4), "d=2", (torch.ones(2, 4),), training=False, cluster="cpu-gloo", seeds=options.seeds)
    data = {**json.loads(plan.to_json()), "settings": json.loads(json.dumps(options.settings(training=True, has_loss=False)))}
    plan = autoshard.Plan.from_json(json.dumps(data))
    assert planned_under(plan).items() >= RECORDED.items()
    filled = Options().filled(plan, *names)
    for name, value in RECORDED.items():
        assert getattr(filled, name) == (value if name in names else getattr(Options(), name)), name
    own = Options(optimizer="adam", seeds={"bias": "-"}, fallback="replicate").filled(plan, *RECORDED)
    assert (own.optimizer, own.seeds, own.fallback, own.offload) == ("adam", {"bias": "-"}, "replicate", "optimizer"), "what the user says comes first"
    data["settings"]["precision"] = "bf16"
    with pytest.raises(PlanError, match="precision"):
        Options().filled(autoshard.Plan.from_json(json.dumps(data)), "precision")


def test_what_is_recorded() -> None:
    plain = {"optimizer": "adamw", "training": True, "loss_in_graph": True, "inputs": "global", "outputs": "auto", "precision": None}
    assert Options().settings(True, True) == plain
    assert Options(**RECORDED).settings(True, False) == {
        "fallback": "replicate", "offload": "optimizer", "optimizer": "sgd", "training": True, "loss_in_graph": False, "inputs": "local",
        "outputs": "dtensor", "pipeline": {"microbatches": 4, "cuts": ["0"], "batch_dims": {"mask": None}},
        "precision": {"param": "bf16", "master": "fp32", "reduce": "fp32"}}
    assert Options(**RECORDED).settings(False, False) == {
        "fallback": "replicate", "optimizer": "none", "training": False, "loss_in_graph": False, "inputs": "local",
        "outputs": "dtensor", "precision": {"param": "bf16", "master": "fp32", "reduce": "fp32"}}


def test_words_are_checked_in_every_part() -> None:
    assert sum(len(choices_of(part)) for part in PARTS) >= 4  # outputs have words of their own, see tests/dist/loops/test_output_modes.py
    for part in PARTS:
        for name in choices_of(part):
            with pytest.raises(UsageError, match=f"{name}='\\?' is not one of"):
                part(**{name: "?"})
