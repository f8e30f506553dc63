"""`autoshard.Pipeline`: what it accepts, what a plan file says of it, and what it says to bad values."""
from __future__ import annotations

import json

import pytest
from torch import nn
from typer.testing import CliRunner

import autoshard
from autoshard import Pipeline
from autoshard.base.mesh import parse_mesh
from autoshard.cli import app
from autoshard.errors import UsageError

GIVEN = [Pipeline(), Pipeline(4), Pipeline("auto", "1f1b", ["h.1", "h.2"], 1), Pipeline(3, batch_dims={"input:2": None, "mask": 1}),
         Pipeline(2, "steps.csv", axis="stage", inexact="accept")]


@pytest.mark.parametrize("given", GIVEN, ids=str)
def test_a_plan_file_gives_it_back(given: Pipeline) -> None:
    data = json.loads(json.dumps(given.as_data()))
    assert Pipeline.from_data(data) == given and hash(given) == hash(Pipeline.from_data(data))
    assert (data == {}) == (given == Pipeline())


@pytest.mark.parametrize(("given", "said"), [
    ({"microbatches": 0}, "microbatches=0: give a positive whole number, or 'auto'"),
    ({"microbatches": 2.5}, "microbatches=2.5"), ({"microbatches": True}, "microbatches=True"),
    ({"chunks": -1}, "chunks=-1"), ({"schedule": "fast"}, "schedule='fast' is not one of auto, gpipe, 1f1b"),
    ({"cuts": "layers.1"}, "give a list of module paths"), ({"cuts": ["a", "b", "a"]}, "cuts name 'a' twice"), ({"cuts": [1]}, "module paths"),
    ({"axis": ""}, "the mesh axis that is the pipeline"), ({"inexact": "maybe"}, "inexact='maybe' is not one of error, accept"),
    ({"batch_dims": {"x": "0"}}, "batch_dims="), ({"batch_dims": 3}, "batch_dims=3"),
])
def test_bad_values(given: dict, said: str) -> None:
    with pytest.raises(UsageError) as refused:
        Pipeline(**given)
    assert said in str(refused.value)


def test_stages_need_the_axis() -> None:
    assert Pipeline(4).stages(parse_mesh("dp=2")) == 1
    assert Pipeline(4, "1f1b").stages(parse_mesh("pp=3,dp=2")) == 3
    assert Pipeline(4, axis="stage").stages(parse_mesh("stage=2")) == 2
    with pytest.raises(UsageError, match=r"schedule='1f1b': the mesh dp=2 has no axis 'pp'.* 'pp=2,dp=2'"):
        Pipeline(4, "1f1b").stages(parse_mesh("dp=2"))
    with pytest.raises(UsageError, match="give a number"):
        _ = Pipeline("auto").count


def test_another_thing_as_pipeline() -> None:
    with pytest.raises(UsageError, match=r"pipeline is the int 4; give an autoshard.Pipeline"):
        autoshard.plan(nn.Linear(4, 4), "d=2", pipeline=4)


@pytest.mark.parametrize(("words", "said"), [
    (["--microbatches", "0"], "--microbatches '0': give a positive whole number, or auto"),
    (["--microbatches", "x"], "--microbatches 'x'"), (["--schedule", "fast"], "schedule='fast' is not one of"),
    (["--cut", "h.1"], "the mesh dp=2 has no axis 'pp'"), (["--schedule", "1f1b"], "the mesh dp=2 has no axis 'pp'"),
])
def test_bad_words_on_the_command_line(words: list[str], said: str) -> None:
    done = CliRunner().invoke(app, ["plan", "gpt:tiny", "--mesh", "dp=2", *words])
    text = str(done.exception) if isinstance(done.exception, autoshard.AutoshardError) else done.output
    assert done.exit_code != 0 and said in text
