"""The order of sweeps."""
from __future__ import annotations

import numpy as np

from autoshard.search import Edge, Problem
from autoshard.search.dual.packed import along, pack
from autoshard.search.reductions.core import build


def test_sweeps_go_along_a_chain_from_an_end_whatever_its_numbers():
    numbers, every = [3, 0, 5, 1, 4, 2], np.arange(2)
    edges = tuple(Edge(u, v, np.array([[0.0, 1.0], [2.0, 4.0]]), every, every) for u, v in zip(numbers, numbers[1:], strict=False))
    core = build(Problem((np.array([1.0, 2.0]),) * 8, edges))[0]  # nodes 6 and 7 stand alone
    order = along(core)
    assert order[:-2] in (numbers, numbers[::-1])
    assert sorted(order) == core.alive == list(range(8))
    packed, nodes, _ = pack(core, order)
    assert nodes.tolist() == order and len(packed.cost) == sum(len(core.cost[v]) for v in order)


def test_nothing_is_in_no_order():
    assert along(build(Problem(()))[0]) == []
