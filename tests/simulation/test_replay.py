"""Arrays over all ranks against an explicit graph of every rank's events, and against work integrated over time."""
from __future__ import annotations

import random
from collections import defaultdict
from dataclasses import replace
from functools import cache
from itertools import product

import numpy as np
import pytest

from autoshard.base.mesh import Mesh
from autoshard.collectives.phases import Phase
from autoshard.cost.cluster import load_cluster
from autoshard.errors import UsageError
from autoshard.simulation.conditions import Conditions
from autoshard.simulation.critical_path import critical_path, shares
from autoshard.simulation.events import play_events
from autoshard.simulation.program import Call, Program, Stretch, Wait, Work, host_bound
from autoshard.simulation.replay import FINISHED, HOST, Replay, replay

CLUSTER = load_cluster("h100-dgx")
MESHES = [Mesh(("a",), (3,)), Mesh(("a", "b"), (2, 3)), Mesh(("a", "b", "c"), (4, 2, 2))]


def stretch(*seconds: float) -> Stretch:
    return Stretch(tuple(Work("op", f"op{i}", s, "forward", f"layers.{i}.mlp") for i, s in enumerate(seconds)), sum(seconds))


def call(mesh: Mesh, axes: tuple[int, ...], seconds: float, stream: str | None = None) -> Call:
    name = mesh.label(axes)
    return Call("all_reduce", name, axes, 1000, seconds, ((Phase("nvlink", 0.0, seconds, 1.0),),), stream or name, "forward", "v", "layers.0.mlp")


def random_program(rng: random.Random, mesh: Mesh, length: int, interference: float = 0.0) -> Program:
    """Work, calls over any axes, and waits for calls under way in any order; all are waited for in the end."""
    events, flying = [], []
    sets = [c for n in range(1, 1 << mesh.ndim) if (c := tuple(i for i in range(mesh.ndim) if n >> i & 1))]
    for _ in range(length):
        kind = rng.random()
        if kind < 0.4:
            events.append(stretch(*(rng.random() for _ in range(rng.randint(1, 3)))))
        elif kind < 0.75 or not flying:
            flying.append(len(events))
            events.append(call(mesh, rng.choice(sets), 2 * rng.random()))
        else:
            events.append(Wait(flying.pop(rng.randrange(len(flying)))))
    return Program((*events, *map(Wait, flying)), mesh, interference)


def slow(rng: random.Random, mesh: Mesh) -> Conditions:
    return Conditions(slow_ranks={rng.randrange(mesh.size): 1 + rng.random() for _ in range(rng.randint(0, 3))})


def finish_by_graph(program: Program, conditions: Conditions) -> dict[tuple[int, ...], float]:
    """Per rank the longest path through a graph with a node for every event of every rank, and one for every group of every call."""
    needs, seconds, last, stream = defaultdict(list), {}, {}, {}
    ranks = list(product(*map(range, program.mesh.sizes)))
    for i, event in enumerate(program.events):
        for flat, r in enumerate(ranks):
            node, before = (i, r), [last[r]] if r in last else []
            if isinstance(event, Call):
                group = (i, "run", tuple(x for k, x in enumerate(r) if k not in event.axes))
                needs[node] += before + ([stream[r, event.stream]] if (r, event.stream) in stream else [])
                seconds[node], seconds[group] = 0.0, event.seconds
                needs[group].append(node)
                stream[r, event.stream] = group
                continue
            if isinstance(event, Wait):
                of = program.events[event.call]
                before.append((event.call, "run", tuple(x for k, x in enumerate(r) if k not in of.axes)))
            needs[node] += before
            seconds[node] = event.seconds * conditions.slow_ranks.get(flat, 1.0) if isinstance(event, Stretch) else 0.0
            last[r] = node

    @cache
    def end(node: tuple) -> float:
        return max((end(n) for n in needs[node]), default=0.0) + seconds[node]

    return {r: end(last[r]) for r in ranks if r in last}


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_replay_is_the_longest_path_of_an_explicit_graph(mesh: Mesh) -> None:
    rng = random.Random(str(mesh))
    for _ in range(100 if mesh.ndim < 3 else 30):
        program, conditions = random_program(rng, mesh, rng.randint(1, 30)), slow(rng, mesh)
        played = replay(program, CLUSTER, conditions)
        assert played.step_s == played.finish.max()
        for rank, seconds in finish_by_graph(program, conditions).items():
            assert played.finish[rank] == pytest.approx(seconds, rel=1e-12)


