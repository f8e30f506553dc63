"""`compare`, `explain`, `diff`, `--seeds`, `--search propagate` and logging on the command line."""
from __future__ import annotations

import json
import logging
from importlib import resources

import pytest
from test_cli import assert_refused

from autoshard.base.logs import configure
from autoshard.base.plan import Plan
from autoshard.errors import UsageError

MLP = ["mlp", "--mesh", "d=2", "--cluster", "cpu-gloo"]


def test_compare_prints_saves_and_replays(run, tmp_path):  # noqa: F811
    code, out, err = run("compare", *MLP, "--save-dir", tmp_path / "plans")
    assert code == 0, err
    for name in ("chosen by the search", "DDP", "ZeRO-1", "ZeRO-2", "FSDP (ZeRO-3)", "Megatron TP", "tensor d", "faster"):
        assert name in out
    assert {p.name for p in (tmp_path / "plans").iterdir()} == {
        "chosen.json", "ddp.json", "zero-1.json", "zero-2.json", "fsdp.json", "megatron-tp.json", "tp-sequence-parallel.json"}
    saved = Plan.load(tmp_path / "plans" / "fsdp.json")
    assert saved.status == "by hand: FSDP (ZeRO-3) (data d)" and saved.bound_s == 0
    assert run("report", tmp_path / "plans" / "ddp.json")[0] == 0


def test_compare_json_and_quiet(run):  # noqa: F811
    code, out, _ = run("compare", *MLP, "--json", "-q")
    rows = json.loads(out)["rows"]
    assert code == 0 and rows[0]["name"] == "chosen by the search"
    fitting = [r["step_s"] for r in rows[1:] if r["fits"]]
    assert rows[0]["step_s"] <= min(fitting) * (1 + 1e-9)
    assert run("compare", *MLP, "--quiet") == (0, "", "")


def test_compare_into_a_file_is_refused(run, tmp_path):  # noqa: F811
    (tmp_path / "x").write_text("")
    assert_refused(run("compare", *MLP, "--save-dir", tmp_path / "x"), "cannot make folder")


@pytest.fixture
def saved(run, tmp_path):  # noqa: F811
    path = tmp_path / "plan.json"
    assert run("plan", *MLP, "-q", "-o", path, "--seed", "input:0=d,-")[0] == 0
    return path


def test_explain_a_plan_file(run, saved):  # noqa: F811
    code, out, err = run("explain", saved, "--edge", "relu_0->layers.1")
    assert code == 0 and "chosen" in out and "redistribution" in out, err
    code, out, _ = run("explain", saved, "--op", "layers.1", "--json", "-q", "--rows", 3)
    data = json.loads(out)
    assert code == 0 and len(data["rows"]) == 3 and data["rows"][0]["regret_s"] == 0
    code, out, _ = run("explain", saved, "--why-not", "layers.0.weight=S(1)", "-q", "--json")
    data = json.loads(out)
    assert code == 0 and data["key"] == "layers.0.weight" and data["regret_s"] == data["after_s"] - data["before_s"]
    code, out, _ = run("explain", saved, "--why-not", "layers.0=-,d")
    assert code == 0 and "Why not?" in out and "a step takes" in out


def test_explain_a_plan_without_the_file_of_its_profile(run, tmp_path):  # noqa: F811
    """The plan brings the profile along."""
    profile, path = tmp_path / "mine.toml", tmp_path / "plan.json"
    profile.write_text((resources.files("autoshard.cost") / "clusters/cpu-gloo.toml").read_text().replace('name = "cpu-gloo"', 'name = "mine"'))
    assert run("plan", *MLP, "-q", "-o", path, "--cluster", profile)[0] == 0
    profile.unlink()
    assert json.loads(path.read_text())["cluster"]["name"] != "cpu-gloo"
    code, out, err = run("explain", path, "--op", "layers.1", "--json", "-q")
    assert code == 0 and json.loads(out)["rows"], err


def test_explain_one_pair_of_layouts(run):  # noqa: F811
    pair = ("explain", "mlp", "--mesh", "a=2,b=2", "--edge", "relu_0->addmm_1", "--source", "a,b", "--target")
    code, out, _ = run(*pair, "b*a,-")
    assert code == 0 and "(b*a)" in out and "AllToAll" in out and "nest axes in mesh order" in out
    assert json.loads(run(*pair, "a*b,-", "--json", "-q")[1])["in_plans"] is True
    code, _, err = run("explain", "mlp", "--mesh", "a=2,b=2", "--edge", "relu_0->addmm_1", "--target", "a,b")
    assert code != 0 and "--target is one end of a pair" in err


def test_explain_a_model_with_a_source(run):  # noqa: F811
    code, out, _ = run("explain", "mlp", "--mesh", "a=2,b=2", "--edge", "relu_0->addmm_1", "--source", "S(0),S(1)", "--rows", 5)
    assert code == 0 and "[a, b]" in out and "AllToAll" in out + run(
        "explain", "mlp", "--mesh", "a=2,b=2", "--edge", "relu_0->addmm_1", "--source", "a,b", "--rows", 500)[1]


