"""The table of shapes: which lie on the front of time and memory."""
from __future__ import annotations

from autoshard.base.plan import TriedShape
from autoshard.cli.shapes import on_front


def tried(mesh, step=None, memory=None):
    return TriedShape(mesh, 1, "", 1, 0.1, step, None, memory, "", False)


def test_the_front_has_what_no_planned_shape_beats_in_both():
    shapes = [tried("a", 1.0, 8), tried("b", 2.0, 4), tried("c", 2.0, 5), tried("d", 1.5, 8), tried("e", 1.0, 8), tried("f", None, 1), tried("g", 3.0, 3)]
    assert [s.mesh for s in on_front(shapes)] == ["a", "b", "e", "g"]
