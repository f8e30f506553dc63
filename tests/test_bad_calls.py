"""Whatever is wrong with a call of `plan`, `compile`, `verify` or the command line: an AutoshardError that names the thing and what to do."""
from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import autoshard
from autoshard import AutoshardError, Mesh, cli
from autoshard.cost.optimizers import OPTIMIZERS
from autoshard.decide.options import Options, Passing, Running, choices_of
from autoshard.errors import InfeasibleError, MeshError, ModelError, PlanError, UsageError
from autoshard.search import BACKENDS

MODEL, X = nn.Linear(4, 4), torch.ones(2, 4)


class Net(nn.Module):
    def forward(self, ids, mask, scale=1.0):
        return ids * mask * scale


def call(name: str, model: Any = MODEL, mesh: Any = "d=1", examples: Any = (X,), **options: Any) -> Any:
    own = {"compile": {"cache": False}, "verify": {"plans": ("data_parallel",)}}.get(name, {})
    return getattr(autoshard, name)(model, mesh, examples, **{"cluster": "cpu-gloo", **own, **options})


MESHES = {  # mesh -> what the error must say
    "list": ([2, 4], "a list; write it as text, 'dp=2,tp=4'"), "dict": ({"x": 2, "y": 3}, "a dict; write it as text, 'x=2,y=3'"),
    "tuple": ((8,), "a tuple; write it as text, 'dp=8'"), "four": ((2, 2, 2, 2), "d0=2,d1=2,d2=2,d3=2"), "no list": ([], "[], a list"),
    "no dict": ({}, "{}, a dict"), "none": (None, "None, a NoneType"), "number": (8.0, "8.0, a float; write it as text, 'dp=2,tp=4'"),
    "odd": (["dp", 2], "dp=2,tp=4"), "empty": ("", "cannot read mesh ''"), "no size": ("dp", "cannot read mesh 'dp'"), "zero": ("dp=0", "size 0"),
    "huge": ("dp=99999999999999999999", "the most is"), "twice": ("a=2,a=2", "named twice"), "object": (object(), "an autoshard.Mesh or a torch DeviceMesh"),
}
MODELS = {
    "none": (None, "the model is None"), "function": (F.relu, "the function relu; put it into the forward"), "class": (Net, "the class Net; give an instance"),
    "text": ("gpt:tiny", "'gpt:tiny'"), "list": ([MODEL], "the model is the list"),
}
INPUTS = {
    "none": ((), "Linear.forward needs input"), "tensor": (X, r"one tensor of shape \(2, 4\)"), "mapping": ({"x": X}, "example_kwargs"),
    "number": (5, "the int 5"), "text": ("x", "the str 'x'"), "generator": ((x for x in [X]), "generator"),
}
OPTIONS = {
    "example_kwargs": ([1], "a mapping"), "loss_fn": ("mse", "a function of the model's output"), "training": ("yes", "True, False or None"),
    "precision": ("bf16", r"Precision\('bf16'\)"), "seeds": (["a=tp"], "a mapping"), "memory_budget": ([1], "'70GiB'"), "cluster": (5, "toml"),
    "time_limit": (None, "a positive number of seconds"), "progress": ("yes", "a function of"), "optimizer": ("lion", "adamw"),
    "inputs": ("x", "global, local"), "fallback": ("x", "error, replicate"),
}
MORE = {
    "example_kwargs": ({1: X}, "a mapping"), "seeds": ({1: "tp"}, "a mapping"), "memory_budget": ("lots", "70GiB"), "time_limit": ("x", "a positive number"),
    "search": ("magic", "auto, milp, cp_sat, local, brute, propagate"), "outputs": ("x", "replicate, dtensor, local"), "offload": ("x", "none, optimizer"),
    "precision": (autoshard.Precision, "autoshard.Precision"), "training": (1, "True, False"), "cluster": ("nope", "no cluster profile 'nope'"),
}
CALLS = [
    *[(f"mesh {k}", dict(mesh=v), MeshError, re.escape(words)) for k, (v, words) in MESHES.items()],
    *[(f"model {k}", dict(model=v), ModelError, words) for k, (v, words) in MODELS.items()],
    *[(f"inputs {k}", dict(examples=v), UsageError, words) for k, (v, words) in INPUTS.items()],
    *[(k, {k: v}, UsageError, words) for table in (OPTIONS, MORE) for k, (v, words) in table.items()],
]


