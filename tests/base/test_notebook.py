"""What notebooks show: the facts, and no markup from a user's names."""
from __future__ import annotations

from html.parser import HTMLParser

import torch
from sample_plan import sample_plan
from torch import nn

import autoshard
from autoshard.base import quantities
from autoshard.base.notebook import facts


class Text(HTMLParser):
    """The text between tags, and the tags."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.texts: list[str] = []
        self.tags: list[str] = []
        self.feed(html)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)

    def handle_data(self, data):
        self.texts.append(data)


def test_a_plan_shows_what_it_is():
    shown = Text(sample_plan(kind="data parallel over dp")._repr_html_()).texts
    assert "Plan for llama:tiny on dp=2,tp=4" in shown and "data parallel over dp" in shown and "optimal, gap 0.00%" in shown
    assert quantities.seconds(1.0) in shown and f"{quantities.size(15 * 2**30)} of {quantities.size(70 * 2**30)}" in shown
    assert "the vocabulary is split over tp" in shown and "aten.cumsum.default" in shown


def test_names_cannot_be_markup():
    shown = Text(sample_plan(model={"reference": "<script>alert(1)</script>"}, notes=("<img src=x>",))._repr_html_())
    assert not {"script", "img"} & set(shown.tags) and "<img src=x>" in shown.texts
    assert Text(facts("t", [("left out", ""), ("zero", 0)])).texts == ["t", "zero", "0"]


def test_a_verification_shows_its_plans():
    report = autoshard.verify(nn.Linear(4, 6), "d=2", (torch.randn(4, 4),), plans=("split",), cluster="cpu-gloo")
    assert "pass" in (shown := Text(report._repr_html_()).texts) and "split" in shown
