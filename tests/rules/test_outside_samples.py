"""Rules against torch's own op samples: a few ops here, all of them by `python -m benchmarks.coverage.coverage_ops`."""
from dataclasses import replace

import pytest
import torch

from autoshard.rules import registry
from autoshard.rules.family import Family
from autoshard.rules.notation import rule

pytest.importorskip("expecttest", reason="torch's samples need it")

from benchmarks.coverage import coverage_ops

aten = torch.ops.aten
OPS = "group_norm,scatter_add,index_select,arange,addmm,log_softmax,cumsum,cat,masked_fill,linalg.cross,nll_loss,view_as_complex"


def swept(*argv):
    options = coverage_ops.arguments(["--samples", "2", "--sizes", "2,5", "--pairs", "1", "--calls", "6", "--searches", "0", *argv])
    checker = coverage_ops.Checker(options.sizes, options.pairs, options.searches, options.calls)
    return checker, coverage_ops.sweep(options, checker)


@pytest.mark.parametrize("dtypes", ["float64", "int64,bfloat16"])
def test_rules_are_true_on_outside_samples(dtypes):
    checker, outcome = swept("--ops", OPS, "--dtypes", dtypes)
    wrong = [str(w) for t in checker.tallies.values() for w in t.wrong]
    assert not wrong, "\n".join(wrong)
    assert outcome["traced"] >= 15 and sum(t.checks for t in checker.tallies.values()) >= 100


def test_a_wrong_row_is_seen(monkeypatch):
    """A softmax that lets its own dim be cut."""
    true = registry.rule_of
    broken = replace(rule("... -> ..."), family=Family.REDUCTION)
    monkeypatch.setattr(registry, "rule_of", lambda op: broken if op is aten._softmax.default else true(op))
    registry._resolve.cache_clear()
    registry.rows.cache_clear()
    try:
        checker, _ = swept("--ops", "softmax", "--dtypes", "float64")
    finally:
        registry._resolve.cache_clear()
        registry.rows.cache_clear()
    assert checker.tallies["aten._softmax.default"].wrong
    assert not any(t.wrong for op, t in checker.tallies.items() if op != "aten._softmax.default")


def test_a_rule_that_raises_is_wrong(monkeypatch):
    def raises(call):
        raise ZeroDivisionError("sample")

    true = registry.rule_of
    broken = replace(rule("... -> ..."), rows=raises)
    monkeypatch.setattr(registry, "rule_of", lambda op: broken if op is aten.cumsum.default else true(op))
    checker, _ = swept("--ops", "cumsum", "--dtypes", "float64")
    assert "ZeroDivisionError" in str(checker.tallies["aten.cumsum.default"].wrong[0])


def test_figures_are_written_as_data(tmp_path):
    checker, outcome = swept("--ops", "cumsum", "--dtypes", "float64")
    coverage_ops.save(tmp_path / "ops.json", checker, outcome)
    assert '"aten.cumsum.default"' in (tmp_path / "ops.json").read_text()
