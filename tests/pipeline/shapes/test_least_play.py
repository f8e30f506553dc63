"""The least step of a played schedule, for lengths of stages that may be any, against all cuts."""
import random

import numpy as np
import pytest
from random_chains import all_cuts
from test_needs import bound_of, by_trying_all, random_model

from autoshard.pipeline.action_lists.network import network_of
from autoshard.pipeline.schedules import SCHEDULES, make_schedule
from autoshard.pipeline.shapes import least_play
from autoshard.pipeline.shapes.floors import Floor, Priced
from autoshard.pipeline.shapes.least_play import least_played
from autoshard.pipeline.shapes.partitions import course_of, price_by_play
from autoshard.search.partition import chain_of_blocks
from autoshard.search.partition.feasible import Stages


def played(table, floor):
    return least_played(network_of(table), course_of(table), floor)


def floor_of(seed):
    """Floors of random blocks, some of them equal, and a schedule."""
    rng = random.Random(seed)
    name = rng.choice(list(SCHEDULES))
    chunks = rng.choice([c for c in (1, 2) if c in SCHEDULES[name].chunks])
    ranks = rng.choice([1, 2, 3] if chunks == 1 else [2])
    blocks = max(ranks * chunks, rng.choice([3, 5, 6]))
    kinds = [[rng.uniform(0.2, 1.0) for _ in range(4)] for _ in range(3)]
    forward, back, weight, once = np.array([kinds[rng.choice([0, 0, 1, 2])] for _ in range(blocks)]).T
    floor = Floor(forward, forward + back + weight, once, back=back, hops=(rng.uniform(0.0, 0.3), rng.uniform(0.0, 0.3)))
    return floor, make_schedule(name, ranks, rng.randint(1, 5), chunks)


def least_of_all(floor, table):
    """The least step over all cuts. Once a step comes after all that is played; the first stage makes no gradients for others."""
    split, count = table.split_backward, len(floor.forward)
    hops = [np.full(count - 1, hop) for hop in floor.hops]
    rest = floor.whole - floor.forward
    parts = [(floor.input, rest - floor.input), (np.zeros(count), rest)]
    chains = [chain_of_blocks(floor.forward, back, weight=weight, hop_forward=hops[0], hop_backward=hops[1]) for back, weight in parts]
    cuts = all_cuts(count, table.stages)
    chain = chains[0]
    if split:  # stages that begin with the first block are as in the second
        chain.backward[0], chain.weight[0] = chains[1].backward[0], chains[1].weight[0]
    else:
        chain = chain.undivided()
    steps = price_by_play(chain, table)(cuts)
    once = [[sum(floor.once[cut[s]:cut[s + 1]].sum() for s in range(table.stages) if table.rank_of[s] == r) for r in range(len(table.ranks))]
            for cut in cuts]
    return float((steps + np.max(once, axis=1)).min())


@pytest.mark.parametrize("begin", range(0, 120, 30))
def test_no_cut_is_below_the_program(begin):
    higher = 0
    for seed in range(begin, begin + 30):
        floor, table = floor_of(seed)
        bound, best = played(table, floor), least_of_all(floor, table)
        assert bound <= best * (1 + 1e-9), seed
        assert bound >= 0.5 * best, seed
        course = course_of(table)
        higher += bound > 1.01 * max(floor.whole_blocks(course), Stages(floor.chain(table.split_backward), course, work=floor.work(course)).bound())
    assert higher >= 5


@pytest.mark.parametrize("begin", range(0, 60, 15))
def test_no_plan_that_fits_is_below_it(begin):
    """With bytes at a price: what random models take at least at it is known exactly, and so is the best way to run them in little memory."""
    higher = 0
    for seed in range(begin, begin + 15):
        model = random_model(seed)
        seconds, stored, values, table = model
        for part, price in ((0.3, 2.0), (0.5, 0.5), (0.8, 0.2)):
            limit = part * (sum(stored) + 2 * sum(nbytes for *_, nbytes in values)) / len(table.ranks)
            floor = priced_floor(model, price, limit)
            course, best = course_of(table), by_trying_all(model, limit)
            bound = played(table, floor)
            assert bound <= best * (1 + 1e-9), seed
            assert floor.whole_blocks(course) <= best * (1 + 1e-9), seed
            assert Stages(floor.chain(table.split_backward), course, work=floor.work(course), together=floor.together(course)).bound() <= best * (1 + 1e-9)
            higher += np.isfinite(best) and bound > 1.01 * bound_of(model, np.inf)
    assert higher >= 5


def priced_floor(model, price, limit):
    seconds, stored, values, table = model
    m, whole = table.microbatches, np.array(seconds)

    def at(count):
        least = m * whole + price * np.array(stored)
        for block, more, nbytes in values:
            least[block] += min(m * more, price * count * nbytes)
        return least

    flying = float(len(table.ranks))
    return Floor(whole / 3, whole, np.zeros(len(whole)), priced=Priced(price, flying, at(0.0), at(flying), limit))


def test_what_is_held_lies_between():
    priced = Priced(1.0, 4.0, np.array([1.0]), np.array([3.0]), 0.0)
    assert [priced.at(count)[0] for count in (0.0, 1.0, 4.0, 9.0)] == [1.0, 1.5, 3.0, 3.0]


def test_two_equal_stages():
    """As in the example of the bound: 10, and no more with what is once a step in one of them."""
    table = make_schedule("1f1b", 2, 4, 1)
    one, none = np.ones(2), np.zeros(2)
    assert played(table, Floor(one, 2 * one, none)) == pytest.approx(10.0)
    assert played(table, Floor(one, 2 * one, np.array([0.5, 3.0]))) == pytest.approx(13.0)
    chain = chain_of_blocks(one, one, hop_forward=[0.5], hop_backward=[0.25])
    assert played(table, Floor(one, 2 * one, none, hops=(0.5, 0.25))) == pytest.approx(price_by_play(chain, table)(np.array([[0, 1, 2]]))[0])


def test_ranks_with_several_stages_wait():
    """Sixteen equal layers on four ranks, interleaved: other bounds see the work, and little of the waiting."""
    table, layers = make_schedule("interleaved", 4, 4, 2), np.ones(16)
    course, floor = course_of(table), Floor(layers, 3 * layers, np.zeros(16))
    known = max(floor.whole_blocks(course), Stages(floor.chain(False), course, work=floor.work(course)).bound())
    assert known < 0.95 * played(table, floor)
    best = float(price_by_play(floor.chain(False), table)(all_cuts(16, 8)).min())
    assert 0.9 * best < played(table, floor) <= best * (1 + 1e-9)


def test_a_program_that_is_too_large_is_left_out(monkeypatch):
    monkeypatch.setattr(least_play, "MOST_EVENTS", 3)
    assert played(make_schedule("1f1b", 2, 4, 1), Floor(np.ones(2), np.ones(2), np.zeros(2))) == 0.0
