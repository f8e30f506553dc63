"""A budget: the allocator's slack goes on top of live bytes, and rows of the search do not count buffers."""
from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from autoshard.cost.budget import Budget
from autoshard.cost.cluster import load_cluster
from autoshard.program.trace import trace


def test_slack_and_buffers():
    budget = Budget(limit=1100.0, slack=0.1, buffers=200)
    assert budget.peak == pytest.approx(1000.0) and budget.rows == pytest.approx(800.0)
    assert budget.taken(1000.0) == pytest.approx(1100.0)
    assert budget.holds(999.9) and not budget.holds(1000.1)


def test_without_a_limit_everything_fits():
    assert Budget(slack=0.1).holds(1e30) and math.isinf(Budget().rows)


@pytest.mark.parametrize("live", [0.0, 251.0, 1e9 + 1])
def test_a_budget_of_a_peak_is_just_enough(live):
    budget = Budget(1.0, 0.07, 5).of_peak(live)
    assert budget.peak == pytest.approx(live, rel=1e-15) and (budget.slack, budget.buffers) == (0.07, 5)


def test_the_budget_of_a_program_counts_its_buffers():
    model, device = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6)), load_cluster("h100-dgx").device
    graph = trace(model, (torch.randn(5, 6),)).graph
    budget = Budget.of(graph, device, 1e6)
    assert budget.buffers == sum(b.numel() * b.element_size() for b in model.buffers()) > 0
    assert (budget.limit, budget.slack) == (1e6, device.allocator_slack)
    assert math.isinf(Budget.of(graph, device, None).limit)
