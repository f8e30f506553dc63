"""Under what a profile was measured: kept in its file and in plans, and a warning where something else holds."""
from __future__ import annotations

import logging
from dataclasses import replace

import pytest
import torch
from torch import nn

import autoshard
from autoshard.calibrate.toml import profile_text
from autoshard.cost.cluster import load_cluster
from autoshard.runtime.ranks.conditions import conditions_of, float32_products, otherwise
from autoshard.runtime.ranks.place import locate


@pytest.fixture
def measured(tmp_path):
    """A profile's file that was measured under `conditions`."""
    def of(**conditions: str) -> str:
        path = tmp_path / f"mine{len(list(tmp_path.iterdir()))}.toml"
        path.write_text(profile_text(replace(load_cluster("cpu-gloo"), name="mine", conditions=conditions), "a test"))
        return str(path)

    return of


def test_a_profile_keeps_them(measured):
    assert load_cluster(measured(collectives="messages", float32_products="bf16")).conditions == {"collectives": "messages", "float32_products": "bf16"}
    assert not load_cluster("cpu-gloo").conditions


@pytest.mark.parametrize("products, warned", [("bf16", True), ("ieee", False)])
def test_a_model_planned_by_a_profile_that_was_measured_otherwise_warns(measured, caplog, products, warned):
    with caplog.at_level(logging.WARNING, logger="autoshard"):
        model = autoshard.compile(nn.Linear(4, 2), "d=1", (torch.randn(3, 4),), training=False, cache=False,
                                  cluster=measured(float32_products=products, collectives="messages"))
    assert model.plan.cluster["conditions"]["float32_products"] == products
    assert ("float32 products: bf16 in the profile, ieee here" in caplog.text) is warned
    assert "collectives" not in caplog.text, "one rank has none"


def test_torch_s_setting_is_what_counts():
    matmul = torch.backends.mkldnn.matmul
    before = matmul.fp32_precision
    try:
        assert float32_products(torch.device("cpu")) == "ieee", "by default"
        matmul.fp32_precision = "bf16"  # what set_float32_matmul_precision("medium") sets
        assert conditions_of(locate("d=1")) == {"float32_products": "bf16"}
    finally:
        matmul.fp32_precision = before


def test_what_differs_is_said_with_what_to_do():
    ((what, advice),) = otherwise({"collectives": "shared memory", "float32_products": "ieee"}, {"collectives": "messages", "float32_products": "ieee"})
    assert what == "collectives: shared memory in the profile, messages here" and "AUTOSHARD_SHARED_MEMORY=0" in advice
    assert not list(otherwise({}, {"collectives": "messages"}))
