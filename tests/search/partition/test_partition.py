import numpy as np
import pytest
from random_chains import all_cuts, by_trying_all, random_case

from autoshard.pipeline.schedules import make_schedule
from autoshard.pipeline.shapes.partitions import course_of, price_by_play
from autoshard.search.partition import bounds, chain_of_blocks, partition, rank_bytes
from autoshard.search.partition.enumerate import within
from autoshard.search.partition.feasible import Stages


@pytest.mark.parametrize("seed", range(40))
def test_the_best_partition_equals_trying_all(seed):
    """All 1,000 of `benchmarks/search/partition.py` in a few seconds there; here the first."""
    case = random_case(seed)
    best, limits, prices = by_trying_all(case)
    assert (limits <= prices * (1 + 1e-12)).all()
    found = partition(case.chain, case.course, price_by_play(case.chain, case.table))
    assert found.seconds == pytest.approx(best, rel=1e-9)
    assert found.bound <= best * (1 + 1e-12)
    assert found.gap <= 1e-8


@pytest.mark.parametrize("seed", range(40))
def test_the_best_partition_within_a_memory_limit_equals_trying_all(seed):
    case = random_case(seed)
    least = rank_bytes(case.chain, case.course, all_cuts(case.chain.blocks, case.table.stages)).max(1)
    limit = np.random.default_rng(seed).uniform(0.95 * least.min(), np.median(least) * 1.01)
    best, _, _ = by_trying_all(case, limit)
    found = partition(case.chain, case.course, price_by_play(case.chain, case.table), limit)
    assert found.seconds == pytest.approx(best, rel=1e-9)
    assert found.bound <= best * (1 + 1e-12)
    assert bool(found.cuts) == bool(np.isfinite(best))


@pytest.mark.parametrize("ranks, microbatches", [(1, 1), (2, 3), (4, 8), (8, 32)])
def test_the_bound_of_equal_stages_is_reached(ranks, microbatches):
    """(M + S - 1) t, with 1F1B and without transfers."""
    chain = chain_of_blocks([1.0] * 16, [2.0] * 16)
    table = make_schedule("1f1b", ranks, microbatches)
    found = partition(chain, course_of(table), price_by_play(chain, table))
    assert found.seconds == (microbatches + ranks - 1) * 3 * 16 / ranks
    assert found.bound == pytest.approx(found.seconds, rel=1e-8)


def test_a_heavy_head_takes_blocks_from_the_last_stage():
    """Twelve equal blocks and a head of three: equal numbers of blocks are no equal stages."""
    chain = chain_of_blocks([1.0] * 12 + [3.0], [2.0] * 12 + [6.0])
    table = make_schedule("1f1b", 4, 32)
    price = price_by_play(chain, table)
    found = partition(chain, course_of(table), price)
    assert np.diff(found.cuts)[-1] == 1
    assert price(np.array([[0, 3, 6, 9, 13]]))[0] > 1.3 * found.seconds


def test_memory_moves_blocks_off_the_stage_that_holds_most():
    """The first of four stages of 1F1B holds four micro-batches, the last one; with room for two blocks' worth of four it gets fewer."""
    chain = chain_of_blocks([1.0] * 8, [2.0] * 8, saved=[1.0] * 8)
    table = make_schedule("1f1b", 4, 16)
    price = price_by_play(chain, table)
    assert partition(chain, course_of(table), price, 8.0).cuts == (0, 2, 4, 6, 8)
    tight = partition(chain, course_of(table), price, 6.0)
    assert tight.cuts[1] == 1
    assert rank_bytes(chain, course_of(table), np.array([tight.cuts])).max() <= 6.0
    nothing = partition(chain, course_of(table), price, 3.0)
    assert (nothing.cuts, nothing.seconds, nothing.bound) == ((), np.inf, np.inf)


def test_ranks_that_are_too_full_together_are_no_way_to_fit():
    """Never said where some partition fits, and most of the time where none does and the ranks are about equally full."""
    said = 0
    for seed in range(100):
        case = random_case(seed)
        fullest = rank_bytes(case.chain, case.course, all_cuts(case.chain.blocks, case.table.stages)).max(1).min()
        assert not Stages(case.chain, case.course, float(fullest)).too_full
        assert not Stages(case.chain, case.course).too_full
        said += Stages(case.chain, case.course, 0.6 * float(fullest)).too_full
    assert said >= 60


@pytest.mark.parametrize("seed", range(10))
def test_levels_hold_every_partition_with_a_lower_bound(seed):
    case = random_case(seed)
    cuts = all_cuts(case.chain.blocks, case.table.stages)
    limits = bounds(case.chain, case.course, cuts)
    stages = Stages(case.chain, case.course)
    assert stages.bound() <= limits.min() * (1 + 1e-9)
    for limit in np.quantile(limits, [0.0, 0.3, 1.0]):
        assert set(map(tuple, cuts[limits <= limit].tolist())) <= set(map(tuple, within(stages, float(limit) * (1 + 1e-9), 10_000).cuts.tolist()))


def test_a_search_that_is_cut_short_keeps_a_valid_bound():
    rng = np.random.default_rng(0)
    chain = chain_of_blocks(rng.uniform(0.9, 1.1, 40), rng.uniform(1.9, 2.1, 40))
    table = make_schedule("1f1b", 8, 16)
    price = price_by_play(chain, table)
    short, long = (partition(chain, course_of(table), price, most=most) for most in (10, 3000))
    assert short.bound <= long.bound <= long.seconds <= short.seconds
    assert short.gap < 0.05


@pytest.mark.parametrize("seed", range(10))
def test_a_cutoff_ends_the_search_with_a_bound_that_says_so(seed):
    case = random_case(seed)
    best, _, _ = by_trying_all(case)
    price = price_by_play(case.chain, case.table)
    below = partition(case.chain, case.course, price, cutoff=0.99 * best)
    assert (below.cuts, below.seconds) == ((), np.inf)
    assert 0.99 * best * (1 - 1e-9) <= below.bound <= best * (1 + 1e-12)
    assert partition(case.chain, case.course, price, cutoff=1.01 * best).seconds == pytest.approx(best, rel=1e-9)


def test_formulas_without_a_player_choose_worse():
    """sum t + (M - 1) max t and the largest stage, taken for the truth: the partition of each is dearer than the best on some chains."""
    worse = {"sum and max": 0.0, "max": 0.0}
    for seed in range(200):
        case = random_case(seed)
        if case.name != "1f1b":
            continue
        best, _, prices = by_trying_all(case)
        cuts = all_cuts(case.chain.blocks, case.table.stages)
        t = case.chain.both[cuts[:, :-1], cuts[:, 1:]]
        formulas = {"sum and max": t.sum(1) + (case.table.microbatches - 1) * t.max(1), "max": t.max(1)}
        for name, value in formulas.items():
            worse[name] = max(worse[name], prices[value.argmin()] / best - 1)
    assert min(worse.values()) > 0.01


def test_the_examples_of_the_bound():
    """Two stages, four micro-batches, 1F1B: the figures of docs/pipeline.md."""
    table = make_schedule("1f1b", 2, 4)
    for first, seconds in ((1.0, 10.0), (1.5, 13.0)):
        chain = chain_of_blocks([first, 1.0], [first, 1.0])
        cuts = np.array([[0, 1, 2]])
        assert bounds(chain, course_of(table), cuts).tolist() == [seconds]
        assert price_by_play(chain, table)(cuts).tolist() == [seconds]
