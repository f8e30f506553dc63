"""`autoshard plan --what-if` and `--worth`, and what `memory` says of a GiB."""
from __future__ import annotations

import json

import pytest

from autoshard.base.plan import Plan

MLP = ["plan", "mlp:tiny", "--mesh", "dp=4", "--batch", "2048"]
WHAT_IF = ["--what-if", "device.peak=2x", "--what-if", "mesh.dp=2x,memory=40GiB"]


def test_what_if_prints_a_table_and_saves_todays_plan(run, tmp_path):
    path = tmp_path / "plan.json"
    code, out, _ = run(*MLP, *WHAT_IF, "-o", path)
    assert code == 0
    assert "What if, for dp=4 on h100-dgx" in out and "mesh.dp=2x,memory=40GiB" in out and "device.peak=2x: nothing: the same plan" in out
    assert "Predicted step time" not in out and str(Plan.load(path).mesh) == "dp=4"


def test_what_if_as_json(run):
    code, out, _ = run(*MLP, *WHAT_IF, "--json")
    data = json.loads(out)
    assert code == 0 and [row["what_if"] for row in data["what_if"]] == ["device.peak=2x", "mesh.dp=2x,memory=40GiB"]
    first = data["what_if"][0]
    assert first["gain_s"] == data["today"]["step_s"] - first["step_s"] > 0
    assert first["gain_least_s"] <= first["gain_s"] <= first["gain_most_s"]


@pytest.mark.parametrize("options, words", [
    (["--what-if", "links.infinband.bandwidth=2x"], ["did you mean links.infiniband.bandwidth", "mesh.dp"]),
    (["--what-if", "memory"], ["PATH=CHANGE"]), (["--what-if", "memory=2x", "--worth"], ["--worth"]),
    (["--what-if", "memory=2x", "--html", "a.html"], ["--html"]), (["--worth", "--html", "a.html", "--with-baselines"], ["one at a time"])])
def test_bad_questions_are_refused_before_the_model_is_loaded(run, options, words):
    code, out, err = run("plan", "no_such_model", "--mesh", "dp=4", *options)
    assert code == 2 and out == "" and all(word in err for word in words), err


def test_a_mesh_to_choose_is_refused(run):
    """`autoshard plan` is the command that ran: to say that it chooses meshes was no help."""
    code, _, err = run("plan", "no_such_model", "--devices", "8", "--what-if", "memory=2x")
    assert code == 2 and "without --what-if chooses a mesh; give --mesh" in err, err


def test_help_teaches_what_may_be_changed(run):
    code, out, _ = run("plan", "--help")
    assert code == 0 and "--what-if" in out and "links.NAME.NUMBER" in out and "mesh.AXIS" in out


def test_worth_is_in_report_page_and_plan(run, tmp_path):
    page, path = tmp_path / "a.html", tmp_path / "plan.json"
    code, out, _ = run(*MLP, "--worth", "--html", page, "-o", path)
    assert code == 0 and "What memory is worth" in out and "1.00 GiB more" in out
    assert Plan.load(path).worth.more is not None and "1.00 GiB more" in page.read_text()
    code, again, _ = run("report", path)
    assert code == 0 and "1.00 GiB more" in again


def test_memory_says_what_a_gib_is_worth(run):
    code, out, _ = run("memory", "mlp:tiny", "--mesh", "dp=4", "--steps", "3", "--json", "--quiet", "--time-limit", "5")
    points = [p for p in json.loads(out) if p["fits"]]
    assert code == 0
    for more, less in zip(points, points[1:], strict=False):
        assert more["seconds_per_gib"] == pytest.approx((less["step_s"] - more["step_s"]) / (more["budget_bytes"] - less["budget_bytes"]) * 2**30)
    assert points[-1]["seconds_per_gib"] is None
