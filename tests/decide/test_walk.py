"""A walk decides unit after unit by the least score, each with those before it decided."""
from __future__ import annotations

import numpy as np
import pytest
from steering import formulation_of, traced

from autoshard.base.graph import Ref
from autoshard.decide.walks.reads import Wiring
from autoshard.decide.walks.walk import Placed, least, ranked, walk


@pytest.fixture(scope="module")
def wiring() -> Wiring:
    return Wiring(formulation_of(traced("mlp"), "d=2"))


def test_the_first_number_of_a_score_comes_first_and_the_first_strategy_of_equal_ones():
    assert least((np.array([1.0, 0.0, 0.0]), np.array([0.0, 2.0, 1.0]))) == 2
    assert least((np.array([1.0, np.inf, 1.0]),)) == 0
    assert least((np.full(3, np.inf),)) == 0


def test_what_comes_later_sees_what_was_decided(wiring):
    """Forward in program order, every unit as its last strategy; then again, as its first."""
    count = len(wiring.formulation.units.units)
    seen = []

    def way(placed: Placed):
        for strategy in (-1, 0):
            for n in range(count):
                seen.append([placed.source(read) is None for read in wiring.reads[n]])
                yield n, lambda n, s=strategy: (np.arange(len(wiring.unit(n))) != s % len(wiring.unit(n)),)

    assert walk(wiring, way).tolist() == [0] * count
    assert not any(map(any, seen[count:])), "everything is decided the second time"


def test_seconds_count_only_what_is_decided(wiring):
    placed = Placed(wiring)
    reader = next(n for n, reads in enumerate(wiring.reads) if len(reads) == 2)
    zero = np.zeros(len(wiring.unit(reader)))
    assert np.array_equal(placed.moved(reader, zero), zero)
    first = wiring.reads[reader][0]
    placed.strategy[first.maker] = 0
    source, targets = wiring.sources(first).specs[wiring.sources(first).index[0]], wiring.targets(first)
    wanted = [wiring.formulation.table.seconds(first.value, source, targets.specs[i])
              if wiring.possible(first, source, targets.specs[i]) else np.inf for i in targets.index]
    assert placed.moved(reader, zero) == pytest.approx(np.array(wanted))


def test_a_gradient_is_tied_to_its_parameter(wiring):
    units = wiring.formulation.units
    n, param = next((n, p) for n, p in wiring.ties.items() if wiring.op(n).kind == "output")
    specs = units.outputs(Ref(wiring.op(param).name))
    for strategy in range(len(wiring.unit(param))):
        taken = least(Placed(wiring, {param: strategy}).tied(n))
        mine = units.inputs(wiring.op(n).name, 0)
        assert mine.specs[mine.index[taken]] == specs.specs[specs.index[strategy]]


def test_ranked_is_per_strategy(wiring):
    specs = wiring.formulation.units.outputs(Ref(wiring.formulation.table.graph.of_kind("param")[0].name))
    assert ranked(specs, lambda s: s.count(-1)).tolist() == [specs.specs[i].count(-1) for i in specs.index]