def test_time_is_accounted_for_on_every_rank_and_along_the_critical_path() -> None:
    rng = random.Random(3)
    for _ in range(150):
        mesh = rng.choice(MESHES)
        program = random_program(rng, mesh, 25, rng.choice([0.0, 0.3]))
        played = replay(program, CLUSTER, Conditions(slow(rng, mesh).slow_ranks, jitter=rng.choice([0.0, 0.2])))
        total = played.worked + sum(played.idle.values())
        assert np.allclose(total, played.step_s, rtol=1e-12), "work and idle time are the step"
        path = critical_path(played)
        assert sum(leg.end - leg.begin for leg in path) == pytest.approx(played.step_s, rel=1e-12)
        assert all(a.end == pytest.approx(b.begin, abs=1e-12) for a, b in zip(path, path[1:])) and path[0].begin == 0.0
        assert sum(s.seconds for s in shares(played, path)) == pytest.approx(played.step_s, rel=1e-12)


def test_step_is_between_its_bounds() -> None:
    """No shorter than what any stream does, no longer than everything one after the other."""
    rng = random.Random(5)
    for _ in range(100):
        program = random_program(rng, rng.choice(MESHES), 25)
        work = sum(e.seconds for e in program.events if isinstance(e, Stretch))
        streams: dict[str, float] = defaultdict(float)
        for c in program.calls:
            streams[c.stream] += c.seconds
        assert max([work, *streams.values()]) <= replay(program, CLUSTER).step_s * (1 + 1e-12)
        assert replay(program, CLUSTER).step_s <= (work + sum(streams.values())) * (1 + 1e-12)


def test_a_device_that_waits_for_its_host() -> None:
    """Ops of 1 s, one issued every 3: the host decides. Of 5 s: it is far ahead, and only the first op waits. A call is issued too."""
    mesh = MESHES[0]
    short = host_bound(Program((stretch(1.0, 1.0), call(mesh, (0,), 0.5, "s"), Wait(1), stretch(1.0)), mesh), 3.0)
    played = replay(short, CLUSTER)
    assert played.step_s == 4 * 3.0 + 1.0 and played.idle[HOST, "", ""].tolist() == [3.0 + 2.0 + 2.0 + 2.5] * 3
    path = critical_path(played)
    assert [s.what for s in shares(played, path)] == ["host", "compute"] and sum(leg.end - leg.begin for leg in path) == played.step_s
    assert replay(host_bound(Program((stretch(5.0, 5.0, 5.0),), mesh), 3.0), CLUSTER).step_s == 3.0 + 15.0
    update = Stretch((Work("update", "w", 1.0, "update"), Work("update", "v", 1.0, "update")), 2.0)
    assert replay(host_bound(Program((update,), mesh), 3.0), CLUSTER).step_s == 3.0 + 2.0, "issued in one piece"


def test_random_programs_with_a_host_lie_between_their_bounds() -> None:
    """No sooner than the host, no sooner than without one, no later than one after the other."""
    rng = random.Random(11)
    for _ in range(60):
        program, launch = random_program(rng, rng.choice(MESHES), 25), rng.random()
        bound, free = replay(host_bound(program, launch), CLUSTER), replay(program, CLUSTER)
        issued = launch * sum(len(e.works) if isinstance(e, Stretch) else isinstance(e, Call) for e in program.events)
        assert max(free.step_s, issued) <= bound.step_s * (1 + 1e-12) and bound.step_s <= (free.step_s + issued) * (1 + 1e-12)
        assert np.allclose(bound.worked + sum(bound.idle.values()), bound.step_s, rtol=1e-12), "work and idle time are the step"
        assert sum(leg.end - leg.begin for leg in critical_path(bound)) == pytest.approx(bound.step_s, rel=1e-12)


def covered(intervals: list[tuple[float, float]], begin: float, end: float) -> float:
    """Seconds between begin and end that some interval covers."""
    cuts = sorted({begin, end, *(min(max(x, begin), end) for i in intervals for x in i)})
    return sum(b - a for a, b in zip(cuts, cuts[1:]) if any(s <= a and b <= e for s, e in intervals))