@pytest.mark.parametrize("function", ["plan", "compile", "verify"])
@pytest.mark.parametrize(("what", "given", "kind", "words"), CALLS, ids=[f"{i}-{c[0]}" for i, c in enumerate(CALLS)])
def test_a_bad_argument_is_named(function: str, what: str, given: dict, kind: type, words: str) -> None:
    if function == "verify" and what in ("search", "outputs", "offload"):
        pytest.skip("verify has no such option")
    with pytest.raises(kind, match=words) as raised:
        call(function, **given)
    assert isinstance(raised.value, AutoshardError)
    assert not re.search(r"has no attribute|not iterable|NoneType'|not supported between", str(raised.value))


def test_inputs_that_are_missing_are_named_without_those_that_have_a_default() -> None:
    with pytest.raises(UsageError, match=r"Net.forward needs ids, mask; give example_inputs=\(ids, "):
        call("plan", Net(), examples=())


def test_a_model_that_needs_nothing_needs_no_inputs() -> None:
    class Nothing(nn.Module):
        def forward(self, scale=2.0):
            return torch.ones(2) * scale

    assert call("plan", Nothing(), examples=()).objective_s >= 0


@pytest.fixture(scope="module")
def saved() -> dict[str, Any]:
    return json.loads(call("plan", mesh="d=2").to_json())


HOLLOW: list[Any] = [[], {}, None, "", 0, [1], {"a": 1}, "x", float("nan")]


@pytest.mark.parametrize("field", autoshard.Plan.__dataclass_fields__)
def test_a_hollow_plan_is_no_plan_or_the_same_plan(field: str, saved: dict, tmp_path: Path) -> None:
    """A field of another type, or missing: PlanError in words, or a plan (where the value may be so) that `verify` can run or refuses."""
    path = tmp_path / "plan.json"
    for hollow in (*HOLLOW, "missing"):
        path.write_text(json.dumps({**saved, field: hollow} if hollow != "missing" else {k: v for k, v in saved.items() if k != field}))
        try:
            autoshard.Plan.load(path)
            call("verify", mesh="d=2", plan=str(path))
        except AutoshardError as e:
            assert not re.search(r"Error:|has no attribute|not iterable|object is not", str(e)), (hollow, str(e))
            assert not isinstance(e, PlanError) or "again" in str(e) or "plan" in str(e)


@pytest.mark.parametrize("field", ["ops", "placements", "copies", "collectives", "fallbacks", "notes", "stages", "mesh", "graph_hash", "settings"])
def test_a_plan_that_lacks_what_it_runs_by(field: str, saved: dict) -> None:
    with pytest.raises(PlanError, match=f"'{field}'|{field}"):
        autoshard.Plan.from_json(json.dumps({k: v for k, v in saved.items() if k != field}))


@pytest.mark.parametrize("ops", [[], {}, None])
def test_a_plan_without_ops(ops: Any, saved: dict) -> None:
    with pytest.raises(PlanError, match="ops is|has no ops"):
        autoshard.Plan.from_json(json.dumps({**saved, "ops": ops}))


def refused(monkeypatch, capsys, *arguments: str) -> str:
    monkeypatch.setattr(sys, "argv", ["autoshard", *arguments])
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    said = capsys.readouterr()
    assert stopped.value.code == 2 and said.out == "" and "Traceback" not in said.err
    return " ".join(said.err.split())


