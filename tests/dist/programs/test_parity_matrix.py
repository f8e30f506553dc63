"""Searched and forced plans train like one process, issue the collectives they planned, and cost what they said."""
from __future__ import annotations

from pathlib import Path

import pytest

from autoshard.base.mesh import parse_mesh
from tests.dist.harness import on_ranks
from tests.dist.parity_cases import MODELS, Case, cases, run_cases

pytestmark = pytest.mark.dist


def check(todo: list[Case], folder: str, timeout: float = 240.0) -> None:
    (results, *_) = on_ranks(parse_mesh(todo[0].mesh).size, run_cases, todo, folder, 10.0, timeout=timeout)
    assert [r.case for r in results] == todo
    bad = [r for r in results if not r.passed]
    assert not bad, "\n".join(f"{r.case}: error {r.error:.1e} of {r.worst}, collectives as planned: {r.as_planned}, "
                              f"re-priced off by {r.repriced:.1e} {r.failure}" for r in bad)


def test_some(tmp_path: Path) -> None:
    check([Case("mlp", "dp=2", "data parallel", "local"), Case("mlp", "dp=2", "fully sharded"),
           Case("mlp", "dp=2", "searched, h100-dgx", "local"), Case("llama", "dp=2", "tensor parallel")], str(tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("mesh", ["dp=2", "dp=2,tp=2", "dp=4"])
def test_all(tmp_path: Path, mesh: str, model: str) -> None:
    check(list(cases((model,), (mesh,))), str(tmp_path), timeout=1800)
