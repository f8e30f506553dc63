"""`autoshard sweep`."""
from __future__ import annotations

import json

import pytest


def test_a_row_for_every_case(run):
    code, out, err = run("sweep", "gpt:tiny", "--mesh", "dp=2", "--mesh", "tp=2", "--batch", "8,16", "--cluster", "cpu-gloo")
    assert code == 0 and "Sweep of gpt:tiny on cpu-gloo" in out and "tokens/s" in out
    rows = [line.split() for line in out.splitlines() if "p=2" in line]
    assert sorted((r[r.index("2") - 1], r[r.index("2") + 1]) for r in rows) == [("16", "dp=2"), ("16", "tp=2"), ("8", "dp=2"), ("8", "tp=2")]
    assert "sweep: 1 of 4: batch 8, dp=2, cpu-gloo" in err and "4 of 4" in err


def test_json_has_all_numbers_and_reasons(run):
    code, out, _ = run("sweep", "mlp:tiny", "--devices", "2", "--mesh", "dp=99", "--batch", "64", "--cluster", "l40s-pcie", "--json", "--quiet")
    chosen, missing = json.loads(out)
    assert code == 0 and chosen["asked"] == "auto:2" and chosen["fits"] and chosen["samples_per_s"] == pytest.approx(64 / chosen["step_s"])
    assert chosen["tokens_per_s"] is None and not missing["fits"] and "needs 99 devices" in missing["why"]


def test_no_plan_at_all_is_an_error_below_the_table(run):
    code, out, err = run("sweep", "mlp:tiny", "--mesh", "dp=99", "--cluster", "l40s-pcie")
    assert code == 2 and "dp=99" in out and "no case has a plan" in err and "Traceback" not in err


@pytest.mark.parametrize("options, words", [
    ([], ["--devices 8,16"]), (["--devices", "8,x"], ["--devices", "whole numbers"]), (["--devices", "8", "--batch", "0"], ["--batch '0'"]),
    (["--devices", "8", "--cluster", "h100-dgx,nowhere"], ["nowhere", "did you mean"]), (["--mesh", "dp"], ["cannot read mesh"]),
    (["--mesh", "dp=2", "--memory", "4GiB,lots"], ["lots"]), (["--mesh", "dp=2", "--memory", "0"], ["memory_budget=0"]),
    (["--mesh", "dp=2", "--batch", "8,8"], ["different values"])])
def test_bad_questions_are_refused_before_the_model_is_loaded(run, options, words):
    code, out, err = run("sweep", "no_such_model", *options)
    assert code == 2 and out == "" and all(word in err for word in words), err


def test_help_teaches(run):
    code, out, _ = run("sweep", "--help")
    assert code == 0 and "--devices 8,16,64 --batch 16,64" in out and "samples/s" in out and "may be repeated" in out.lower()


def test_ctrl_c_in_a_later_case_is_told(run, monkeypatch):
    """The table of a part of the cases looked like that of all, with exit code 0."""
    from autoshard.errors import Interrupted
    from autoshard.study import sizing

    whole, calls = sizing._point, []

    def stopped_at_the_second(*arguments):
        calls.append(1)
        if len(calls) > 1:
            raise Interrupted("interrupted")
        return whole(*arguments)

    def ended_with_a_proven_plan(*arguments):
        arguments[-1].ended.set()
        return whole(*arguments)

    for point in (stopped_at_the_second, ended_with_a_proven_plan):
        monkeypatch.setattr(sizing, "_point", point)
        code, out, err = run("sweep", "mlp", "--mesh", "a=2", "--mesh", "a=1", "--cluster", "cpu-gloo", "--json")
        assert code == 130 and len(json.loads(out)) == 1 and "what was planned by then" in err