def test_work_beside_collectives_is_slowed_while_any_of_them_runs() -> None:
    """By the seconds that are covered: what a stretch lasts, less k times these, is its work."""
    rng, k = random.Random(7), 0.25
    for _ in range(100):
        mesh = rng.choice(MESHES[:2])
        program = random_program(rng, mesh, 25, k)
        played = replay(program, CLUSTER)
        for rank in range(mesh.size):
            now, issued = 0.0, []
            for i, (event, clock) in enumerate(zip(program.events, played.clock, strict=True)):
                if isinstance(event, Call):
                    issued.append(tuple(float(np.broadcast_to(t, mesh.sizes).flat[rank]) for t in (played.calls[i].start, played.calls[i].end)))
                    continue
                then = float(clock.flat[rank])
                if isinstance(event, Stretch):
                    assert then - now - k * covered(issued, now, then) == pytest.approx(event.seconds, rel=1e-9)
                now = then


def test_hidden_work_costs_what_the_objective_says() -> None:
    """C = 10 behind which H = 2 hides: C + k H. H = 20: H + what is left of C, as C ran at 1 - k all the time."""
    mesh = MESHES[0]
    assert replay(Program((call(mesh, (0,), 2.0), stretch(10.0), Wait(0)), mesh, 0.2), CLUSTER).step_s == pytest.approx(10.4)
    assert replay(Program((call(mesh, (0,), 20.0), stretch(10.0), Wait(0)), mesh, 0.2), CLUSTER).step_s == pytest.approx(20.0)


def test_a_straggler_with_a_blocking_collective_each_layer() -> None:
    """f C + X per layer, all others wait (f - 1) C."""
    mesh = Mesh(("a",), (4,))
    layers = [(stretch(1.0), call(mesh, (0,), 0.5, "s"), Wait(3 * i + 1)) for i in range(6)]
    played = replay(Program(tuple(e for layer in layers for e in layer), mesh), CLUSTER, Conditions({2: 1.5}))
    assert played.step_s == pytest.approx(6 * (1.5 + 0.5))
    late = played.idle["stragglers", "all_reduce", "a"]
    assert late[2] == 0 and late[0] == pytest.approx(6 * 0.5) and FINISHED not in {why for why, _, _ in played.idle}
    assert {leg.rank for leg in critical_path(played)[:-1]} == {2}, "the last call ends on all ranks at once"


def test_a_slow_card_of_one_node_slows_the_groups_that_have_it() -> None:
    """16 ranks, 2 nodes: groups of axis a cross nodes, and one of them has ranks of node 1; groups of b stay inside one."""
    mesh = Mesh(("a", "b"), (2, 8))
    inside = Program((call(mesh, (1,), 1.0), Wait(0)), mesh)
    played = replay(inside, CLUSTER, Conditions(slow_links={"nvlink@1": 0.5}))
    assert played.finish[0].tolist() == [1.0] * 8 and played.finish[1].tolist() == [2.0] * 8
    across = Program((call(mesh, (0,), 1.0), Wait(0)), mesh)
    assert set(replay(across, CLUSTER, Conditions(slow_links={"nvlink@1": 0.5})).finish.ravel()) == {2.0}
    assert replay(across, CLUSTER, Conditions(slow_links={"infiniband": 0.5})).step_s == 1.0, "it does not use that link"


def test_time_scales_with_all_prices_and_knows_no_names_of_ranks() -> None:
    """Twice the seconds, twice the step. Ranks that swap places along an axis swap their ends, in both engines. A faster link is never slower."""
    rng = random.Random(13)
    for _ in range(40):
        mesh = rng.choice(MESHES)
        program, conditions = random_program(rng, mesh, 20), slow(rng, mesh)
        twice = replace(program, events=tuple(
            stretch(*(2 * w.seconds for w in e.works)) if isinstance(e, Stretch) else call(mesh, e.axes, 2 * e.seconds, e.stream)
            if isinstance(e, Call) else e for e in program.events))
        swapped = {int(np.ravel_multi_index([(mesh.sizes[0] - 1 - c) if i == 0 else c for i, c in enumerate(mesh.coordinates(r))], mesh.sizes)): f
                   for r, f in conditions.slow_ranks.items()}
        for engine in (replay, play_events):
            step = engine(program, CLUSTER, conditions)
            assert engine(twice, CLUSTER, conditions).finish == pytest.approx(2 * step.finish, rel=1e-9)
            assert engine(program, CLUSTER, Conditions(slow_ranks=swapped)).finish == pytest.approx(step.finish[::-1], rel=1e-9)
            slower = engine(program, CLUSTER, replace(conditions, slow_links={"nvlink": 0.5}))
            assert (slower.finish >= step.finish * (1 - 1e-9)).all()


