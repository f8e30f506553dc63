"""The report of a pipeline: stages, ranks, and the schedule as lines and as a picture."""
from __future__ import annotations

import io
from dataclasses import replace

import pytest
from rich.console import Console
from sample_pipeline import STEP, WIRE, sample_pipeline
from sample_plan import sample_plan

from autoshard.base.plan import Plan
from autoshard.pipeline.merge import by_stage
from autoshard.report import stages, text, what
from autoshard.report.page.html import document


def drawn(plan: Plan, width: int = 100) -> str:
    out = io.StringIO()
    text.show(plan, Console(file=out, width=width))
    return out.getvalue()


def test_parts_of_the_step_add_up_and_waiting_is_one():
    plan = sample_pipeline()
    parts = {a.label: a.value for a in what.step_time(plan) if a.counts}
    assert sum(parts.values()) == pytest.approx(plan.objective_s) and parts["waiting in the pipeline"] > 0
    assert parts["compute"] < plan.objective_s


def test_placements_bear_the_axes_of_the_stages():
    plan = sample_pipeline()
    placements = {row.name: row.placement for group in what.layer_groups(plan) for row in group.rows}
    assert set(placements.values()) == {"[-, -]", "[dp, -, -]"}
    assert "[dp, -] reads" in drawn(plan) and document(plan)["axes"] == [["dp", 2]]


def test_ranks_compute_wait_and_end_as_the_player_says():
    plan = sample_pipeline()
    rows = stages.rank_rows(plan, stages.playback(plan))
    assert [r.busy_s for r in rows] == [4 * 3.0, 4 * 6.0]
    first = 1.0 + WIRE  # until stage 1 has something to do
    last = WIRE + 2.0  # the last gradient goes back, and stage 0 has its backward
    assert rows[1].idle_s == pytest.approx(first + last) and rows[0].busy_s + rows[0].idle_s + STEP == pytest.approx(plan.objective_s)


def test_a_line_per_rank():
    plan = sample_pipeline()
    lines = list(stages.lines(plan, stages.playback(plan), 54))
    assert [len(line) for line in lines] == [54, 54]
    assert lines[1].startswith("..FFFFBBBBBBBB") and lines[0].startswith("FF") and lines[0].count("B") == pytest.approx(2 * lines[0].count("F"), abs=3)
    assert set(lines[1]) <= set("FB.=")


@pytest.mark.parametrize("width", [60, 80, 100, 160])
def test_no_line_is_wider_than_the_terminal(width):
    assert max(map(len, drawn(sample_pipeline(), width).splitlines())) <= width


def test_the_report_has_a_line_per_stage_with_what_it_sends():
    found = drawn(sample_pipeline("zb1p"), 160)
    for words in ("embed to layers.1", "layers.2 to layers.3", "1.00 k", "10 ops", "1.00 KiB to 1", "2.00 KiB back to 0", "wgt", "W its part for the weights"):
        assert words in found, words


def test_a_plan_of_one_stage_has_no_schedule():
    plan = sample_plan()
    assert stages.playback(plan) is None and stages.stage_rows(plan) == () and document(plan)["schedule"] is None
    assert "Stages of the pipeline" not in drawn(plan)


def test_the_picture_has_every_computation_once():
    plan = sample_pipeline("zb1p", 3)
    found = document(plan)["schedule"]
    events = [tuple(e[:3]) for row in found["rows"] for e in row["events"]]
    assert sorted(events) == sorted((kind, s, m) for s in range(2) for m in range(3) for kind in "FIW")
    ends = [e[3] + found["lasts"][e[0]][e[1]] for row in found["rows"] for e in row["events"]]
    assert max(ends) == pytest.approx(found["makespan"]) and found["shown"] == pytest.approx(plan.objective_s)


def test_of_a_long_step_the_beginning_is_drawn(monkeypatch):
    monkeypatch.setattr(stages, "MOST_EVENTS", 5)
    found = document(sample_pipeline())["schedule"]
    assert sum(len(row["events"]) for row in found["rows"]) == 5 and found["shown"] < found["step"]


def test_a_plan_of_a_schedule_file_that_is_gone_is_still_shown():
    plan = sample_pipeline()
    gone = {**plan.pipeline["options"], "schedule": "/no/such/file.csv"}
    assert "embed to layers.1" in drawn(replace(plan, pipeline={**plan.pipeline, "options": gone}), 160)


def test_what_all_stages_say_is_said_once():
    assert by_stage([["a", "b"], ["a"], ["a", "b"], ["a", "b"]]) == ("a", "stages 0, 2-3: b")
    assert by_stage([["a"], []]) == ("stage 0: a",)
