from dataclasses import replace
from itertools import pairwise
from typing import ClassVar

import numpy as np
import pytest
from random_chains import all_cuts
from synthetic_pricer import Synthetic

from autoshard.base.plan import NOT_FOUND
from autoshard.errors import InfeasibleError
from autoshard.pipeline.shapes.decide import LOOKS, TOLERANCE, ranked, try_shapes
from autoshard.pipeline.shapes.meshes import Room, shapes
from autoshard.pipeline.shapes.partitions import course_of, price_by_play
from autoshard.pipeline.shapes.price import chain_from
from autoshard.search.partition import rank_bytes


def by_trying_all(pricer, shape, limit):
    """Every partition, at the first lean level at which one fits."""
    table = shape.table()
    for lean in range(pricer.corners()[-1] + 1):
        chain = chain_from(pricer.labels, lambda a, b: pricer.price(a, b, shape.slot, lean, table.split_backward))
        chain = chain if table.split_backward else chain.undivided()
        cuts = all_cuts(len(pricer.labels), shape.stages)
        cuts = cuts[(rank_bytes(chain, course_of(table), cuts) <= limit).all(1)]
        if len(cuts):
            return float(price_by_play(chain, table)(cuts).min())
    return np.inf


@pytest.mark.parametrize("limit", [np.inf, 20.0, 9.0])
@pytest.mark.parametrize("batch", [4, 6])
def test_the_best_shape_equals_trying_everything(batch, limit):
    pricer = Synthetic(5, limit=limit, batch=batch)
    found = shapes(Room(devices=4, most_tp=2, batch=batch, blocks=7))
    prices = {shape: by_trying_all(pricer, shape, limit) for shape in found}
    tried = try_shapes(pricer, found, limit)
    assert {t.shape for t in tried} == set(found)
    best = ranked(tried)[0]
    assert min(prices.values()) <= best.seconds <= min(prices.values()) / (1 - TOLERANCE)
    assert best.cuts[0] == 0 and best.cuts[-1] == 7 and (np.diff(best.cuts) > 0).all()
    for t in tried:
        assert t.bound <= prices[t.shape] * (1 + 1e-9)
        if t.cuts:
            assert t.seconds == pytest.approx(prices[t.shape], rel=1e-9)
            assert t.memory <= limit
        elif t.seconds is not None:  # what was found of it is not near the best
            assert t.seconds <= prices[t.shape] * (1 + 1e-9)


def test_shapes_that_cannot_win_are_not_searched():
    pricer = Synthetic(14)
    tried = try_shapes(pricer, shapes(Room(devices=8, most_tp=4, batch=16, blocks=16)))
    best = ranked(tried)[0].seconds
    passed_over = [t for t in tried if t.seconds is None]
    assert len(passed_over) > 0.3 * len(tried)
    assert all(t.bound >= best * (1 - TOLERANCE) and "bound" in t.why for t in passed_over)
    assert {slot for _, _, slot, _ in pricer.asked} < {t.shape.slot for t in tried}


def test_dear_looks_are_for_shapes_that_cheap_ones_leave():
    class Looking(Synthetic):
        looks: ClassVar[list] = []

        def floor(self, slot, look):
            self.looks.append((slot, look))
            return super().floor(slot, look)

    pricer = Looking(5)
    try_shapes(pricer, shapes(Room(devices=4, most_tp=2, batch=6, blocks=7)), 9.0)
    looked = [{slot for slot, look in pricer.looks if look == n} for n in range(1, LOOKS + 1)]
    assert all(more >= fewer for more, fewer in pairwise(looked)) and looked[0] > looked[-1] > set()


def test_ends_are_priced_where_the_main_blocks_are_near_the_best():
    """Of most slots one block is priced, and no slot is priced leaner where the blocks at the level before are too slow already."""
    pricer = Synthetic(8, state=1.0, saved=2.0, batch=32)
    tried = try_shapes(pricer, shapes(Room(devices=8, most_tp=4, batch=32, blocks=10)), 8.0)
    alone, whole = ({slot for first, end, slot, _ in pricer.asked if (end == 10) == ends} for ends in (False, True))
    assert whole < alone and {t.shape.slot for t in tried if t.cuts} <= whole
    assert {slot for *_, slot, lean in pricer.asked if lean} < alone


