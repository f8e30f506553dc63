"""The collector during a search: what was there is left alone, and everything is as before afterwards."""
from __future__ import annotations

import gc
from weakref import ref

import pytest

from autoshard.decide.phase_timer import PhaseTimer
from autoshard.search.heap import settled_heap


def test_what_existed_is_not_looked_through_during_a_search():
    before = gc.get_threshold()
    with pytest.raises(KeyError), settled_heap():
        assert gc.isenabled() and gc.get_freeze_count() > 1000
        raise KeyError
    assert gc.get_freeze_count() == 0 and gc.get_threshold() == before


def test_objects_that_the_caller_froze_stay_frozen():
    gc.freeze()
    try:
        with settled_heap():
            assert gc.get_freeze_count() > 0
        assert gc.get_freeze_count() > 0
    finally:
        gc.unfreeze()


def test_every_phase_of_planning_leaves_the_heap_before_it_alone():
    before = gc.get_threshold()
    with PhaseTimer()("trace"):
        assert gc.get_freeze_count() > 1000
    assert gc.get_freeze_count() == 0 and gc.get_threshold() == before


def test_what_a_short_search_leaves_is_collected():
    class Table:
        pass

    with settled_heap(tidy=True):
        one, other = Table(), Table()
        one.transpose, other.transpose = other, one
        seen = ref(one)
        del one, other
    assert seen() is None and gc.get_freeze_count() == 0
