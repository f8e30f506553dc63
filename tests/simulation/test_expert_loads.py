"""Loads of experts that differ between ranks: against a profile that says so of all of them, by hand, and in both engines."""
from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from autoshard.base.mesh import Mesh, parse_mesh
from autoshard.base.plan import Plan
from autoshard.collectives.phases import Phase
from autoshard.cost.cluster import Cluster, load_cluster
from autoshard.decide.options import Options
from autoshard.errors import UsageError
from autoshard.planner.one_stage import decide, prices
from autoshard.program.calling import Traced
from autoshard.program.trace import trace
from autoshard.simulation.conditions import Conditions
from autoshard.simulation.events import play_events
from autoshard.simulation.program import Call, Program, Stretch, Wait, Work
from autoshard.simulation.replay import replay
from autoshard.simulation.simulate import program_for
from tests.support.experts import build, travelling

RANKS = Mesh(("dp", "ep"), (2, 4))
GROUPS = ((Phase("nvlink", 1.0, 2.0, 1.0),),)


@cache
def planned() -> tuple[Traced, Plan]:
    """Layers of experts whose tokens travel over two ranks."""
    pytest.importorskip("transformers")
    model, (ids,) = build("exact")
    found = trace(model, (), {"input_ids": ids, "labels": ids})
    mesh, options = parse_mesh("dp=2,ep=2"), Options(cluster="cpu-gloo")
    return found, decide(travelling(prices(found, mesh, options)), options, finer=False)


def by_hand() -> Program:
    """Each rank works 4 s for its experts and 1 s besides, and sends 3 s over its ep group."""
    works = (Work("op", "experts", 4.0, "forward", uneven=(1,)), Work("op", "other", 1.0, "forward"))
    call = Call("all_to_all_rows", "ep", (1,), 1, 3.0, GROUPS, "compute", "forward", "experts", uneven=(1,))
    return Program((Stretch(works, 5.0), call, Wait(1)), RANKS)


def test_the_load_of_all_ranks_is_the_imbalance_of_the_profile() -> None:
    """Simulated with a profile that says 1.5, the step is the objective there; with 1.5 on one rank of every group it takes as long."""
    found, plan = planned()
    cluster = Cluster.from_snapshot(plan.cluster)
    uneven = replace(cluster, device=replace(cluster.device, imbalance=1.5))
    again = decide(travelling(prices(found, plan.mesh, Options(cluster="cpu-gloo"), profile=uneven)), Options(cluster="cpu-gloo"), finer=False)
    assert replay(program_for(found.graph, again, uneven), uneven).step_s == pytest.approx(again.objective_s, rel=1e-9)

    program, slow = program_for(found.graph, again, cluster), program_for(found.graph, again, uneven)
    axes = {w.uneven for w in program.works if w.uneven}
    assert axes == {c.uneven for c in program.calls if c.uneven} and len(axes) == 1, "layers of experts lie on one axis here"
    ranks = np.arange(plan.mesh.size).reshape(plan.mesh.sizes)
    first = {int(r): 1.5 for r in np.take(ranks, 0, axis=next(iter(axes))[0]).ravel()}
    assert replay(program, cluster, Conditions(expert_load=first)).step_s == pytest.approx(replay(slow, uneven).step_s, rel=1e-9)
    assert replay(slow, uneven, Conditions(expert_load={int(r): 1.0 for r in ranks.ravel()})).step_s == pytest.approx(replay(program, cluster).step_s)


def test_a_loaded_rank_holds_up_its_own_group() -> None:
    """Twice the rows on rank 5: it works 9 s and its group sends for 6; the three others share what is left of four, and wait for it."""
    played = replay(by_hand(), load_cluster("h100-dgx"), Conditions(expert_load={5: 2.0}))
    assert played.worked[0] == pytest.approx([5.0] * 4) and played.worked[1] == pytest.approx([1 + 4 * 2 / 3, 9.0, 1 + 4 * 2 / 3, 1 + 4 * 2 / 3])
    assert played.finish == pytest.approx(np.array([[8.0] * 4, [15.0] * 4]))


@pytest.mark.parametrize("load", [{5: 2.0}, {0: 0.0, 1: 3.0}, {4: 1.3, 5: 0.7, 6: 1.0, 7: 1.0}])
def test_events_are_replay(load: dict[int, float]) -> None:
    cluster, conditions = load_cluster("h100-dgx"), Conditions(expert_load=load)
    assert play_events(by_hand(), cluster, conditions).finish == pytest.approx(replay(by_hand(), cluster, conditions).finish, rel=1e-9)


@pytest.mark.parametrize("load, words", [({5: 4.5}, "give less"), ({4: 1.0, 5: 1.0, 6: 1.0, 7: 0.5}, "leave a rank out"), ({9: 1.5}, "there is no rank 9"),
                                         ({1: -1.0}, "makes no sense")])
def test_loads_that_cannot_be(load: dict[int, float], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        replay(by_hand(), load_cluster("h100-dgx"), Conditions(expert_load=load))
