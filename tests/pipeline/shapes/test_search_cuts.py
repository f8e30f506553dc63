"""Of several ways to cut the cheapest that can be planned is taken."""
from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from autoshard.decide.pipeline_options import Pipeline
from autoshard.errors import InfeasibleError, UsageError
from autoshard.pipeline.shapes.cut_search import search_cuts

EARLY, MIDDLE, LATE = (Pipeline(microbatches=4, cuts=(name,)) for name in ("layers.1", "layers.2", "layers.3"))


def planned(seconds: dict[tuple[str, ...], float], failures: dict[tuple[str, ...], Exception]) -> Any:
    def plan(way: Pipeline) -> Any:
        if way.cuts in failures:
            raise failures[way.cuts]
        return SimpleNamespace(objective_s=seconds[way.cuts], way=way)
    return plan


@pytest.mark.parametrize("failure", [InfeasibleError("too little memory"), UsageError("output 0 is differentiated in stage 0")])
def test_cuts_that_are_not_possible_do_not_hide_others(failure: Exception) -> None:
    plan = planned({MIDDLE.cuts: 2.0, LATE.cuts: 1.0}, {EARLY.cuts: failure})
    assert search_cuts((EARLY, MIDDLE, LATE), plan).way == LATE


def test_where_none_is_possible_the_first_says_why() -> None:
    plan = planned({}, {EARLY.cuts: UsageError("no such cut"), LATE.cuts: InfeasibleError("too little memory")})
    with pytest.raises(UsageError, match="no such cut"):
        search_cuts((EARLY, LATE), plan)
