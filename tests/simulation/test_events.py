"""The engine of events: what replay gives where nothing is shared, and max-min fair shares by hand where something is."""
from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
from test_replay import CLUSTER, MESHES, call, finish_by_graph, random_program, slow, stretch

from autoshard.base.mesh import Mesh
from autoshard.collectives.phases import Phase
from autoshard.errors import UsageError
from autoshard.simulation.classes import classes_of
from autoshard.simulation.conditions import Conditions
from autoshard.simulation.critical_path import critical_path
from autoshard.simulation.events import play_events
from autoshard.simulation.program import Call, Program, Stretch, Wait, host_bound
from autoshard.simulation.replay import Replay, replay


def apart(program: Program) -> Program:
    """Every stream on a link of its own, the phases of a call in two groups, one of them on two links at once."""
    def split(event: Call) -> Call:
        link, s = f"link {event.stream}", event.seconds
        first = Phase(link, 0.25 * s, 0.25 * s, 1.0), Phase(f"{link}, beside", 0.1 * s, 0.2 * s, 1.0)
        return replace(event, phases=(first, (Phase(link, 0.0, 1.0 * s, 2.0),)))

    return replace(program, events=tuple(split(e) if isinstance(e, Call) else e for e in program.events))


def same(a: Replay, b: Replay) -> None:
    assert a.finish == pytest.approx(b.finish, rel=1e-9) and a.worked == pytest.approx(b.worked, rel=1e-9)
    assert a.idle.keys() >= {key for key, seconds in b.idle.items() if (seconds > 1e-9).any()}
    for key, seconds in b.idle.items():
        assert a.idle.get(key, np.zeros(1)) == pytest.approx(seconds, rel=1e-6, abs=1e-9), key
    for at, running in b.calls.items():
        assert np.broadcast_to(a.calls[at].end, a.finish.shape) == pytest.approx(np.broadcast_to(running.end, a.finish.shape), rel=1e-9)


def compare(seed: int, programs: int) -> None:
    rng = random.Random(seed)
    for _ in range(programs):
        mesh = rng.choice(MESHES)
        program, conditions = apart(random_program(rng, mesh, rng.randint(1, 25))), slow(rng, mesh)
        played = play_events(program, CLUSTER, conditions)
        same(played, replay(program, CLUSTER, conditions))
        for rank, seconds in finish_by_graph(program, conditions).items():
            assert played.finish[rank] == pytest.approx(seconds, rel=1e-9)


def test_events_are_replay_and_the_longest_path_where_nothing_is_shared() -> None:
    compare(1, 60)


@pytest.mark.slow
def test_events_are_replay_and_the_longest_path_on_a_thousand_programs() -> None:
    compare(2, 1000)


def test_interference_jitter_hosts_and_slow_links_are_those_of_replay() -> None:
    rng = random.Random(3)
    for _ in range(30):
        mesh = rng.choice(MESHES)
        program = apart(random_program(rng, mesh, 20, 0.3))
        conditions = replace(slow(rng, mesh), jitter=rng.choice([0.0, 0.1]), varied=rng.choice([0.0, 0.1]))
        same(play_events(program, CLUSTER, conditions), replay(program, CLUSTER, conditions))
        bound = host_bound(program, rng.random())
        same(play_events(bound, CLUSTER, conditions), replay(bound, CLUSTER, conditions))
    across = Program((call(mesh := Mesh(("a", "b"), (2, 8)), (1,), 1.0), Wait(0)), mesh)
    conditions = Conditions(slow_links={"nvlink@1": 0.5})
    assert play_events(across, CLUSTER, conditions).finish.tolist() == replay(across, CLUSTER, conditions).finish.tolist() == [[1.0] * 8, [2.0] * 8]


def together(*seconds: float, fixed: float = 0.0, link: str = "nvlink") -> Program:
    """Calls on streams of their own, started at once, over one axis."""
    mesh = Mesh(("a",), (4,))
    calls = [replace(call(mesh, (0,), s + fixed, f"stream {i}"), phases=((Phase(link, fixed, s, 1.0),),)) for i, s in enumerate(seconds)]
    return Program((*calls, *map(Wait, range(len(calls)))), mesh)


def ends(program: Program, conditions: Conditions | None = None) -> list[float]:
    played = play_events(program, CLUSTER, conditions)
    return [float(played.calls[at].end.max()) for at in sorted(played.calls)]


