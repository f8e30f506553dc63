"""The public contest's instances, where they are: next to this repository in `shared/iopddl`, or in $IOPDDL."""
from __future__ import annotations

import os
from pathlib import Path

import pytest

from autoshard.search import Status, evaluate, solve
from autoshard.search.contest.read import read_problem
from autoshard.search.reductions import reduce_core
from autoshard.search.reductions.core import build

FOLDER = Path(os.environ.get("IOPDDL", Path(__file__).parents[4] / "shared" / "iopddl"))


def instance(name: str) -> Path:
    path = FOLDER / name
    if not path.exists():
        pytest.skip(f"{path} is not here; set IOPDDL to the folder of the contest's instances")
    return path


def test_the_example_has_the_published_optimum():
    problem = read_problem(instance("example.json"))
    found = solve(problem)
    assert found.cost == 445 and found.status is Status.OPTIMAL and found.stats["exact"]
    assert evaluate(problem, [0, 0, 2, 1, 0]) == 445


@pytest.mark.slow
@pytest.mark.parametrize(("letter", "optimum"), [("G", 217_039), ("A", 6_548_553_650)])
def test_proven_in_whole_numbers(letter: str, optimum: int):
    found = solve(read_problem(instance(f"asplos-2025-iopddl-{letter}.json.gz")), time_limit=600.0)
    assert found.cost == optimum and found.bound == optimum
    assert found.status is Status.OPTIMAL and found.stats["exact"]


@pytest.mark.slow
@pytest.mark.parametrize(("letter", "most"), [("A", 300), ("G", 300), ("M", 4_500), ("S", 7_000)])
def test_presolve_shrinks_as_documented(letter: str, most: int):
    core = build(read_problem(instance(f"asplos-2025-iopddl-{letter}.json.gz")))[0]
    reduce_core(core)
    assert len(core.alive) <= most
