"""Models of other libraries are made shorter by repeated blocks alone; the page has the latest run of each."""
import json
from pathlib import Path

import pytest
import torch
from torch import nn

pytest.importorskip("transformers")

from benchmarks.coverage.coverage_libraries import earlier, page
from benchmarks.coverage.zoo.shorten import shortened, without_noise


class Stack(nn.Module):
    def __init__(self, counted: bool) -> None:
        super().__init__()
        blocks = [nn.Linear(4, 4) for _ in range(5)] + [nn.Linear(4, 6)] + [nn.Linear(6, 6) for _ in range(3)]
        self.blocks, self.drop, self.counted = nn.ModuleList(blocks), nn.Dropout(0.5), counted

    def forward(self, x):
        for block in [self.blocks[i] for i in range(9)] if self.counted else self.blocks:
            x = block(x)
        return self.drop(x)


def test_two_of_each_run_are_kept():
    model, x = without_noise(Stack(counted=False)), torch.randn(2, 4)
    short = shortened(model, (x,))
    assert [tuple(b.weight.shape) for b in short.blocks] == [(4, 4), (4, 4), (6, 4), (6, 6), (6, 6)]
    assert len(model.blocks) == 9 and short(x).shape == (2, 6) and torch.equal(short(x), short(x))


def test_a_model_that_counts_its_blocks_stays_whole():
    model = without_noise(Stack(counted=True))
    assert shortened(model, (torch.randn(2, 4),)) is model


def line(family: str, stage: str, date: str, **more: object) -> str:
    return json.dumps({"library": "timm", "of": 9, "date": date, "commit": "c" + date[-1], "family": family, "stage": stage, "why": "", **more})


def test_the_page_has_the_latest_run_of_each_model(tmp_path: Path) -> None:
    meshes = {"d=4": {"outcome": "verified", "unruled": ["aten.odd.default"]}}
    lines = [line("one", "limit", "2026-01-01", why="too slow"), line("two", "built", "2026-01-02", why="a branch"), line("one", "verified", "2026-01-03", meshes=meshes)]
    results = tmp_path / "lines.jsonl"
    results.write_text("\n".join(lines) + "\n")
    page(tmp_path / "page.md", earlier(results))
    text = (tmp_path / "page.md").read_text()
    assert "2 of 9 models were run, 2026-01-02 to 2026-01-03, commits `c2`, `c3`." in text
    assert "Verified on `d=4`: `one` (1)." in text and "`aten.odd.default`" in text and "| `two` | built; refused by the trace | a branch |" in text and "too slow" not in text