def test_two_collectives_on_one_link_share_it() -> None:
    """s1 < s2: they end after 2 s1 and s1 + s2; on a link with half its bandwidth after twice that. What is fixed takes no share."""
    assert ends(together(1.0, 3.0)) == pytest.approx([2.0, 4.0])
    assert ends(together(1.0, 3.0), Conditions(slow_links={"nvlink": 0.5})) == pytest.approx([4.0, 8.0])
    assert ends(together(1.0, 3.0, 2.0)) == pytest.approx([3.0, 6.0, 5.0])
    assert ends(together(1.0, 3.0, fixed=5.0)) == pytest.approx([7.0, 9.0])
    assert [float(r.end.max()) for r in replay(together(1.0, 3.0), CLUSTER).calls.values()] == [1.0, 3.0], "replay gives both all of it"


def test_shares_are_max_min_fair() -> None:
    """Ranks 0 and 1 have half of their link. A call over b is theirs alone, on ranks 2 and 3 another one runs: with a call over both axes all flows
    meet. Rank 0's port has 1/2 for two flows, so each gets 1/4; on ranks 2 and 3 the large one takes 1/4, and theirs 3/4."""
    mesh = Mesh(("a", "b"), (2, 2))
    cluster = replace(CLUSTER, links=(replace(CLUSTER.links[0], devices=2.0), *CLUSTER.links[1:]))
    program = Program((call(mesh, (1,), 1.0), call(mesh, (0, 1), 1.0), Wait(0), Wait(1)), mesh)
    played = play_events(program, cluster, Conditions(slow_links={"nvlink@0": 0.5}))
    rows, whole = np.broadcast_to(played.calls[0].end, (2, 2)), np.broadcast_to(played.calls[1].end, (2, 2))
    assert rows[0].tolist() == pytest.approx([4.0, 4.0]), "two flows on half a link"
    assert rows[1].tolist() == pytest.approx([4 / 3, 4 / 3]), "what the large one leaves"
    assert whole.ravel().tolist() == pytest.approx([4.0] * 4), "its slowest rank counts"


def test_sharing_never_makes_a_step_faster() -> None:
    """Streams are in order, so there is no anomaly; without any sharing it is replay."""
    rng, shared = random.Random(9), 0
    for _ in range(60):
        mesh = rng.choice(MESHES)
        program, conditions = random_program(rng, mesh, 20), slow(rng, mesh)
        events, alone = play_events(program, CLUSTER, conditions), replay(program, CLUSTER, conditions)
        assert events.step_s >= alone.step_s * (1 - 1e-9)
        assert np.allclose(events.worked + sum(events.idle.values()), events.step_s, rtol=1e-9), "work and idle time are the step"
        assert sum(leg.end - leg.begin for leg in critical_path(events)) == pytest.approx(events.step_s, rel=1e-9)
        shared += events.step_s > alone.step_s * (1 + 1e-9)
    assert shared > 10


def test_classes_are_all_ranks() -> None:
    """Few classes give what every rank by itself gives."""
    rng = random.Random(4)
    for _ in range(20):
        mesh = rng.choice([Mesh(("a", "b"), (4, 4)), Mesh(("a", "b", "c"), (4, 2, 2))])
        program, conditions = random_program(rng, mesh, 15), slow(rng, mesh)
        each = replace(conditions, jitter=1e-13)  # every rank is a class of its own
        same(play_events(program, CLUSTER, conditions), play_events(program, CLUSTER, each))


def test_how_many_classes_there_are() -> None:
    work, axes = np.ones((64, 8, 8)), [(0,), (1,), (2,), (1, 2)]
    assert classes_of([work], axes, work.shape).count == 1
    work[3, 2, 1] = 1.5
    found = classes_of([work], axes, work.shape)
    assert found.count == 8, "itself and what shares no, one or two of its coordinates"
    assert found.spread(range(8)).shape == work.shape and sum(len(m) for m in found.members[0,]) >= 8


def test_programs_that_wait_for_each_other_and_too_many_ranks_are_refused() -> None:
    program = Program((stretch(1.0),), Mesh(("a",), (2048,)))
    assert isinstance(program.events[0], Stretch) and play_events(program, CLUSTER).step_s == 1.0
    with pytest.raises(UsageError, match="2048 of the 2048 ranks differ; .* leave out the jitter"):
        play_events(program, replace(CLUSTER, links=CLUSTER.links), Conditions(jitter=0.1))
