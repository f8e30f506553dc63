import pytest
from torch_schedules import torch_schedule

from autoshard.errors import ScheduleError
from autoshard.pipeline.action_lists.action_text import action_of, read_csv, table_of, text_of, write_csv
from autoshard.pipeline.action_lists.actions import Action
from autoshard.pipeline.action_lists.check import check
from autoshard.pipeline.action_lists.transfers import with_transfers
from autoshard.pipeline.schedules import make_schedule


@pytest.mark.parametrize("text, action", [
    ("2F0", Action("F", 2, 0)), ("1SEND_F1", Action("SEND_F", 1, 1)), ("12RECV_B30", Action("RECV_B", 12, 30)),
    ("0REDUCE_GRAD", Action("REDUCE", 0)), ("3UPDATE", Action("UPDATE", 3)), (" 4W7 ", Action("W", 4, 7)),
])
def test_text_names_one_action(text, action):
    assert action_of(text) == action
    assert text_of(action) == text.strip()


@pytest.mark.parametrize("text", ["", "F0", "2F", "2G0", "0REDUCE_GRAD3", "2F0x", "-1F0"])
def test_other_text_is_refused_with_the_grammar(text):
    with pytest.raises(ScheduleError, match="2F0|micro-batch"):
        action_of(text)


@pytest.mark.parametrize("name, chunks", [("1f1b", 1), ("zbv", 2), ("interleaved", 3)])
def test_tables_survive_a_file(name, chunks, tmp_path):
    table = with_transfers(make_schedule(name, 3, 5, chunks))
    write_csv(table, tmp_path / "table.csv")
    assert read_csv(tmp_path / "table.csv") == table
    assert read_csv(tmp_path / "table.csv").digest == table.digest


@pytest.mark.parametrize("form", ["compute_only", "compute_comms"])
def test_files_of_torch_are_read(form, tmp_path):
    """With transfers torch also writes what FSDP does; that is left out, and what is left passes the check."""
    torch_schedule("zbv", 4, 2, 9)._dump_csv(tmp_path / "torch.csv", format=form)
    table = read_csv(tmp_path / "torch.csv")
    check(table)
    assert table.only("FBIW") == make_schedule("zbv", 4, 9)
    assert (form == "compute_comms") == any(a.kind == "RECV_B" for a in table.ranks[2])


def test_files_are_read_by_torch(tmp_path):
    table = make_schedule("zb1p", 4, 8, 2)
    write_csv(table, tmp_path / "ours.csv")
    theirs = torch_schedule("interleaved", 4, 2, 8)  # another schedule: what it has afterwards is from the file
    theirs._load_csv(tmp_path / "ours.csv")
    assert [[str(a) for a in theirs.pipeline_order[r]] for r in range(4)] == [list(map(text_of, actions)) for actions in table.ranks]


def test_a_pair_that_torch_overlaps_is_two_actions():
    table = table_of([["0F0", "(0F1;0B0)OVERLAP_F_B", "", "0B1"]])
    assert [text_of(a) for a in table.ranks[0]] == ["0F0", "0F1", "0B0", "0B1"]
    check(table)


@pytest.mark.parametrize("rows, message", [([[""]], "computes nothing"), ([["0F0", "2F0"]], "nothing of stage 1")])
def test_tables_without_a_stage_are_refused(rows, message):
    with pytest.raises(ScheduleError, match=message):
        table_of(rows)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ScheduleError, match="cannot read schedule .*nowhere.csv: No such file"):
        read_csv(tmp_path / "nowhere.csv")


def test_tables_that_differ_have_different_digests():
    tables = [make_schedule("1f1b", 4, 8), make_schedule("1f1b", 4, 9), make_schedule("1f1b", 4, 8, warmup=1), make_schedule("gpipe", 4, 8)]
    assert len({t.digest for t in tables}) == len(tables)
