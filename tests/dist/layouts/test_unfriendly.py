"""Training at sizes that divide nowhere, into a checkpoint and on in another mesh (unfriendly_cases.py); `benchmarks/coverage/unfriendly.py` has the table."""
from __future__ import annotations

from pathlib import Path

import pytest

from tests.dist.harness import on_ranks
from tests.dist.unfriendly_cases import CASES, run_cases

pytest.importorskip("transformers")
pytestmark = pytest.mark.dist


def check(todo: list[int], folder: Path, backend: str = "") -> None:
    for found in on_ranks(CASES[todo[0]].world, run_cases, todo, str(folder), backend, timeout=1800):
        bad = [f"{o.case.title}: {o.failure}" for o in found if o.failure]
        assert not bad, "\n".join(bad)


def test_a_rank_without_words_and_features(tmp_path: Path) -> None:
    """The one case that is here in the fast tests: 9 words and 6 features on four ranks, the last one empty."""
    check([i for i, case in enumerate(CASES) if case.name.startswith("nothing on the last rank") and case.seeds], tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fused q|k|v and gate|up", "mixtral, 7 experts"])
def test_small_cases_compiled_by_inductor(tmp_path: Path, name: str) -> None:
    """As `benchmarks/coverage/unfriendly.py --backend inductor` runs them, a checkpoint into another mesh included: the smallest, and one with parts in float32."""
    check([i for i, case in enumerate(CASES) if case.name == name and case.world == 2], tmp_path, "inductor")


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 4])
def test_all(tmp_path: Path, world: int) -> None:
    check([i for i, case in enumerate(CASES) if case.world == world], tmp_path)
