"""The status of a pipeline's plan, from those of its stages' plans."""
from __future__ import annotations

import pytest
from sample_plan import sample_plan

from autoshard.base.plan import INTERRUPTED, OPTIMAL_REFINED, REFINED, TIED
from autoshard.pipeline.merge import _status
from autoshard.search.problem import Status

OPTIMAL, GAP, LATE = Status.OPTIMAL.value, Status.GAP.value, Status.TIME_LIMIT.value


@pytest.mark.parametrize("stages, gap, status", [
    ((OPTIMAL, OPTIMAL), 0.0, OPTIMAL), ((OPTIMAL, OPTIMAL), 0.1, GAP), ((OPTIMAL, TIED), 0.0, TIED), ((OPTIMAL, OPTIMAL_REFINED), 0.0, OPTIMAL_REFINED),
    ((OPTIMAL_REFINED, TIED), 0.1, f"{GAP}{REFINED}"), ((OPTIMAL_REFINED, LATE), 0.1, f"{LATE}{REFINED}"),
    ((f"{LATE}{REFINED}", OPTIMAL), 0.1, f"{LATE}{REFINED}"), ((OPTIMAL, INTERRUPTED), 0.1, INTERRUPTED)])
def test_a_pipeline_is_known_as_little_as_its_stages(stages, gap, status):
    plans = [sample_plan(status=each) for each in stages]
    assert _status(plans, gap) == status


def test_an_interrupted_plan_stays_one_where_another_stage_was_refined():
    plans = [sample_plan(status=OPTIMAL_REFINED), sample_plan(status=INTERRUPTED)]
    assert sample_plan(status=_status(plans, 0.1)).interrupted
