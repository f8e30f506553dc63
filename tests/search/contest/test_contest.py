"""The contest's files: read, solved, written; bad ones refused with a message that names the place."""
from __future__ import annotations

import copy
import gzip
import json
import time

import pytest

from autoshard.errors import InfeasibleError, ProblemError
from autoshard.search import Status, solve
from autoshard.search.contest.command import solve_command
from autoshard.search.contest.read import parse_problem, read_problem

SMALL = {"problem": {"name": "small", "usage_limit": 12, "nodes": {
    "intervals": [[0, 4], [2, 6], [5, 5]], "costs": [[3, 1], [4, 2], [0]], "usages": [[2, 9], [3, 9], [50]]},
    "edges": {"nodes": [[0, 1], [1, 2]], "costs": [[0, 1, 1, 10**18], [0, 7]]}}}


def changed(*path, value):
    data = copy.deepcopy(SMALL)
    at = data
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = value
    return data


def test_small_problem_has_the_optimum_found_by_hand():
    # (0, 0): 3 + 4; (1, 0): 1 + 4 + 1 with usage 9 + 3 = 12, which fits; (0, 1): 3 + 2 + 1 + 7; (1, 1) is forbidden
    found = solve(parse_problem(SMALL))
    assert found.cost == 6 and found.choice.tolist() == [1, 0, 0] and found.status is Status.OPTIMAL
    assert solve(parse_problem(changed("problem", "usage_limit", value=11))).cost == 7


def test_gz_and_plain_agree_and_the_answer_is_written(tmp_path, capsys):
    plain, packed, output = tmp_path / "p.json", tmp_path / "p.json.gz", tmp_path / "out.json"
    plain.write_text(json.dumps(SMALL))
    packed.write_bytes(gzip.compress(plain.read_bytes()))
    assert solve(read_problem(plain)).cost == solve(read_problem(packed)).cost
    assert solve_command(str(packed), 10, output=str(output)) == 0
    answer = json.loads(output.read_text())
    assert set(answer) == {"choice", "cost", "bound", "gap", "status", "seconds"}
    assert (answer["cost"], answer["bound"], answer["gap"], answer["choice"]) == (6, 6, 0, [1, 0, 0])
    assert "optimal" in capsys.readouterr().out


@pytest.mark.parametrize(("data", "words"), [
    ({}, "problem"),
    (changed("problem", "nodes", "costs", value=[[1], [2]]), "counts must agree"),
    (changed("problem", "nodes", "costs", 0, value=[1, "x"]), "entry 0"),
    (changed("problem", "nodes", "usages", 1, value=[1]), r"usages\[1\]"),
    (changed("problem", "nodes", "intervals", 1, value=[-1, 3]), r"intervals\[1\]"),
    (changed("problem", "edges", "nodes", 1, value=[1, 9]), r"edges.nodes\[1\]"),
    (changed("problem", "edges", "costs", 0, value=[1, 2, 3]), r"edges.costs\[0\]"),
])
def test_malformed_problems_are_refused(data, words):
    with pytest.raises(ProblemError, match=words):
        parse_problem(data)


def test_not_json_missing_and_unwritable(tmp_path):
    bad = tmp_path / "bad.json"
    bad.write_text("{")
    with pytest.raises(ProblemError, match="not JSON"):
        read_problem(bad)
    with pytest.raises(ProblemError, match="cannot be read"):
        read_problem(tmp_path / "none.json")
    bad.write_text(json.dumps(SMALL))
    with pytest.raises(ProblemError, match="cannot be written"):
        solve_command(str(bad), 5, output=str(tmp_path / "no" / "out.json"))


def test_a_file_that_takes_longer_to_read_than_the_limit(tmp_path):
    path = tmp_path / "p.json"
    path.write_text(json.dumps(SMALL))
    with pytest.raises(ProblemError, match=r"took 100\.\d s to start and to read.*--time-limit is 5 s; allow at least 20\d s"):
        solve_command(str(path), 5, start=time.monotonic() - 100)


def test_infeasible_says_where_and_what_would_do(tmp_path):
    path = tmp_path / "p.json"
    path.write_text(json.dumps(changed("problem", "usage_limit", value=4)))
    with pytest.raises(InfeasibleError, match="at time 2 the least usage is 5.*least limit that would be feasible is 5"):
        solve_command(str(path), 5)
