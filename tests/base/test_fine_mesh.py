"""Axes in parts: names, labels and placements, there and back."""
from __future__ import annotations

from itertools import product

import pytest

from autoshard.base.fine_mesh import parse_parts, refined
from autoshard.base.mesh import parse_mesh
from autoshard.base.spec import INNER, R, ShardingSpec, nestings, shard_offset
from autoshard.errors import MeshError

USERS = parse_mesh("dp=2,tp=8")
FINE = refined(USERS, {"tp": (4, 2)})


def test_parts_are_named_by_what_they_are_of_a_coordinate():
    assert (FINE.names, FINE.sizes, str(FINE)) == (("dp", "tp//2", "tp%2"), (2, 4, 2), "dp=2,tp=4x2")
    deep = refined(USERS, {"tp": (2, 2, 2)})
    assert deep.names == ("dp", "tp//4", "tp//2%2", "tp%2")
    for rank in range(16):
        (_, c), found = USERS.coordinates(rank), deep.coordinates(rank)
        assert found[1:] == (c // 4, c // 2 % 2, c % 2)
        assert FINE.coordinates(rank)[1:] == (c // 2, c % 2)


def test_all_parts_taken_as_one_go_by_the_name_of_the_axis():
    labels = {axes: FINE.label(axes) for axes in ((0,), (1,), (2,), (1, 2), (0, 1), (0, 1, 2))}
    assert list(labels.values()) == ["dp", "tp//2", "tp%2", "tp", "dp+tp//2", "dp+tp"]
    assert all(FINE.axes(label) == axes for axes, label in labels.items())
    with pytest.raises(MeshError, match="no mesh axis 'pt'; the axes are dp, tp, tp//2, tp%2"):
        FINE.axes("pt")


def test_placements_of_the_users_axes_and_back():
    for spec in product((R, 0, 1), repeat=2):
        assert FINE.as_whole(FINE.as_parts(spec)) == spec
    assert FINE.as_whole((R, 0, R)) is None and FINE.as_whole((R, 0, 1)) is None
    assert USERS.as_whole((0, 1)) == USERS.as_parts((0, 1)) == (0, 1) and USERS.whole is USERS


def test_a_placement_of_all_parts_has_the_pieces_of_the_axis_in_every_nesting():
    for spec in ((0, 0), *nestings((0, 0), USERS.sizes), (R, 0), (1, 0)):
        for rank in range(16):
            mine = shard_offset(0, FINE.as_parts(spec), FINE.sizes, FINE.coordinates(rank))
            assert mine == shard_offset(0, spec, USERS.sizes, USERS.coordinates(rank)), spec
    assert FINE.as_parts((INNER, 0)) == (INNER, 0, 0)


@pytest.mark.parametrize("spec, text", [((R, 0, 0), "[tp, -]"), ((0, 0, 0), "[(dp*tp), -]"), ((1, 0, R), "[tp//2, dp]"), ((R, 1, 0), "[tp%2, tp//2]")])
def test_layouts_in_words(spec, text):
    shown = ShardingSpec.from_spec(spec, 2, FINE)
    assert str(shown) == text and shown.to_spec(FINE) == spec


def test_a_sum_of_parts_over_the_whole_axis():
    shown = ShardingSpec.from_spec((R, -2, -2), 1, FINE)
    assert shown.partial == (("tp", "sum"),) and shown.to_spec(FINE) == (R, -2, -2)


@pytest.mark.parametrize("text, words", [("tp=3x2", "multiply to 8, such as tp=4x2"), ("tp=8x1", "at least 2"), ("pp=4x2", "no mesh axis 'pp'")])
def test_parts_that_an_axis_cannot_have(text, words):
    with pytest.raises(MeshError, match=words):
        refined(USERS, parse_parts(text))


@pytest.mark.parametrize("text", ["tp", "tp=8", "tp=4*2", "tp=4x2,tp=2x4", "yes", ""])
def test_text_that_says_no_parts(text):
    with pytest.raises(MeshError, match="write auto, never, or the parts of each axis once, as tp=4x2"):
        parse_parts(text)


def test_the_links_of_an_axis_are_those_of_its_parts_together():
    from autoshard.cost.cluster import load_cluster

    cluster, wide = load_cluster("h100-dgx"), parse_mesh("dp=2,tp=16")
    for parts in ((8, 2), (2, 8), (4, 4)):
        fine = refined(wide, {"tp": parts})
        assert cluster.link_of(fine, (1, 2)) == cluster.link_of(wide, (1,)), parts
