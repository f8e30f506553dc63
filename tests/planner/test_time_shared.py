"""Plans of several shapes share one time limit."""
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest

from autoshard.base.mesh import AnyMesh, Mesh
from autoshard.cost.cluster import load_cluster
from autoshard.decide.options import Options
from autoshard.decide.phase_timer import PhaseTimer
from autoshard.decide.pipeline_options import Pipeline
from autoshard.errors import InfeasibleError
from autoshard.planner import open_mesh

TAKES = 10.0


@dataclass(frozen=True)
class Made:
    timings: Mapping[str, float] = field(default_factory=dict)


@pytest.fixture
def limits(monkeypatch):
    """The time limits of four shapes whose searches take ten seconds each; the second does not fit."""
    given = []

    def plan_traced(traced, on, options, *, clock, **how):
        given.append(options.time_limit)
        clock.seconds["search"] = clock.seconds.get("search", 0.0) + TAKES
        if len(given) == 2:
            raise InfeasibleError("it does not fit")
        return Made()

    def choose(asked, wanted, searches, plan_shape, tell):
        for at in range(4):
            if at == 1:
                with pytest.raises(InfeasibleError):
                    plan_shape(Mesh(("dp",), (2,)), Pipeline(), 0.0)
            else:
                found = plan_shape(Mesh(("dp",), (2,)), Pipeline(), 0.0)
        return found

    monkeypatch.setattr(open_mesh, "plan_traced", plan_traced)
    monkeypatch.setattr(open_mesh, "choose", choose)
    monkeypatch.setattr(open_mesh, "check_stored", lambda *a: None)
    monkeypatch.setattr(open_mesh, "searches", lambda *a: None)
    asked = SimpleNamespace(whole=SimpleNamespace(graph=SimpleNamespace(training=True)), on=lambda on, pipeline: None)
    profile = load_cluster("h100-dgx")
    open_mesh.plan_open(asked, AnyMesh(2), Options(cluster="h100-dgx", time_limit=60.0), PhaseTimer(), profile)
    return given


def test_each_shape_may_take_half_of_what_is_left_also_behind_one_that_does_not_fit(limits):
    assert limits == [30.0, 25.0, 20.0, 15.0]
