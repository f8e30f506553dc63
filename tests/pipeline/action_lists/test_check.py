"""Every fault that the check is there for, planted in a table that is right."""
from dataclasses import replace

import pytest

from autoshard.errors import ScheduleError
from autoshard.pipeline.action_lists.action_text import action_of, table_of, text_of
from autoshard.pipeline.action_lists.check import check
from autoshard.pipeline.action_lists.network import network_of
from autoshard.pipeline.action_lists.transfers import with_transfers
from autoshard.pipeline.schedules import make_schedule


def texts(table):
    return [[text_of(a) for a in actions] for actions in table.ranks]


def swapped(table, rank, one, other):
    rows = texts(table)
    i, j = rows[rank].index(one), rows[rank].index(other)
    rows[rank][i], rows[rank][j] = other, one
    return replace(table, ranks=table_of(rows).ranks)


def without(table, rank, text):
    ranks = list(table.ranks)
    ranks[rank] = tuple(a for a in ranks[rank] if a != action_of(text))
    return replace(table, ranks=tuple(ranks))


@pytest.mark.parametrize("rank, text, message", [
    (1, "1F2", "B of stage 1, micro-batch 2"), (2, "2B0", "F of stage 2, micro-batch 0"), (0, "0B5", "F of stage 0, micro-batch 5"),
])
def test_a_lost_action_is_named(rank, text, message):
    with pytest.raises(ScheduleError, match=message):
        check(without(make_schedule("1f1b", 3, 6), rank, text))


def test_an_action_that_is_there_twice_is_named():
    table = make_schedule("gpipe", 2, 3)
    with pytest.raises(ScheduleError, match="1F2 2 times"):
        check(replace(table, ranks=(table.ranks[0], (*table.ranks[1], action_of("1F2")))))


@pytest.mark.parametrize("name, rank, one, other, message", [
    ("1f1b", 2, "2F1", "2B1", "rank 2 has 2B1 before 2F1"), ("zb1p", 0, "0I1", "0W1", "rank 0 has 0W1 before 0I1"),
])
def test_backward_before_forward_is_refused(name, rank, one, other, message):
    with pytest.raises(ScheduleError, match=message):
        check(swapped(make_schedule(name, 3, 6), rank, one, other))


def test_an_action_on_another_rank_is_refused():
    table = make_schedule("gpipe", 2, 1)
    with pytest.raises(ScheduleError, match="rank 0 has 1F0, but it has no stage 1"):
        check(replace(table, ranks=table.ranks[::-1]))


def test_ranks_that_wait_for_each_other_are_named():
    table = table_of([["0F0", "0F1", "0B1", "0B0"], ["1F0", "1B0", "1F1", "1B1"]])
    check(table)
    with pytest.raises(ScheduleError, match="never ends: rank 0 is at 0B0, which waits for 1SEND_B0; rank 1 is at 1F1, which waits for 0SEND_F1"):
        check(table_of([["0F0", "0B0", "0F1", "0B1"], ["1F0", "1F1", "1B0", "1B1"]]))


def test_sends_that_block_are_found():
    """The list that 1F1B is mostly drawn with, a receive right before its use, ends only if sends do not block."""
    table = table_of([["0F0", "0SEND_F0", "0F1", "0SEND_F1", "0RECV_B0", "0B0", "0RECV_B1", "0B1"],
                      ["1RECV_F0", "1F0", "1B0", "1SEND_B0", "1RECV_F1", "1F1", "1B1", "1SEND_B1"]])
    with pytest.raises(ScheduleError, match="wait for each other: rank 0 at 0SEND_F1, rank 1 at 1SEND_B0"):
        check(table)
    check(with_transfers(table.only("FBIW")))


def test_a_wrong_order_on_one_wire_is_found():
    table = with_transfers(make_schedule("gpipe", 2, 3))
    rows = texts(table)
    rows[0].remove("0RECV_B1")
    rows[0].insert(rows[0].index("0RECV_B0"), "0RECV_B1")
    with pytest.raises(ScheduleError, match="wait for each other: rank 0 at 0RECV_B1, rank 1 at 1SEND_B0"):
        check(table_of(rows))


@pytest.mark.parametrize("rank, text, message", [(0, "0SEND_F1", "0SEND_F1 for one"), (0, "0RECV_B2", "0RECV_B2 for one")])
def test_a_missing_transfer_is_named(rank, text, message):
    with pytest.raises(ScheduleError, match=message):
        check(without(with_transfers(make_schedule("1f1b", 2, 3)), rank, text))


def test_a_transfer_that_nobody_needs_is_named():
    table = with_transfers(make_schedule("zbv", 2, 3))
    with pytest.raises(ScheduleError, match="1SEND_F0 carries nothing"):
        check(replace(table, ranks=(table.ranks[0], (*table.ranks[1], action_of("1SEND_F0")))))


def test_a_value_read_before_it_is_received_is_named():
    table = with_transfers(make_schedule("gpipe", 2, 2))
    with pytest.raises(ScheduleError, match="rank 1 has 1F0 before 1RECV_F0"):
        check(swapped(table, 1, "1F0", "1RECV_F0"))


def test_sends_and_receives_alternate_in_one_order():
    """Each end of a wire has the same micro-batches in the same order, for schedules whose orders differ by rank too."""
    table = with_transfers(make_schedule("interleaved", 4, 9, 3))
    for kind, hop in (("F", 1), ("B", -1)):
        sent = [(a.stage + hop, a.microbatch) for a in table.ranks[1] if a.kind == f"SEND_{kind}"]
        received = [(a.stage, a.microbatch) for a in table.ranks[(1 + hop) % 4] if a.kind == f"RECV_{kind}"]
        assert sent == received
        assert len(sent) == 27


def test_a_network_numbers_events_after_what_they_wait_for():
    network = network_of(make_schedule("zb1p", 4, 9, 2))
    numbers = range(len(network.events))
    assert all(network.before[e] < e and network.source[e] < e for e in numbers)
    assert len(numbers) == 4 * 9 * 2 * 3 + 2 * 7 * 9  # computations, and one transfer per stage boundary, direction and micro-batch
