"""A plan kept for other shapes: the same prices as the search gives the same plan, the same numbers, and a search where it is too dear."""
from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import autoshard
from autoshard.base.mesh import parse_mesh
from autoshard.cost.budget import Budget
from autoshard.cost.cluster import load_cluster
from autoshard.decide.kept import KEPT, Known, carried, elements, kept, least_step
from autoshard.decide.options import Options
from autoshard.errors import PlanError, UsageError
from autoshard.padding.padded import padded
from autoshard.planner.stages import plan_traced
from autoshard.program.trace import trace
from autoshard.recompute.rewrite import with_recompute
from autoshard.runtime.check_plan import check_fits
from autoshard.space.cost_table import Training

MESH, OPTIONS = parse_mesh("d=2"), Options(cluster="cpu-gloo", time_limit=60)


class Block(nn.Module):
    """Words, attention-like mixing along the sequence, a branch on its length."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.up, self.down, self.norm = nn.Embedding(251, 48), nn.Linear(48, 96), nn.Linear(96, 48), nn.LayerNorm(48)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.words(ids)
        x = x + self.down(F.gelu(self.up(self.norm(x))))
        if ids.shape[1] > 64:
            x = x * 2.0
        return F.log_softmax(x @ self.words.weight.t(), -1).mean(dim=(1, 2))


def traced(rows: int, length: int):
    torch.manual_seed(0)
    return padded(trace(Block(), (torch.zeros(rows, length, dtype=torch.int64), torch.zeros(rows)), loss_fn=F.mse_loss), MESH)


def searched(found) -> Known:
    plan = plan_traced(found, MESH, OPTIONS)
    return Known(plan, with_recompute(found.graph, plan.recompute))


def keep(known: list[Known], found, within: float = 0.1, options: Options = OPTIONS):
    profile = load_cluster(options.cluster)
    plans = [plan for k in known if (plan := carried(k, found.graph)) is not None]
    return kept(plans, known, found.graph, MESH, profile, Training(options.optimizer, True),
                Budget.of(profile.device, options.memory_limit(profile)), within)


def test_at_its_own_shapes_a_kept_plan_costs_what_the_search_said():
    one = traced(8, 37)
    known = searched(one)
    plan = keep([known], one)
    assert plan.status == KEPT and plan.objective_s == pytest.approx(known.plan.objective_s, rel=1e-12)
    assert plan.predicted == pytest.approx(known.plan.predicted, rel=1e-12)
    assert plan.collectives == known.plan.collectives and plan.layouts == known.plan.layouts
    assert plan.stages[0].memory == known.plan.stages[0].memory
    assert replace(plan, notes=()).to_json() != known.plan.to_json() and autoshard.Plan.from_json(plan.to_json()) == plan


def test_at_other_shapes_it_is_near_a_search_and_has_the_same_numbers():
    known, other = searched(traced(8, 37)), traced(8, 33)
    plan = keep([known], other)
    check_fits(plan, other.graph, MESH)
    fresh = plan_traced(other, MESH, OPTIONS, fixed=plan.placements)
    assert fresh.objective_s <= plan.objective_s * (1 + 1e-9) and plan.objective_s <= 1.1 * fresh.objective_s
    assert plan.ops == known.plan.ops and plan.objective_s < known.plan.objective_s
    assert plan.memory == known.plan.memory and plan.memory["total"] >= fresh.memory["total"], "that of larger shapes is enough"
    torch.manual_seed(0)
    report = autoshard.verify(Block(), MESH, (torch.randint(251, (8, 33)), torch.randn(8)), loss_fn=F.mse_loss, plan=plan, optimizer="sgd")
    assert report.ok, str(report)


def test_what_is_too_dear_or_another_program_is_searched():
    known = searched(traced(32, 60))
    assert keep([known], traced(2, 8), within=0.01) is None, "fixed costs do not shrink with the batch"
    assert carried(known, traced(32, 65).graph) is None, "the branch was taken"
    odd = traced(31, 60)
    plan = carried(known, odd.graph)
    if any(spec[0] == 0 for p in plan.ops.values() for spec in p.outputs if spec):
        with pytest.raises(PlanError, match="evenly"):
            check_fits(plan, odd.graph, MESH)


def test_a_plan_that_does_not_fit_is_not_kept():
    known, larger = searched(traced(8, 32)), traced(64, 60)
    assert keep([known], larger, within=1e9) is not None
    tight = replace(OPTIONS, memory_budget=1.5 * known.plan.memory["total"])
    assert keep([known], larger, within=1e9, options=tight) is None


class Size:
    """Stands for a variant in the estimate."""

    def __init__(self, n: int, step: float, searched: bool = True) -> None:
        self.elements, self.searched, self.plan = n, searched, type("P", (), {"objective_s": step})


def test_the_estimate_of_what_a_search_would_find():
    known = [Size(100, 2.0), Size(200, 3.0), Size(150, 9.0, searched=False)]
    assert least_step(known, 150) == pytest.approx(2.5) and least_step(known, 200) == pytest.approx(3.0)
    assert least_step(known, 50) == pytest.approx(1.0), "below: in proportion"
    assert least_step(known, 400) == pytest.approx(3.0), "above: no more than is known"
    assert least_step([], 10) == 0.0
    assert elements(traced(8, 37).graph) == 8 * 37 + 8


def test_options_are_checked():
    model = nn.Linear(4, 4)
    for wrong, text in (({"variants": 0}, "variants=0"), ({"keep_within": -1.0}, "keep_within=-1.0"), ({"keep_within": "no"}, "keep_within='no'")):
        with pytest.raises(UsageError, match=text):
            autoshard.compile(model, "d=1", **wrong)