MLP = ("mlp", "--mesh", "d=2", "--cluster", "cpu-gloo", "-q")
COMMAND_LINES = [
    (("plan", "mlp", "--mesh", "[2,4]"), "cannot read mesh"), (("plan", "mlp", "--mesh", ""), "cannot read mesh ''"),
    (("plan", "--mesh", "d=2"), "model"), (("plan", "nope", "--mesh", "d=2"), "nope"), (("plan", "no.such:thing", "--mesh", "d=2"), "no.such"),
    (("plan", "torch.nn:functional", "--mesh", "d=2"), "functional"), (("plan", "torch.nn:Linear", "--mesh", "d=2"), "Linear"),
    (("plan", *MLP, "--search", "magic"), "auto, milp, cp_sat, local, brute, propagate"),
    (("plan", *MLP, "--optimizer", "lion"), ", ".join(OPTIMIZERS)), (("plan", *MLP, "--fallback", "x"), "error, replicate"),
    (("plan", *MLP, "--offload", "x"), "none, optimizer"), (("plan", *MLP, "--precision", "int8"), "bf16, fp16, fp32, fp64"),
    (("plan", *MLP, "--time-limit", "nan"), "time_limit"), (("plan", *MLP, "--memory", "-1"), "memory"), (("verify", *MLP, "--inputs", "x"), "global, local"),
    (("verify", *MLP, "--plan", "none.json"), "none.json"), (("compare", *MLP, "--search", "magic"), "no search backend"),
    (("plan", *MLP, "--memory", "1e400"), "too large"), (("memory", *MLP, "--memory", "20KiB"), "--budget 20KiB"),
    (("plan", *MLP, "--inference", "--microbatches", "2"), "microbatches=2: inference"),
    (("plan", "mlp", "--mesh", "d=4", "--microbatches", "auto", "--refine-axes", "d=2x2"), "where the number of micro-batches is to be chosen"),
    (("verify", *MLP, "--tolerance", "0"), "tolerance=0.0"), (("verify", *MLP, "--tolerance", "-1"), "tolerance=-1.0"),
    (("verify", *MLP, "--tolerance", "nan"), "tolerance=nan"), (("verify", *MLP, "--search", "propagate"), "spreads seeds, and there are none"),
    (("doctor", "--seconds", "nan"), "--seconds nan"), (("doctor", "--timeout", "-1"), "--timeout -1"),
    (("calibrate", "-o", "my.toml", "--seconds", "-1"), "--seconds -1"),
    (("sweep", *MLP, "--inference", "--microbatches", "2"), "microbatches=2: inference"),
    (("explain", *MLP, "--op", "layers.1", "--source", "d,-"), "--source"),
    (("memory", *MLP, "--budget", "lots"), "lots"), (("explain", *MLP, "--op", "nope"), "nope"), (("report", "none.json"), "none.json"),
]


@pytest.mark.parametrize(("arguments", "words"), COMMAND_LINES, ids=[" ".join(a) for a, _ in COMMAND_LINES])
def test_a_bad_command_line(monkeypatch, capsys, arguments: tuple[str, ...], words: str) -> None:
    assert words in refused(monkeypatch, capsys, *arguments)


MODES = {**choices_of(Options), **choices_of(Passing)}
LISTS = {"search": (*BACKENDS, "propagate"), "optimizer": tuple(OPTIMIZERS), "fallback": MODES["fallback"], "offload": MODES["offload"],
         "precision": ("bf16", "fp16", "fp32", "fp64", "param", "master", "reduce")}


def test_help_and_docstring_list_every_choice(monkeypatch, capsys) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    monkeypatch.setattr(sys, "argv", ["autoshard", "plan", "--help"])
    with pytest.raises(SystemExit):
        cli.main()
    text = capsys.readouterr().out
    for option, choices in LISTS.items():
        at = text.index(f"--{option}")
        about = re.split(r"│\s+--", text[at + 2:])[0]
        assert [c for c in choices if not re.search(rf"\b{c}\b", about)] == [], option
    assert "another name of cost/optimizers.py (`autoshard plan --help` lists them)" in autoshard.plan.__doc__
    for option, choices in {**{k: v for k, v in LISTS.items() if k != "optimizer"}, **MODES}.items():
        about = re.split(r"\n    \w+ ", autoshard.plan.__doc__.split(f"\n    {option} ")[1])[0]
        assert [c for c in choices if not re.search(rf"\b{c}\b", about)] == [], option


@pytest.mark.parametrize(("part", "option"), [(part, option) for part in (Options, Passing, Running) for option in choices_of(part)])
def test_errors_list_every_choice(part: type, option: str) -> None:
    for make in (part, lambda **given: Options.of(given)):
        with pytest.raises(UsageError) as raised:
            make(**{option: "?"})
        assert all(choice in str(raised.value) for choice in choices_of(part)[option])


AMOUNT = r"([\d.]+(?:e\+\d+)? (?:[KMG]iB|bytes))"


