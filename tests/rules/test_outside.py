"""Rules given from outside the package: by a call, by an entry point; and what is wrong with one, said."""
from __future__ import annotations

import logging

import pytest
import torch

import autoshard
from autoshard.errors import UsageError
from autoshard.rules import outside, registry
from autoshard.rules.outside import find_packages, given_rules, overload


@torch.library.custom_op("outside_test::shifted", mutates_args=())
def shifted(x: torch.Tensor, by: float) -> torch.Tensor:
    return x + by * x.roll(1, -1)


@shifted.register_fake
def _(x, by):
    return torch.empty_like(x)


@torch.library.custom_op("outside_test::written", mutates_args=("x",))
def written(x: torch.Tensor) -> None:
    x.add_(1)


@pytest.fixture(autouse=True)
def forget():
    yield
    for target in list(registry.outside()):
        if str(target).startswith("outside_test"):
            del registry.outside()[target], registry.table()[target]
    for looked_up in (registry.rule_of, registry.rows, registry._resolve, find_packages):
        looked_up.cache_clear()


def test_the_page_runs():
    import re
    from pathlib import Path

    page = (Path(__file__).resolve().parents[2] / "docs" / "custom-ops.md").read_text()
    exec("\n".join(re.findall(r"```python\n(.*?)```", page, re.DOTALL)), {"__name__": "page"})  # noqa: S102


def test_without_a_rule_an_op_runs_whole_and_with_one_it_is_split():
    def model(x):
        return shifted(x, 0.5).sum()

    class Model(torch.nn.Module):
        def forward(self, x):
            return model(x)

    x = torch.randn(64, 8)
    before = autoshard.plan(Model(), "d=2", (x,), training=False, cluster="cpu-gloo")
    assert [f.target for f in before.fallbacks] == ["outside_test.shifted.default"]
    assert autoshard.check_rule(shifted, x, 0.5) == [
        "outside_test.shifted.default has no rule for arguments of these shapes, and runs whole on every rank"]
    autoshard.register_rule(shifted, "... d! -> ... d!", partial="each")
    assert not autoshard.plan(Model(), "d=2", (x,), training=False, cluster="cpu-gloo").fallbacks
    assert autoshard.check_rule(shifted, x.double(), 0.5) == [] and "outside_test.shifted" in given_rules()
    autoshard.register_rule("outside_test::shifted", "... -> ...")  # once more: the last one holds
    (wrong, *_) = autoshard.check_rule(torch.ops.outside_test.shifted, x.double(), 0.5)
    assert "shifted" in wrong


@pytest.mark.parametrize("op, notation, kwargs, text", [
    ("outside_test::nothing", "... -> ...", {}, "no op outside_test::nothing; import the package"),
    ("outside_test", "... -> ...", {}, "no op outside_test::?"),
    (torch.relu, "... -> ...", {}, "is no op of torch.library"),
    (torch.ops.aten.relu.default, "... -> ...", {}, "has a rule of autoshard's own"),
    (shifted, "... ...", {}, "lacks '->'"),
    (shifted, "a !b -> a !b", {}, "has '!b', which is no name of a dim; '!' is behind one, 'k!'"),
    (shifted, None, {}, "is None; give a line"),
    (shifted, "... -> ...", {"flops": 3}, "flops=3 of the rule of outside_test.shifted.default is no function"),
    (shifted, "... -> ...", {"sizes": {"size": "out0"}}, "has no argument 'size'; it has x, by"),
    (shifted, "... -> ...", {"partial": "some"}, "partial is one of each, all, none"),
    (shifted, "... -> ...", {"family": "odd"}, "family='odd' is not one of"),
    (written, "... -> ...", {}, "writes its arguments"),
])
def test_mistakes_are_named(op, notation, kwargs, text):
    with pytest.raises(UsageError, match=text.replace("?", "[?]").replace("'->'", "'->'")):
        autoshard.register_rule(op, notation, **kwargs)


class Entry:
    """Stands for an entry point of an installed package."""

    dist, value = None, "mylib:register"

    def __init__(self, name, function) -> None:
        self.name, self.load = name, lambda: function


@pytest.mark.parametrize(("line", "text"), [
    (lambda call: 1 / 0, r"test_outside.py:\d+\) raised ZeroDivisionError: division by zero"),
    (lambda call: None, r"test_outside.py:\d+\) gave None for a call, and not a line"),
    (lambda call: "a ?b -> a", r"test_outside.py:\d+\): notation 'a \?b -> a' has '\?b', which is no name"),
])
def test_a_function_that_makes_no_line_is_named(line, text):
    autoshard.register_rule(shifted, line)
    with pytest.raises(UsageError, match=r"the rule of outside_test.shifted.default \(.*" + text):
        autoshard.check_rule(shifted, torch.randn(4, 8), 0.5)


def test_installed_packages_are_found_and_one_that_fails_is_said(monkeypatch, caplog):
    def good():
        autoshard.register_rule("outside_test::shifted", "... d! -> ... d!")

    def bad():
        raise RuntimeError("no GPU")

    find_packages.cache_clear()
    monkeypatch.setattr(outside, "entry_points", lambda group: [Entry("bad", bad), Entry("good", good)] if group == "autoshard.rules" else [])
    with caplog.at_level(logging.WARNING, "autoshard"):
        assert "outside_test.shifted" in given_rules()
    assert overload(shifted) in registry.outside() and "RuntimeError: no GPU" in caplog.text
