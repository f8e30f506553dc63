import pytest

from autoshard.errors import MeshError
from autoshard.pipeline.shapes.meshes import MOST_ROUNDS, Room, shapes


def test_every_factoring_divides_devices_and_batch():
    everything = shapes(Room(devices=16, most_tp=8, batch=24, blocks=10))
    found = [s for s in everything if s.pp > 1 or s.microbatches > 1]  # the batch as one, without stages, is below
    assert {(s.pp, s.slot.dp, s.slot.tp) for s in found} == {
        (pp, 16 // pp // tp, tp) for pp in (1, 2, 4, 8) for tp in (1, 2, 4, 8, 16) if pp * tp <= 16 and tp <= (8 if pp > 1 else 16)
        and 24 % (16 // pp // tp) == 0}
    for s in found:
        assert s.pp * s.slot.dp * s.slot.tp == 16
        assert s.microbatches * s.slot.rows == 24
        assert s.slot.rows % s.slot.dp == 0
        assert s.stages <= 10
        assert s.microbatches <= MOST_ROUNDS * s.pp
    assert len(set(everything)) == len(everything)


def test_a_tensor_axis_stays_within_what_is_allowed_unless_it_is_fixed():
    assert max(s.slot.tp for s in shapes(Room(16, 4, 16, 8)) if s.pp > 1) == 4
    assert {s.slot.tp for s in shapes(Room(16, 4, 16, 8, tp=16))} == {16}


def test_what_is_fixed_stays():
    found = shapes(Room(8, 8, 16, 12, pp=4, dp=2, microbatches=8, schedules=("1f1b", "zbv")))
    assert {(s.pp, s.slot.dp, s.slot.tp, s.microbatches) for s in found} == {(4, 2, 1, 8)}
    assert {(s.schedule, s.chunks, s.warmup) for s in found} == {("1f1b", 1, 0), ("1f1b", 1, 3), ("zbv", 2, 0)}


def test_one_stage_has_one_schedule():
    assert {s.schedule for s in shapes(Room(4, 4, 8, 8, pp=1))} == {"1f1b"}


def test_tables_have_the_shape():
    for s in shapes(Room(4, 2, 8, 8)):
        table = s.table()
        assert (len(table.ranks), table.stages, table.microbatches) == (s.pp, s.stages, s.microbatches)


@pytest.mark.parametrize("room", [Room(8, 8, 3, 10, pp=4, dp=2), Room(8, 8, 8, 2, pp=4), Room(8, 8, 8, 20, pp=3)])
def test_where_nothing_divides_it_says_what_to_change(room):
    with pytest.raises(MeshError, match="no pipeline of 8 devices divides .* change"):
        shapes(room)


def of_one_stage(devices, **room):
    """(dp, mp, tp) of the shapes without stages."""
    found = shapes(Room(devices, 2, 6, 8, pp=1, microbatches=1, **room))
    assert all(s.slot.ranks == devices for s in found)
    return [(s.slot.dp, s.slot.mp, s.slot.tp) for s in found]


def test_without_stages_there_is_every_mesh_of_so_many_axes_once():
    """Whatever the rows and the node: an axis may split other dims, and may reach over nodes."""
    two = {(8, 1, 1), (4, 1, 2), (2, 1, 4)}
    assert sorted(of_one_stage(8)) == sorted(two)
    assert sorted(of_one_stage(8, axes=3)) == sorted({*two, (2, 2, 2)})
    assert len(of_one_stage(64, axes=3)) == 6 + 10 and len(of_one_stage(64)) == 6


def test_micro_batches_split_evenly_over_dp():
    found = shapes(Room(8, 2, 6, 8, pp=1, axes=3))
    assert all(s.slot.rows % s.slot.dp == 0 for s in found if s.microbatches > 1)
    assert {(s.slot.dp, s.slot.tp) for s in found if s.microbatches == 2} == {(1, 8)}
    assert {(s.slot.dp, s.slot.mp, s.slot.tp) for s in found if s.microbatches == 3} == {(1, 1, 8), (2, 1, 4), (2, 2, 2)}
