from dataclasses import replace

import numpy as np
import pytest
from random_chains import all_cuts
from synthetic_pricer import Synthetic

from autoshard.errors import InfeasibleError
from autoshard.pipeline.shapes.decide import decide_pipeline
from autoshard.pipeline.shapes.meshes import Room, shapes
from autoshard.pipeline.shapes.partitions import course_of, price_by_play
from autoshard.pipeline.shapes.price import chain_from
from autoshard.search.partition import rank_bytes


def by_trying_all(pricer, found, limit):
    """Every shape, lean level and partition."""
    best = np.inf
    for shape in found:
        table = shape.table()
        for lean in range(pricer.leanest + 1):
            chain = chain_from(pricer.labels, lambda a, b: pricer.price(a, b, shape.slot, lean))
            chain = chain if table.split_backward else chain.undivided()
            cuts = all_cuts(len(pricer.labels), shape.stages)
            cuts = cuts[(rank_bytes(chain, course_of(table), cuts) <= limit).all(1)]
            best = min(best, float(price_by_play(chain, table)(cuts).min(initial=np.inf)))
    return best


@pytest.mark.parametrize("limit", [np.inf, 20.0, 9.0])
@pytest.mark.parametrize("batch", [4, 6])
def test_the_decision_equals_trying_everything(batch, limit):
    """All stages at one lean level, as the block prices have it, so no exact stage is better; the synthetic ones let each stage choose."""
    pricer = Synthetic(5)
    found = shapes(Room(devices=4, most_tp=2, batch=batch, blocks=7))
    best = by_trying_all(pricer, found, limit)
    decision = decide_pipeline(pricer, found, limit)
    assert decision.bound <= best * (1 + 1e-9)
    assert decision.seconds <= best * (1 + 1e-9)
    if limit == np.inf:
        assert decision.seconds == pytest.approx(best, rel=1e-9)
        assert decision.gap < 0.02
    assert decision.cuts[0] == 0 and decision.cuts[-1] == 7 and (np.diff(decision.cuts) > 0).all()
    assert len(decision.tried) == len(found)


def test_shapes_that_cannot_win_are_not_searched():
    pricer = Synthetic(14)
    decision = decide_pipeline(pricer, shapes(Room(devices=8, most_tp=4, batch=16, blocks=16)))
    proven = [t for t in decision.tried if t.bound >= decision.seconds * (1 - 1e-9) and t.seconds is None]
    assert len(proven) > 0.9 * len(decision.tried)
    assert decision.bound == min(min(t.bound for t in decision.tried), decision.seconds)


def test_equal_stages_are_priced_exactly_once():
    class Counting(Synthetic):
        def exact(self, first, end, *rest):
            counts.append((first, end))
            return super().exact(first, end, *rest)

    counts = []
    pricer = Counting(30, head=1.0)
    decision = decide_pipeline(pricer, shapes(Room(8, 1, 8, 32, pp=8, microbatches=8, schedules=("gpipe",))), finalists=1)
    assert len(counts) < len(decision.stages) == 8
    assert len(decision.stages) == len(decision.cuts) - 1


def test_a_memory_limit_moves_devices_from_data_to_pipeline():
    """With room for all, copies of the whole model are fastest: no transfers, no bubble. Less memory needs stages, or tensor parallelism."""
    pricer = Synthetic(14, exchange=1.0, hop=0.02)
    found = shapes(Room(devices=8, most_tp=8, batch=8, blocks=16))
    ample, tight = decide_pipeline(pricer, found), decide_pipeline(pricer, found, 20.0)
    assert (ample.shape.pp, ample.shape.slot.tp) == (1, 1)
    assert tight.shape.pp * tight.shape.slot.tp > 1
    assert tight.seconds > ample.seconds


def test_a_heavy_head_gets_fewer_layers_beside_it():
    decision = decide_pipeline(Synthetic(15, head=3.0), shapes(Room(4, 1, 32, 17, pp=4, microbatches=32, schedules=("1f1b",))))
    layers = np.diff(decision.cuts)
    assert layers[-1] < layers[0]
    assert sum(layers) == 17


def test_where_nothing_fits_it_says_so():
    with pytest.raises(InfeasibleError, match="none of .* pipelines fits .* give more devices") as caught:
        decide_pipeline(Synthetic(5), shapes(Room(2, 2, 4, 7)), 1.0)
    assert caught.value.proven


def test_candidates_whose_exact_stages_do_not_fit_are_passed_over():
    class Optimist(Synthetic):
        """Block prices that forget what is saved."""

        def price(self, *arguments):
            return replace(super().price(*arguments), saved=0.0, between=0.0)

        def exact(self, first, end, slot, in_flight, limit):
            made = super().price(first, end, slot, 1)
            return made if made.stored + in_flight * made.saved <= limit else None

    found = shapes(Room(4, 4, 8, 7))
    decision = decide_pipeline(Optimist(5), found, 10.0, finalists=len(found))
    assert max(s.stored + s.saved for s in decision.stages) <= 10.0
    with pytest.raises(InfeasibleError, match="their exact stages do not") as caught:
        decide_pipeline(Optimist(5, state=0.0, saved=100.0), found, 10.0)
    assert not caught.value.proven
