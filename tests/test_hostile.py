"""Anything may stand in a plan, a cache, a profile, a seed or on the command line: an error with a message, no traceback,
no hang, nothing run and nothing written outside."""
import copy
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from typer.testing import CliRunner

import autoshard
from autoshard.base.mesh import parse_mesh
from autoshard.base.plan import OpPlan, Plan
from autoshard.cli import app
from autoshard.cli.read import parse_seeds
from autoshard.cost.cluster import Cluster, load_cluster
from autoshard.errors import AutoshardError, PlanError
from autoshard.report.text import show
from autoshard.report.what import to_json
from autoshard.runtime.cache import cached
from autoshard.runtime.check_plan import check_fits
from autoshard.search.contest.read import read_problem
from autoshard.verification.models.subject import Call
from tests.support import fused_models

JUNK = st.one_of(st.none(), st.booleans(), st.integers(-3, 10**12), st.floats(), st.text(max_size=8),
                 st.sampled_from(["../../etc/passwd", "S9", "S0,S0", "R", "__import__('os').system('touch hacked')", "d=2", "[1, 2"]),
                 st.just([]), st.just({}), st.just([1]), st.just({"a": 1}))
FEW = settings(max_examples=60, deadline=None, derandomize=True,
               suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
MODEL = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
BATCH = (torch.zeros(8, 8), torch.zeros(8, 4))


@pytest.fixture(scope="module")
def plan():
    return autoshard.plan(MODEL, "d=2", BATCH, loss_fn=F.mse_loss, cluster="cpu-gloo")


@pytest.fixture(scope="module")
def graph():
    return Call(MODEL, BATCH, {}, F.mse_loss, None).traced().graph


def places(value, path=()):
    """Every place in a JSON value."""
    if path:
        yield path
    items = value.items() if isinstance(value, dict) else enumerate(value[:4]) if isinstance(value, list) else ()
    for key, inner in items:
        yield from places(inner, (*path, key))


def changed(data, path, value):
    out = copy.deepcopy(data)
    at = out
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = value
    return out


@FEW
@given(st.data())
def test_a_changed_plan_is_refused_or_shown(plan, graph, data):
    whole = json.loads(plan.to_json())
    mutated = changed(whole, data.draw(st.sampled_from(list(places(whole)))), data.draw(JUNK))
    try:
        found = Plan.from_json(json.dumps(mutated))
        to_json(found)
        show(found)
        check_fits(found, graph, found.mesh)
        Cluster.from_snapshot(found.cluster)
    except AutoshardError as e:
        assert str(e)


@FEW
@given(st.binary(max_size=60))
def test_a_file_of_anything_is_no_plan_and_no_profile(tmp_path, data):
    file = tmp_path / "x.toml"
    file.write_bytes(data)
    with pytest.raises(PlanError):
        Plan.load(file)
    with pytest.raises(AutoshardError):
        load_cluster(file)


def test_deep_nesting_is_no_plan():
    with pytest.raises(PlanError, match="not JSON"):
        Plan.from_json("[" * 200_000)


def test_a_strategy_that_no_rule_has_is_refused_before_it_gives_wrong_numbers(plan, graph):
    check_fits(plan, graph, plan.mesh)
    name = next(op.name for op in graph.of_kind("call") if "mm" in op.name and len(op.refs) >= 2)
    whole = json.loads(plan.to_json())
    whole["ops"][name] = {"inputs": ["R"] * len(whole["ops"][name]["inputs"]), "outputs": ["P"]}
    with pytest.raises(PlanError, match=rf"strategy for {name} .* none that the op's sharding rule has"):
        check_fits(Plan.from_json(json.dumps(whole)), graph, plan.mesh)


@pytest.mark.parametrize("way", ["split", "view"])
@pytest.mark.parametrize("name", ["qkv.weight", "qkv.bias"])
def test_a_plan_that_hands_out_whole_parts_of_a_dim_is_refused(way, name):
    """q for the first rank and v for the last divides evenly, and is not what the ranks would store."""
    model, batch = fused_models.Attention(way), (torch.zeros(3, 6, fused_models.WIDTH),)
    plan = autoshard.plan(model, "d=3", batch, cluster="cpu-gloo")
    traced = Call(model, batch, {}, None, None).traced().graph
    check_fits(plan, traced, plan.mesh)
    stored = {f"param:{name}": OpPlan((), ((0,),)), f"grad:{name}": OpPlan(((0,),), ())}
    with pytest.raises(PlanError, match=rf"strategy for param:{name} .* whole parts"):
        check_fits(replace(plan, ops={**plan.ops, **stored}, placements={**plan.placements, name: (0,)}), traced, plan.mesh)


@pytest.mark.parametrize("content", ["", "{", "null", '{"format": 1}', "\x80\x81", "not fitting"])
def test_a_corrupt_cache_file_is_ignored_with_a_warning(tmp_path, plan, content, caplog):
    def check(found):
        if content == "not fitting":
            raise PlanError("another program")

    path = tmp_path / "key.json"
    path.write_bytes(plan.to_json().encode() if content == "not fitting" else content.encode("latin-1"))
    assert cached(tmp_path, "key", lambda: plan, check) is plan
    assert "ignoring cached plan" in caplog.text
    assert Plan.load(path) == plan, "and replaced by a good one"
    assert [p.name for p in tmp_path.iterdir()] == ["key.json"], "no temporary files are left"


@FEW
@given(st.data())
def test_a_changed_cache_file_is_taken_or_replaced(tmp_path, plan, graph, data):
    """Whatever stands there, what comes back fits the program, and so does what is then on disk."""
    whole, path = json.loads(plan.to_json()), tmp_path / "key.json"
    mutated = changed(whole, data.draw(st.sampled_from(list(places(whole)))), data.draw(JUNK))
    path.write_text(json.dumps(mutated)[:data.draw(st.sampled_from([None, 7, 2000]))])
    for _ in range(2):
        found = cached(tmp_path, "key", lambda: plan, lambda found: check_fits(found, graph, plan.mesh))
        check_fits(found, graph, plan.mesh)
    assert Plan.load(path) == found


PROFILE = (Path(autoshard.__file__).parent / "cost" / "clusters" / "cpu-gloo.toml").read_text().splitlines()
VALUES = ["0", "-1", "1e308", "1e-308", "nan", "inf", '"x"', "true", "[]", "{}", '""', "[[1, 2], [1, 3]]", '"../../etc/passwd"', "9" * 400,
          '{ value = 0, source = "x" }', '{ value = 1e300, source = "x" }', '{ value = -1.0, source = "x" }', '{ value = "x" }']


@FEW
@given(st.sampled_from([i for i, line in enumerate(PROFILE) if "=" in line]), st.sampled_from(VALUES) | st.none())
def test_a_changed_profile_is_refused_or_plans(tmp_path, line, value):
    """None: the line is left out."""
    key = PROFILE[line].partition("=")[0]
    (tmp_path / "p.toml").write_text("\n".join([*PROFILE[:line], *([] if value is None else [f"{key}= {value}"]), *PROFILE[line + 1:]]))
    try:
        made = autoshard.plan(MODEL, "d=2", BATCH, loss_fn=F.mse_loss, cluster=str(tmp_path / "p.toml"), time_limit=2.0)
        assert made.objective_s >= 0
    except AutoshardError as e:
        assert str(e)


@FEW
@given(st.text(max_size=30) | st.dictionaries(st.text(max_size=4), JUNK, max_size=3).map(str) | st.sampled_from(
    ["a: &a [*a]", "!!python/object/apply:os.system ['touch hacked']", "a: d,-\na: d,-", "? [1, 2]\n: 3", "a: 2026-01-01", "a: 2026-13-45", "? []", "[" * 5000, "- a", "0x1: d", "a:\n  b: c"]))
def test_any_seeds_file_is_read_or_refused(tmp_path, text):
    (tmp_path / "seeds.yaml").write_text(text, encoding="utf-8", errors="surrogateescape")
    try:
        parse_seeds([], tmp_path / "seeds.yaml")
    except AutoshardError as e:
        assert str(e)
    assert not Path("hacked").exists()


CONTEST = {"problem": {"name": "x", "nodes": {"intervals": [[0, 2], [1, 3]], "costs": [[1, 2], [3, 4]], "usages": [[1, 2], [3, 4]]},
                       "edges": {"nodes": [[0, 1]], "costs": [[0, 1, 2, 3]]}, "usage_limit": 6}}


@FEW
@given(st.sampled_from(list(places(CONTEST))), JUNK)
def test_a_changed_problem_is_solved_or_refused(tmp_path, path, value):
    (tmp_path / "p.json").write_text(json.dumps(changed(CONTEST, path, value)))
    try:
        problem = read_problem(tmp_path / "p.json")
    except AutoshardError as e:
        assert str(e)
        return
    assert [len(costs) for costs in problem.node_costs] == [2, 2] or path[:3] == ("problem", "nodes", "costs")


@FEW
@given(st.text(max_size=20) | st.from_regex(r"[a-z]{0,3}=?-?[0-9]{0,9}([,x][a-z]{0,2}=?[0-9.]{0,4}){0,3}", fullmatch=True))
def test_any_text_is_a_mesh_or_an_error(text):
    try:
        mesh = parse_mesh(text)
        assert parse_mesh(str(mesh)) == mesh
    except AutoshardError as e:
        assert str(e)


@FEW
@given(st.dictionaries(st.sampled_from(["0.weight", "*", "input:0", "2.*", "nothing", "[", "../x", "input:99", "user:0", ""]),
                       st.lists(st.sampled_from(["d", "t", "-", None, "?", ..., "*", "d*t", ("d", "t"), 3, "q"]), max_size=3).map(tuple) | JUNK,
                       max_size=2))
def test_any_seeds_give_a_plan_or_an_error(seeds):
    try:
        autoshard.plan(MODEL, "d=2,t=2", BATCH, loss_fn=F.mse_loss, cluster="cpu-gloo", seeds=seeds, time_limit=2.0)
    except AutoshardError as e:
        assert str(e)


@FEW
@given(st.lists(st.text(max_size=12) | st.sampled_from(["a=-", "a=d*t", "=", "a=(d*t),?", "a=[d,-]"]), max_size=3))
def test_any_seed_text_is_read_or_refused(texts):
    try:
        parse_seeds(texts)
    except AutoshardError as e:
        assert str(e)


OPTIONS = {"--mesh": ["d=2", "dp=2,tp=2", "0", "d=-1", "x", "", "d=2,d=2", "d=999999999999"], "--batch": ["4", "0", "-1", "x"],
           "--cluster": ["cpu-gloo", "nowhere", "/etc/passwd", "../x.toml", ""], "--memory": ["1GiB", "1", "x", "-5", "nan"],
           "--dtype": ["bf16", "int8"], "--precision": ["bf16", "param=", "a=b"], "--optimizer": ["sgd", "rocket"],
           "--seed": ["0.weight=d,-", "*=?", "=", "x"], "--time-limit": ["1", "0", "nan", "-1"], "--search": ["auto", "magic"],
           "--hf": ["/nowhere/config.json", "/etc/passwd"], "--plans": ["split", "nothing"], "--steps": ["1", "0", "x"]}


@settings(FEW, max_examples=40)
@given(st.sampled_from(["plan", "verify", "report", "clusters", "solve", "compare", "explain", "diff", "memory", "calibrate", "nonsense"]),
       st.sampled_from([["mlp:tiny"], ["mlp:huge"], ["os:system"], ["json:loads"], ["../models/mlp"], ["/etc/passwd"], []]),
       st.lists(st.sampled_from(sorted(OPTIONS)).flatmap(lambda o: st.tuples(st.just(o), st.sampled_from(OPTIONS[o]))), max_size=3))
def test_any_arguments_end_with_a_code_and_no_traceback(command, model, options):
    words = [command, *model, *(w for pair in options for w in pair)]
    result = CliRunner().invoke(app, words)
    fine = result.exception is None or isinstance(result.exception, (SystemExit, AutoshardError))
    assert fine, f"autoshard {' '.join(words)}: {result.exception!r}"


def test_nothing_here_reads_pickles_or_unsafe_yaml():
    """Files are data: plans and caches are JSON, profiles TOML, checkpoints torch.distributed.checkpoint's own reader."""
    for path in Path(autoshard.__file__).parent.rglob("*.py"):
        text = path.read_text()
        loads = re.findall(r"pickle\.loads?\(|yaml\.(?:unsafe_)?load\(|marshal\.loads?|torch\.load\([^\n]*", text)
        assert all("weights_only=True" in found for found in loads), f"{path.name}: {loads}"


@pytest.mark.parametrize("value", ["nan", "inf", "-inf"])
def test_numbers_of_a_plan_are_finite(plan, value):
    whole = json.loads(plan.to_json())
    with pytest.raises(PlanError, match=f"bound_s is {value}; a finite number is needed"):
        Plan.from_json(json.dumps({**whole, "bound_s": float(value)}))
