"""Memory in the floors of shapes: no plan that fits is below them, and they say more than floors of ample memory."""
import itertools
import random

import numpy as np
import pytest
from random_chains import all_cuts

from autoshard.pipeline.schedules import SCHEDULES, make_schedule
from autoshard.pipeline.shapes.floors import Floor
from autoshard.pipeline.shapes.needs import Needs, added
from autoshard.pipeline.shapes.partitions import course_of, price_by_play
from autoshard.search.partition import chain_of_blocks, rank_bytes
from autoshard.search.partition.feasible import Stages


def random_model(seed):
    """Seconds of blocks, what they store, their values (block, seconds to make again, bytes) of one micro-batch, and a schedule."""
    rng = random.Random(seed)
    name = rng.choice(list(SCHEDULES))
    chunks = rng.choice([c for c in (1, 2) if c in SCHEDULES[name].chunks])
    ranks = rng.choice([1, 2, 3] if chunks == 1 else [1, 2])
    blocks = max(ranks * chunks, rng.choice([3, 4]))
    seconds = [rng.uniform(0.5, 2.0) for _ in range(blocks)]
    stored = [rng.uniform(0.0, 2.0) for _ in range(blocks)]
    values = [(k, rng.choice([0.1, 0.4, 1.0, np.inf]) * rng.uniform(0.5, 1.0), rng.uniform(0.2, 2.0)) for k in range(blocks) for _ in range(2)]
    return seconds, stored, values, make_schedule(name, ranks, rng.randint(1, 6), chunks)


def chain_with(seconds, stored, values, kept, split):
    """Forward takes a third, backward the rest and what is made again."""
    again, saved = np.zeros(len(seconds)), np.zeros(len(seconds))
    for (block, more, nbytes), keeps in zip(values, kept, strict=True):
        saved[block] += nbytes if keeps else 0.0
        again[block] += 0.0 if keeps else more
    third = np.array(seconds) / 3
    chain = chain_of_blocks(third, third + again, weight=third, stored=stored, saved=saved)
    return chain if split else chain.undivided()


def by_trying_all(model, limit):
    """The least step of all cuts and all ways to keep values or make them again that fit."""
    seconds, stored, values, table = model
    course, best = course_of(table), np.inf
    cuts = all_cuts(len(seconds), table.stages)
    for kept in itertools.product(*((True,) if np.isinf(more) else (True, False) for _, more, _ in values)):
        chain = chain_with(seconds, stored, values, kept, table.split_backward)
        fitting = cuts[(rank_bytes(chain, course, cuts) <= limit).all(1)]
        if len(fitting):
            best = min(best, float(price_by_play(chain, table)(fitting).min()))
    return best


def bound_of(model, limit):
    seconds, stored, values, table = model
    m = table.microbatches
    block, more, nbytes = (np.array(column) for column in zip(*values))
    needs = Needs(block, m * more, m * nbytes, np.zeros(len(block), dtype=bool), np.array(stored), np.zeros(len(seconds)), limit)
    whole = np.array(seconds)
    floor, course = Floor(whole / 3, whole, np.zeros(len(whole)), needs=needs if np.isfinite(limit) else None), course_of(table)
    return Stages(floor.chain(table.split_backward), course, work=floor.work(course), together=floor.together(course)).bound()


@pytest.mark.parametrize("begin", range(0, 60, 15))
def test_no_plan_that_fits_is_below_the_bound(begin):
    higher = 0
    for seed in range(begin, begin + 15):
        model = random_model(seed)
        values, stored = model[2], model[1]
        ample = bound_of(model, np.inf)
        for part in (0.3, 0.5, 0.8):
            limit = part * (sum(stored) + 2 * sum(nbytes for *_, nbytes in values)) / len(model[3].ranks)
            bound, best = bound_of(model, limit), by_trying_all(model, limit)
            assert ample * (1 - 1e-9) <= bound <= best * (1 + 1e-9), seed
            higher += np.isfinite(best) and bound > ample * 1.01
    assert higher >= 5


def test_what_is_made_again_is_the_cheapest_per_byte():
    """One stage, 4 micro-batches all in flight: 8 bytes must go, 4 of them for 1 second and 4 for 3; without it the step takes 20."""
    table = make_schedule("gpipe", 1, 4, 1)
    model = [5.0], [1.0], [(0, 0.25, 1.0), (0, 0.75, 1.0), (0, np.inf, 1.0)], table
    assert [bound_of(model, limit) for limit in (13.0, 9.0, 7.0, 5.0)] == pytest.approx([20.0, 21.0, 22.5, 24.0])
    assert by_trying_all(model, 9.0) == pytest.approx(21.0) and by_trying_all(model, 5.0) == pytest.approx(24.0)


def test_what_cannot_be_made_again_and_does_not_fit_is_too_dear():
    model = [5.0], [1.0], [(0, 0.25, 1.0), (0, np.inf, 1.0)], make_schedule("gpipe", 1, 4, 1)
    assert by_trying_all(model, 4.9) == np.inf
    assert bound_of(model, 4.9) > 10 * 20.0


def test_no_price_is_tried_where_all_of_the_model_fits():
    model = random_model(3)
    assert bound_of(model, 1e6) == bound_of(model, np.inf)


def test_sums_over_blocks():
    assert added(np.array([1.0, 2.0, 4.0]))[0, 3] == 7.0 and added(np.array([1.0, 2.0, 4.0]))[1, 2] == 2.0
    assert (np.tril(added(np.array([1.0, 2.0]))) == 0.0).all()


def test_a_model_of_which_nothing_runs_again_has_no_prices_to_try():
    needs = Needs(np.zeros(1, int), np.array([np.inf]), np.array([4.0]), np.zeros(1, bool), np.array([5.0]), np.zeros(1), limit=6.0)
    assert len(needs.worth_trying(4, 4)) == 0