def amount(text: str) -> float:
    number, unit = text.split()
    return float(number) * {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}[unit]


@pytest.mark.parametrize("training", [True, False])
def test_infeasibility_does_not_contradict_itself(training: bool) -> None:
    """Budgets from ample to nothing: a plan that fits, or budget, bound and least found in an order that can be, also as written."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8))
    batch = (torch.ones(16, 32), torch.zeros(16, dtype=torch.long))
    make: Callable[..., Any] = lambda **o: autoshard.plan(  # noqa: E731
        model, Mesh(("d",), (2,)), batch if training else batch[:1], loss_fn=F.cross_entropy if training else None, training=training,
        cluster="cpu-gloo", time_limit=20.0, **o)
    ample, enough, refusals = make().memory["total"], 0.0, 0
    for part in (1.0, 0.7, 0.5, 0.3, 1e-6):
        budget = part * ample
        try:
            assert make(memory_budget=budget).memory["total"] <= budget
        except InfeasibleError as e:
            refusals += 1
            given, needs = amount(re.search(rf"in {AMOUNT} per rank", str(e))[1]), amount(re.search(rf"least found needs {AMOUNT}", str(e))[1])
            bound = re.search(rf"less than {AMOUNT} \(proven\)", str(e))
            assert needs > given and (bound is None or amount(bound[1]) <= needs), str(e)
            assert e.proven == ("not proven" not in str(e)) and e.proven == (bound is None or amount(bound[1]) > given), str(e)
            assert not enough or needs >= 0.5 * enough
            enough = needs
            assert make(memory_budget=needs).memory["total"] <= needs, "a budget as large as the error says is enough"
    assert refusals


def test_an_infinite_time_limit_is_no_limit() -> None:
    """Solvers count their limits in whole numbers, and an infinite one ended in an OverflowError."""
    assert autoshard.plan(MODEL, "d=2", (X,), time_limit=float("inf"), cluster="cpu-gloo").status == "optimal"


class Returns(nn.Linear):
    """A layer that forgets to return."""

    def forward(self, x: torch.Tensor) -> None:
        super().forward(x)


LABELS = torch.tensor([1, 3])
LOSSES: dict[str, tuple[Any, Any, Any, str]] = {  # model, loss, target, what the error must say
    "labels are floats": (MODEL, F.cross_entropy, LABELS.float(), r"loss_fn cross_entropy, with output \(2, 4\) float32, target \(2,\) float32"),
    "a loss of its own": (MODEL, lambda y, t: y.view(3, -1), LABELS, r"in loss_fn <lambda>, with output \(2, 4\) float32, target \(2,\) int64"),
    "nothing returned": (Returns(4, 4), None, None, "the model returns no tensor"),
    "nothing returned to the loss": (Returns(4, 4), F.cross_entropy, LABELS, r"loss_fn cross_entropy, with output None"),
    "no loss returned": (MODEL, lambda y, t: None, LABELS, "loss_fn <lambda> returns no tensor"),
}


@pytest.mark.parametrize("case", LOSSES)
def test_what_a_loss_gets_and_what_returns_nothing_are_named(case: str) -> None:
    model, loss, target, words = LOSSES[case]
    with pytest.raises(AutoshardError, match=words):
        call("plan", model, examples=(X,) if loss is None else (X, target), loss_fn=loss)


@pytest.mark.parametrize("function", ["plan", "compile", "verify"])
def test_a_compiled_model_is_not_taken_again(function: str) -> None:
    compiled = call("compile")
    for model, words in ((compiled, "the model is compiled already"), (nn.Sequential(nn.ReLU(), compiled), "1 is compiled already")):
        with pytest.raises(ModelError, match=words):
            call(function, model)


def test_an_op_that_raises_in_a_step_says_where_it_is() -> None:
    """The kernel's own error, of the type that the model raises, with the op, its module and the user's line as a note."""
    model = call("compile", nn.Sequential(nn.Embedding(10, 4), MODEL), examples=(torch.zeros(2, dtype=torch.long),))
    with pytest.raises(IndexError, match="index out of range") as error:
        model(torch.tensor([1, 12]))
    assert any("embedding" in note and "in 0 " in note for note in error.value.__notes__)