@pytest.mark.parametrize(("arguments", "words"), [
    (["mlp", "--mesh", "d=2"], ("give one of --edge, --op and --why-not",)),
    (["mlp", "--mesh", "d=2", "--op", "x", "--edge", "a->b"], ("give one of", "not 2")),
    (["mlp", "--op", "relu_0"], ("--mesh is missing", "plan file")),
    (["none.json", "--op", "relu_0"], ("none.json",)),
    (["mlp", "--mesh", "d=2", "--op", "layers.9"], ("'layers.9'", "nearest")),
    (["mlp", "--mesh", "d=2", "--why-not", "layers.0.weight"], ("cannot read --why-not", "S(0),R")),
    (["mlp", "--mesh", "d=2", "--why-not", "layers.0.weight=zz,-"], ("zz",)),
    (["mlp", "--mesh", "d=2", "--edge", "relu_0->relu_1", "-q"], ("reads nothing that relu_0 makes",)),
])
def test_explain_mistakes(run, arguments, words):  # noqa: F811
    code, out, err = run("explain", *arguments)
    assert code == 2 and out == "" and "Traceback" not in err
    for word in words:
        assert word in err


@pytest.mark.parametrize("given", [("--mesh", "tp=4"), ("--batch", "4"), ("--inference",), ("--seed", "layers.0.weight=d,-"), ("--hf", "x.json")])
def test_what_a_plan_file_says_is_not_asked_again(run, saved, given):  # noqa: F811
    """Such options were read and left aside."""
    assert_refused(run("explain", saved, "--op", "layers.1", *given), given[0], "plan.json", "leave it out")


def test_diff_exit_codes(run, saved, tmp_path):  # noqa: F811
    other = tmp_path / "other.json"
    assert run("plan", *MLP, "-q", "-o", other, "--seed", "layers.0.weight=d,-")[0] == 0
    code, out, _ = run("diff", saved, saved)
    assert code == 0 and "the same plan" in out
    code, out, _ = run("diff", saved, other)
    assert code == 1 and "Placements" in out and "seeds: input:0" in out
    code, out, _ = run("diff", saved, other, "--json")
    assert code == 1 and json.loads(out)["equal"] is False
    assert run("diff", saved, other, "-q") == (1, "", "")
    assert_refused(run("diff", saved, tmp_path / "none.json"), "none.json")


def test_seeds_from_a_file(run, tmp_path):  # noqa: F811
    path = tmp_path / "seeds.yaml"
    path.write_text("input:0: d,-\nlayers.0.weight: -,d\n")
    code, out, _ = run("plan", *MLP, "--json", "-q", "--seeds", path)
    data = json.loads(out)
    assert code == 0 and data["seeds"] == {"input:0": "d,-", "layers.0.weight": "-,d"}
    assert data["placements"]["layers.0.weight"] == "S1"
    assert_refused(run("plan", *MLP, "-q", "--seeds", path, "--seed", "input:0=-,d"), "seeds.yaml:1", "command line")
    assert_refused(run("plan", *MLP, "-q", "--seeds", tmp_path / "none.yaml"), "none.yaml")


def test_propagate_as_a_search(run):  # noqa: F811
    code, out, _ = run("plan", *MLP, "--search", "propagate", "--seed", "layers.0.weight=d,-")
    assert code == 0 and "propagated from the seeds" in out and "the search would gain" in " ".join(out.split())
    assert_refused(run("plan", *MLP, "-q", "--search", "propagate"), "there are none", "--seed")


@pytest.fixture
def quiet_again():
    yield
    logger = logging.getLogger("autoshard")
    for handler in logger.handlers[:]:
        logger.removeHandler(handler)
    logger.propagate = True
    for name in ("autoshard", "autoshard.search", "autoshard.trace"):
        logging.getLogger(name).setLevel(logging.NOTSET)


def test_logs(run, quiet_again):  # noqa: F811
    code, out, err = run("--logs", "+search,trace", "plan", *MLP, "-q")
    assert code == 0 and out == "" and "autoshard.search DEBUG" in err and "autoshard.assemble" not in err
    assert_refused(run("--logs", "everything", "plan", *MLP, "-q"), "'everything'", "search")
    with pytest.raises(UsageError, match="no phase"):
        configure("+bogus")


def test_offload(run, tmp_path):  # noqa: F811
    """A budget that is too small without; and what refuses it."""
    asked, path = ["mlp", "--mesh", "d=2", "--memory", "17e3", "--offload", "optimizer"], tmp_path / "plan.json"
    code, out, err = run("plan", *asked, "-o", path)
    assert code == 0 and "offload optimizer" in out and "lies on the host" in out, err
    plan = Plan.load(path)
    code, out, err = run("explain", path, "--op", f"param:{plan.offload[0]}", "--json", "-q")
    assert code == 0 and "optimizer state on the host" in json.loads(out)["rows"][0]["outputs"], err
    assert_refused(run("plan", *asked, "--cluster", "cpu-gloo"), "no link to its host", "device.host_link")
    assert_refused(run("memory", *asked[:3], *asked[5:], "--inference"), "inference has no optimizer state")
    assert_refused(run("compare", *asked, "--optimizer", "sgd"), "sgd keeps no state")
    assert_refused(run("verify", *asked), "numbers are the same wherever state lies")
