from dataclasses import fields, replace

import numpy as np
import pytest

from autoshard.pipeline.shapes.price import StagePrice, chain_from, chain_of_stages

LABELS = ("embedding", "layer", "layer", "layer", "layer", "head")
OF_LABEL = {"embedding": 1.0, "layer": 2.0, "head": 5.0}
TOGETHER = {("layer", "layer"): -0.25, ("layer", "head"): 0.5}


def price(first, end):
    """Prices that are sums of blocks and of neighbours; the peak is that of a block, or of a pair."""
    inside = list(zip(LABELS[first:end], LABELS[first + 1:end]))
    value = sum(OF_LABEL[label] for label in LABELS[first:end]) + sum(TOGETHER.get(pair, 0.0) for pair in inside)
    peak = max([OF_LABEL[label] for label in LABELS[first:end]] + [6.0 for pair in inside if pair == ("layer", "head")])
    return StagePrice(value, 2 * value, 3 * value, once=value / 10, update=value / 20, stored=10 * value, peak=peak, saved=4 * value, between=value,
                      wire_out=OF_LABEL[LABELS[end - 1]] / 100, wire_in=OF_LABEL[LABELS[first]] / 50)


def test_every_range_costs_what_it_would_if_it_were_asked_for():
    chain = chain_from(LABELS, price)
    for a in range(len(LABELS)):
        for b in range(a + 1, len(LABELS) + 1):
            whole = price(a, b)
            got = [t[a, b] for t in (chain.forward, chain.backward, chain.weight, chain.once, chain.stored, chain.peak, chain.saved, chain.between)]
            wanted = [whole.forward, whole.input, whole.weight, whole.once + whole.update, whole.stored, whole.peak, whole.saved, whole.between]
            assert got == pytest.approx(wanted), (a, b)
    assert chain.hop_forward.tolist() == [0.0, 0.01, 0.02, 0.02, 0.02, 0.02, 0.0]
    assert chain.hop_backward.tolist() == [0.0, 0.04, 0.04, 0.04, 0.04, 0.1, 0.0]


def test_equal_blocks_are_priced_once():
    asked = []
    chain_from(("first", *["layer"] * 100, "last"), lambda a, b: asked.append((a, b)) or price(1, 2))
    assert asked == [(0, 1), (1, 2), (101, 102), (0, 2), (1, 3), (100, 102)]


def test_ranges_that_are_no_stage_are_infinite():
    chain = chain_from(LABELS, price)
    assert np.isinf(chain.forward[np.tril_indices(len(LABELS) + 1)]).all()
    assert np.isfinite(chain.forward[np.triu_indices(len(LABELS) + 1, 1)]).all()


def test_a_chain_of_exact_stages_has_their_prices_and_no_other_stage():
    stages = [price(0, 2), price(2, 5), replace(price(5, 6), between=1e9)]
    chain = chain_of_stages(stages)
    assert [chain.forward[k, k + 1] for k in range(3)] == [s.forward for s in stages]
    assert np.isfinite(chain.forward).sum() == 3
    assert chain.hop_forward.tolist() == [0.0, stages[0].wire_out, stages[1].wire_out, 0.0]
    assert chain.between[2, 3] == 1e9  # what backward recomputes waits for the weight part, and was not saved


def test_every_field_of_a_price_is_used():
    """A price with one field larger makes another chain, or another second of a micro-batch."""
    base = StagePrice(*[1.0] * len(fields(StagePrice)))
    for f in fields(StagePrice):
        larger = replace(base, **{f.name: 0.5})
        one, other = (chain_of_stages([base, made, base]) for made in (base, larger))
        assert any((getattr(one, name) != getattr(other, name)).any() for name in vars(one) if isinstance(getattr(one, name), np.ndarray)), f.name
