import random

import numpy as np
import pytest

from autoshard.pipeline.action_lists.network import network_of
from autoshard.pipeline.action_lists.play import Seconds, makespans, play
from autoshard.pipeline.schedules import SCHEDULES, make_schedule


def even(name, ranks, microbatches, chunks=1, hop=0.0, warmup=0):
    """Played with F = I = W = 1 and B = 2 per rank, and `hop` per transfer."""
    table = make_schedule(name, ranks, microbatches, chunks, warmup)
    of_chunk = {"F": 1 / chunks, "B": 2 / chunks, "I": 1 / chunks, "W": 1 / chunks}
    return play(network_of(table), Seconds.per_stage(table.stages, SEND_F=hop, SEND_B=hop, **of_chunk))


@pytest.mark.parametrize("name, chunks, short, long", [
    ("gpipe", 1, 3 / 8, 7 / 32), ("1f1b", 1, 3 / 8, 7 / 32), ("interleaved", 2, 3 / 16, 7 / 64), ("interleaved", 4, 3 / 32, 7 / 128),
    ("zb1p", 1, 1 / 8, 7 / 96), ("zb2p", 1, 1 / 8, 7 / 96), ("zbv", 2, 1 / 16, 7 / 192),
])
def test_bubbles_of_even_stages(name, chunks, short, long):
    """4 ranks and 8 micro-batches, 8 ranks and 32: (p-1)/M, the same over v, over 3, and over 6."""
    assert even(name, 4, 8, chunks).bubble == pytest.approx(short, abs=1e-12)
    assert even(name, 8, 32, chunks).bubble == pytest.approx(long, abs=1e-12)


def test_four_stages_and_four_micro_batches_of_gpipe_take_14_slots():
    network = network_of(make_schedule("gpipe", 4, 4))
    played = play(network, Seconds.per_stage(4, F=1, B=1))
    assert played.makespan == 14
    assert played.idle.tolist() == [6, 6, 6, 6]


@pytest.mark.parametrize("stages, tpu, gpus", [(2, 1.21, 1.78), (4, 1.84, 2.71), (8, 3.48, 4.97)])
def test_gpipe_measured_is_below_what_equal_stages_would_give(stages, tpu, gpus):
    """AmoebaNet with 32 micro-batches over two stages with one, as the GPipe paper and torchgpipe measured it: its stages are not equal."""
    def seconds(stages, microbatches):
        network = network_of(make_schedule("gpipe", stages, microbatches))
        return play(network, Seconds.per_stage(stages, F=1 / stages / microbatches, B=2 / stages / microbatches)).makespan

    most = seconds(2, 1) / seconds(stages, 32)
    assert most == pytest.approx(32 * stages / (32 + stages - 1))
    assert tpu < gpus < most


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
@pytest.mark.parametrize("stages", [2, 4, 8])
def test_four_micro_batches_per_stage_are_enough(name, stages):
    """GPipe's rule of thumb M >= 4 K, as an outcome: every rank computes for at least 80 % of the step."""
    played = even(name, stages, 4 * stages)
    assert (played.busy / played.makespan >= 0.8).all()


@pytest.mark.parametrize("ranks", range(2, 9))
def test_zero_bubble_with_twice_the_activations_never_waits(ranks):
    for microbatches in (2 * ranks, 2 * ranks + 1, 4 * ranks):
        assert even("zb2p", ranks, microbatches).waits.max() == 0
        assert even("zbv", ranks, microbatches, 2).waits.max() == pytest.approx(0, abs=1e-9)
        assert even("zb1p", ranks, microbatches).waits.max() == ranks - 1


@pytest.mark.parametrize("hop", [0.1, 0.25, 0.5])
def test_warm_up_hides_transfers(hop):
    """Stage 0 of 1F1B has p micro-batches on their way, and each is back after 3 p + 2 c (p - 1): that is Little's law, at any M."""
    def rate(warmup):
        return (even("1f1b", 8, 128, hop=hop, warmup=warmup).makespan - even("1f1b", 8, 64, hop=hop, warmup=warmup).makespan) / 64

    assert rate(0) == pytest.approx(3 + 2 * hop * 7 / 8)
    assert rate(7) == pytest.approx(3)


def step_by_step(table, seconds):
    """The same run, written as its definition: whoever can go on goes on, and a wire carries one value at a time."""
    ends, free, wires, heads = {}, [0.0] * len(table.ranks), {}, [0] * len(table.ranks)

    def arrival(kind, source, stage, m):
        """When what `source` made for `stage` is there, or None."""
        made = next((ends[k, source, m] for k in kind if (k, source, m) in ends), None)
        if made is None or table.rank_of[source] == table.rank_of[stage]:
            return made
        key = ("sent", kind, source, m)
        if key not in ends:
            wire = (table.rank_of[source], table.rank_of[stage], kind)
            wires[wire] = ends[key] = max(wires.get(wire, 0.0), made) + seconds["SEND_F" if kind == "F" else "SEND_B"][source]
        return ends[key]

    while any(head < len(actions) for head, actions in zip(heads, table.ranks)):
        ready = []
        for rank, actions in enumerate(table.ranks):
            if heads[rank] == len(actions):
                continue
            a = actions[heads[rank]]
            at = 0.0
            if a.kind == "F" and a.stage > 0:
                at = arrival("F", a.stage - 1, a.stage, a.microbatch)
            elif a.kind in "BI" and a.stage < table.stages - 1:
                at = arrival("BI", a.stage + 1, a.stage, a.microbatch)
            if at is not None:
                ready.append((max(at, free[rank]), rank, a))
        begin, rank, a = min(ready, key=lambda r: r[0])
        ends[a.kind, a.stage, a.microbatch] = free[rank] = begin + seconds[a.kind][a.stage]
        heads[rank] += 1
    return max(free)


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("seed", range(4))
def test_play_equals_a_run_step_by_step(name, seed):
    rng = random.Random(seed)
    family = SCHEDULES[name]
    table = make_schedule(name, rng.randint(1, 5), rng.randint(1, 12), rng.choice([c for c in (1, 2, 3) if c in family.chunks]))
    seconds = {kind: [rng.uniform(0.1, 2) for _ in range(table.stages)] for kind in ("F", "B", "I", "W", "SEND_F", "SEND_B")}
    played = play(network_of(table), Seconds.per_stage(table.stages, **seconds))
    assert played.makespan == pytest.approx(step_by_step(table, seconds), rel=1e-12)


def test_many_cases_at_once_are_the_same_as_each():
    network = network_of(make_schedule("interleaved", 3, 7, 2))
    cases = np.random.default_rng(0).uniform(0, 1, (20, 10, 6))
    assert makespans(network, cases).tolist() == [play(network, Seconds(case)).makespan for case in cases]


def test_a_rank_is_busy_and_idle_for_the_whole_step():
    played = even("zb1p", 4, 8, hop=0.3)
    assert played.busy.tolist() == [24] * 4
    assert (played.busy + played.idle).tolist() == [played.makespan] * 4
    assert (played.waits <= played.idle).all()
