"""A budget: the allocator's slack goes on top of live bytes."""
from __future__ import annotations

import math

import pytest

from autoshard.cost.budget import Budget
from autoshard.cost.cluster import load_cluster


def test_slack():
    budget = Budget(limit=1100.0, slack=0.1)
    assert budget.peak == pytest.approx(1000.0)
    assert budget.taken(1000.0) == pytest.approx(1100.0)
    assert budget.holds(999.9) and not budget.holds(1000.1)


def test_without_a_limit_everything_fits():
    assert Budget(slack=0.1).holds(1e30) and math.isinf(Budget().peak)


@pytest.mark.parametrize("live", [0.0, 251.0, 1e9 + 1])
def test_a_budget_of_a_peak_is_just_enough(live):
    budget = Budget(1.0, 0.07).of_peak(live)
    assert budget.peak == pytest.approx(live, rel=1e-15) and budget.slack == 0.07


def test_the_budget_of_a_device():
    device = load_cluster("h100-dgx").device
    assert Budget.of(device, 1e6) == Budget(1e6, device.allocator_slack)
    assert math.isinf(Budget.of(device, None).limit)
