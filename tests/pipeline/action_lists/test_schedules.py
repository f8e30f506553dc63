import pytest
from torch_schedules import torch_rows

from autoshard.decide import pipeline_options
from autoshard.errors import ScheduleError
from autoshard.pipeline.action_lists.action_text import text_of
from autoshard.pipeline.action_lists.check import check
from autoshard.pipeline.action_lists.play import held
from autoshard.pipeline.action_lists.transfers import with_transfers
from autoshard.pipeline.schedules import SCHEDULES, make_schedule

CASES = [("interleaved", v) for v in (2, 3, 4)] + [("zb1p", v) for v in (1, 2, 3, 4)] + [("zbv", 2)]


@pytest.mark.parametrize("ranks", range(2, 9))
@pytest.mark.parametrize("name, chunks", CASES)
def test_lists_equal_those_of_torch(name, chunks, ranks):
    """Wherever torch makes one: fewer micro-batches than ranks, and numbers that are no multiple, among them."""
    compared = 0
    for microbatches in (1, 2, ranks - 1, ranks, ranks + 1, 2 * ranks - 1, 2 * ranks, 2 * ranks + 2, 3 * ranks, 5 * ranks, 6 * ranks):
        try:
            wanted = torch_rows(name, ranks, chunks, microbatches)
        except ValueError:
            continue  # not a multiple of torch's rounds
        table = make_schedule(name, ranks, microbatches, chunks)
        assert [list(map(text_of, actions)) for actions in table.ranks] == wanted, microbatches
        compared += 1
    assert compared >= 5


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_every_number_of_micro_batches_makes_a_whole_step_that_ends(name, ranks):
    """`check` finds a lost layer or micro-batch, and a run that never ends; see test_check."""
    family = SCHEDULES[name]
    for microbatches in (1, 2, 3, 4, 6, 7, 11, 13):
        for chunks in (c for c in (1, 2, 3) if c in family.chunks):
            for warmup in (0, 1, ranks) if family.takes_warmup else (0,):
                table = make_schedule(name, ranks, microbatches, chunks, warmup)
                assert (len(table.ranks), table.stages, table.microbatches) == (ranks, ranks * chunks, microbatches)
                assert table.split_backward == family.split_backward
                check(table)
                check(with_transfers(table))


@pytest.mark.parametrize("name, ranks, microbatches, chunks, most", [
    ("gpipe", 4, 8, 1, [8, 8, 8, 8]),
    ("1f1b", 4, 8, 1, [4, 3, 2, 1]),
    ("1f1b", 4, 2, 1, [2, 2, 2, 1]),
    ("interleaved", 4, 8, 2, [11 / 2, 9 / 2, 7 / 2, 5 / 2]),
    ("interleaved", 4, 8, 4, [19 / 4, 17 / 4, 15 / 4, 13 / 4]),
    ("zb1p", 4, 8, 1, [4, 4, 4, 4]),
    ("zb2p", 4, 8, 1, [7, 7, 7, 7]),
    ("zbv", 4, 8, 2, [4, 4, 4, 4]),
])
def test_micro_batches_held_at_once(name, ranks, microbatches, chunks, most):
    table = make_schedule(name, ranks, microbatches, chunks)
    assert held(table, [1 / chunks] * table.stages).tolist() == most


def test_more_warm_up_holds_up_to_twice_as_much():
    assert held(make_schedule("1f1b", 4, 16, warmup=1), [1] * 4).tolist() == [5, 4, 3, 1]
    assert held(make_schedule("1f1b", 4, 16, warmup=3), [1] * 4).tolist() == [7, 5, 3, 1]
    assert make_schedule("1f1b", 4, 16, warmup=9) == make_schedule("1f1b", 4, 16, warmup=3)


@pytest.mark.parametrize("worker", range(4))
def test_zero_bubble_holds_the_published_bytes(worker):
    """Worker i = 1..p of ZB-H1 holds (p - i + 1) M_B + (i - 1) M_W."""
    for b, w in ((5.0, 3.0), (4.0, 1.0), (1.0, 1.0)):
        assert held(make_schedule("zb1p", 4, 8), [b] * 4, [w] * 4)[worker] == (4 - worker) * b + worker * w


@pytest.mark.parametrize("arguments, message", [
    (("2f2b", 4, 8), "no schedule '2f2b'; there are gpipe, 1f1b"),
    (("gpipe", 4, 8, 2), "'gpipe' has 1 stage on a rank, not 2; with 2 there are interleaved, zb1p, zbv"),
    (("interleaved", 4, 8, 1), "2 stages or more"),
    (("zbv", 4, 8, 3), "2 stages on a rank"),
    (("zbv", 4, 8, 2, 1), "no warm-up to choose; 1f1b has"),
    (("1f1b", 0, 8), "at least 1 rank, not 0"),
    (("1f1b", 4, 0), "at least 1 micro-batch, not 0"),
    (("1f1b", 4, 8, 1, -1), "not -1"),
])
def test_other_numbers_are_refused(arguments, message):
    with pytest.raises(ScheduleError, match=message):
        make_schedule(*arguments)


def test_the_names_that_options_take_are_those_there_are():
    assert pipeline_options.SCHEDULES == (pipeline_options.AUTO, *SCHEDULES)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_micro_batches_in_flight_are_those_that_a_stage_holds(schedule):
    for chunks in SCHEDULES[schedule].chunks[:3]:
        table = make_schedule(schedule, 3, 7, chunks)
        for stage, rank in enumerate(table.rank_of):
            assert table.in_flight[stage] == held(table, [float(s == stage) for s in range(table.stages)])[rank]