def test_what_a_byte_costs_leaves_lean_levels_unsearched():
    class Dear(Synthetic):
        """A third level, of fewer bytes, and seconds for those that the second saves."""

        cost = 0.0

        def corners(self):
            return (0, 1, 2)

        def price(self, first, end, slot, lean, split):
            found = super().price(first, end, slot, min(lean, 1), split)
            return replace(found, input=2 * found.input, saved=0.5 * found.saved, stored=0.5 * found.stored) if lean == 2 else found

        def rate(self, tried):
            return self.cost * (tried.lean > 0)

    found = shapes(Room(devices=8, most_tp=2, batch=32, blocks=9))
    free, dear = Dear(7, state=1.0, saved=2.0), Dear(7, state=1.0, saved=2.0)
    dear.cost = 10.0
    tried = [try_shapes(pricer, found, 2.7) for pricer in (free, dear)]
    assert len(dear.asked) < len(free.asked)
    assert ranked(tried[1])[0].seconds == ranked(tried[0])[0].seconds


def test_bounds_that_know_memory_leave_fewer_shapes_to_search():
    """Shapes that are fast in ample memory and must compute again in theirs."""
    found = shapes(Room(devices=8, most_tp=2, batch=32, blocks=9))
    blind, seeing = (try_shapes(Synthetic(7, limit=known, batch=32, state=1.0, saved=2.0), found, 7.0) for known in (np.inf, 7.0))
    searched = [sum("says enough" not in t.why for t in tried) for tried in (blind, seeing)]
    assert searched[1] < searched[0]
    assert ranked(seeing)[0].seconds <= ranked(blind)[0].seconds / (1 - TOLERANCE)
    ample, little = ({t.shape: t.bound for t in tried} for tried in (blind, seeing))
    assert any(little[shape] > ample[shape] for shape in ample)


def test_a_larger_tolerance_searches_fewer_shapes():
    """What is found is within it of the best, and bounds still hold."""
    found = shapes(Room(devices=8, most_tp=4, batch=16, blocks=16))
    close, loose = (try_shapes(Synthetic(5), found, 20.0, tolerance=part) for part in (TOLERANCE, 0.3))
    looked_at = [sum("says enough" not in t.why for t in tried) for tried in (close, loose)]
    assert looked_at[1] < 0.5 * looked_at[0]
    best = ranked(close)[0].seconds
    assert best <= ranked(loose)[0].seconds <= best / (1 - 0.3)
    assert min(t.bound for t in loose) <= best


def test_a_memory_limit_moves_devices_from_data_to_pipeline():
    """With room for all, copies of the whole model are fastest: no transfers, no bubble. Less memory needs stages, or tensor parallelism."""
    pricer = Synthetic(14, exchange=1.0, hop=0.02)
    found = shapes(Room(devices=8, most_tp=8, batch=8, blocks=16))
    ample, tight = (ranked(try_shapes(pricer, found, limit))[0] for limit in (np.inf, 20.0))
    assert (ample.shape.pp, ample.shape.slot.tp) == (1, 1)
    assert tight.shape.pp * tight.shape.slot.tp > 1
    assert tight.seconds > ample.seconds


def test_a_heavy_head_gets_fewer_layers_beside_it():
    shape, = shapes(Room(4, 1, 32, 17, pp=4, microbatches=32, schedules=("1f1b",), warmups=False))
    layers = np.diff(try_shapes(Synthetic(15, head=3.0), [shape])[0].cuts)
    assert layers[-1] < layers[0]
    assert sum(layers) == 17


def test_a_shape_that_does_not_fit_says_so():
    tried = try_shapes(Synthetic(5), shapes(Room(2, 2, 4, 7)), 1.0)
    assert not ranked(tried)
    assert {t.why for t in tried} == {NOT_FOUND}

    class Fat(Synthetic):
        def price(self, first, end, slot, lean, split):
            if lean:
                raise InfeasibleError("a stage of blocks 0 to 1 needs 7 bytes")
            return super().price(first, end, slot, lean, split)

    assert {t.why for t in try_shapes(Fat(5), shapes(Room(2, 2, 4, 7)), 1.0)} == {f"{NOT_FOUND}: a stage of blocks 0 to 1 needs 7 bytes"}