def test_jitter_at_a_barrier_is_the_mean_of_maxima() -> None:
    """Of n draws the expected largest, not the largest of the means."""
    mesh, layers = Mesh(("a",), (64,)), 400
    program = Program(tuple(e for i in range(layers) for e in (stretch(1.0), call(mesh, (0,), 1e-9, "s"), Wait(3 * i + 1))), mesh)
    drawn = np.exp(np.random.default_rng(1).standard_normal((20000, 64)) * np.sqrt(np.log(1.01)) - np.log(1.01) / 2).max(axis=1)
    played = replay(program, CLUSTER, Conditions(jitter=0.1, seed=4))
    assert played.step_s / layers == pytest.approx(drawn.mean(), abs=4 * drawn.std() / np.sqrt(layers))
    assert played.worked.mean() == pytest.approx(layers, rel=0.01), "its mean is 1"
    assert replay(program, CLUSTER, Conditions(jitter=0.1, seed=4)).step_s == played.step_s != replay(program, CLUSTER, Conditions(jitter=0.1)).step_s


def test_of_devices_that_differ_all_wait_for_the_slowest() -> None:
    """A rank's speed is one number for all its work, beside the jitter's draws: with a barrier after every stretch the step is the largest factor times
    the work, and the mean over draws is that of the largest of n numbers."""
    mesh, layers = Mesh(("a",), (64,)), 20
    program = Program(tuple(e for i in range(layers) for e in (stretch(1.0), call(mesh, (0,), 1e-9, "s"), Wait(3 * i + 1))), mesh)
    factors = Conditions(varied=0.1, seed=4).work(mesh)
    assert replay(program, CLUSTER, Conditions(varied=0.1, seed=4)).step_s == pytest.approx(layers * factors.max(), abs=1e-6)
    assert Conditions({9: 2.0}, varied=0.1, seed=4).work(mesh)[9] == 2 * factors[9]
    assert replay(program, CLUSTER, Conditions(varied=0.1, jitter=0.1, seed=4)).step_s > replay(program, CLUSTER, Conditions(jitter=0.1, seed=4)).step_s
    drawn = np.array([Conditions(varied=0.1, seed=seed).work(mesh) for seed in range(400)])
    assert drawn.mean() == pytest.approx(1.0, abs=0.002) and drawn.std() == pytest.approx(0.1, rel=0.02)
    largest = np.exp(np.random.default_rng(1).standard_normal((20000, 64)) * np.sqrt(np.log(1.01)) - np.log(1.01) / 2).max(axis=1)
    assert drawn.max(axis=1).mean() == pytest.approx(largest.mean(), abs=4 * largest.std() / 20)


def test_ranks_that_do_the_same_are_alike() -> None:
    mesh = Mesh(("a", "b"), (4, 8))
    program = random_program(random.Random(1), mesh, 40, 0.2)

    def classes(played: Replay) -> int:
        return len(np.unique(played.alike))

    assert classes(replay(program, CLUSTER)) == 1
    assert classes(replay(program, CLUSTER, Conditions({9: 1.5}))) == 4, "itself, its row, its column, the rest"
    assert classes(replay(program, CLUSTER, Conditions(jitter=0.1))) > 4


@pytest.mark.parametrize(("conditions", "words"), [
    ({"slow_ranks": {6: 1.5}}, "there is no rank 6: mesh a=2,b=3 has ranks 0 to 5"),
    ({"slow_ranks": {1: -1.0}}, "slow rank 1: -1 times as long makes no sense"),
    ({"slow_links": {"nvlik": 0.5}}, "cluster h100-dgx has no link 'nvlik'; its links are nvlink, infiniband"),
    ({"slow_links": {"nvlink": 1.5}}, "slow link nvlink: 1.5 is no share"),
    ({"slow_links": {"nvlink@x": 0.5}}, "after @ comes the number of a node, as in nvlink@3"),
    ({"slow_links": {"nvlink@1": 0.5}}, "there is no node 1; the 6 ranks of mesh a=2,b=3 fill nodes 0 to 0"),
    ({"jitter": -0.1}, "jitter -0.1: give the relative standard deviation"),
    ({"varied": float("nan")}, "varied nan: give the relative standard deviation of the ranks' speeds"),
])
def test_conditions_that_cannot_be(conditions: dict, words: str) -> None:
    with pytest.raises(UsageError) as e:
        Conditions(**conditions).check(MESHES[1], CLUSTER)
    assert words in str(e.value)
