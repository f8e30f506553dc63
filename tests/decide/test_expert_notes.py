"""Experts that a mesh axis has too many ranks for, or another number than divides: the plan says what it does instead."""
import pytest

import autoshard
from tests.support.experts import build

pytest.importorskip("transformers")


@pytest.mark.parametrize(("experts", "mesh", "said"), [
    (4, "ep=8", ("4 experts cannot be spread evenly over the 8 ranks of mesh axis 'ep'",)),
    (7, "dp=2,ep=7", ("7 experts cannot be spread evenly over the 2 ranks of mesh axis 'dp'",)),
    (4, "ep=2", ()),
])
def test_experts_that_do_not_divide_are_named(experts: int, mesh: str, said: tuple[str, ...]) -> None:
    model, (ids,) = build("exact", batch=8, experts=experts)
    plan = autoshard.plan(model, mesh, (), {"input_ids": ids, "labels": ids}, cluster="cpu-gloo", time_limit=2)
    notes = [note for note in plan.notes if "experts cannot be spread" in note]
    assert len(notes) == len(said) and all(note.startswith(text) and "and 1 more" in note for note, text in zip(notes, said, strict=True)), plan.notes
