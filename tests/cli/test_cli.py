"""The command line: what it prints where, and one clear message with exit code 2 for every mistake."""
from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
from sample_plan import sample_plan

from autoshard import cli
from autoshard.base.plan import Plan
from autoshard.cli.read import parse_precision, parse_seeds
from autoshard.cli.request import Request
from autoshard.cost.cluster import Cluster
from autoshard.errors import UsageError

GPT = ["plan", "gpt:tiny", "--mesh", "tp=2", "--cluster", "cpu-gloo", "--time-limit", "20"]
MLP = ["plan", "mlp", "--mesh", "d=2", "--cluster", "cpu-gloo"]
TWO_NODES = {"problem": {
    "name": "two nodes", "nodes": {"intervals": [[0, 1], [0, 1]], "costs": [[1, 5], [4, 1]], "usages": [[0, 0], [0, 0]]},
    "edges": {"nodes": [[0, 1]], "costs": [[0, 9, 9, 0]]}, "usage_limit": 10}}


def assert_refused(result: tuple[int, str, str], *words: str) -> None:
    code, out, err = result
    assert code == 2, err
    assert out == ""
    assert "Traceback" not in err
    for word in words:
        assert word in err, f"{word!r} is not in: {err}"


# -- what works -----------------------------------------------------------------------------------

def test_plan_prints_a_report_and_saves_the_plan(run, tmp_path):
    path = tmp_path / "plan.json"
    code, out, err = run(*GPT, "-o", path)
    assert code == 0, err
    assert "Predicted step time" in out and "h.*" in out and "tp=2 (2 ranks)" in out
    assert "trace" in err and "search" in err
    assert Plan.load(path).model["reference"] == "gpt:tiny"
    assert [p.name for p in tmp_path.iterdir()] == ["plan.json"]
    code, again, _ = run("report", path)
    assert code == 0 and "Predicted step time" in again


def test_plan_json_is_only_json(run):
    code, out, _ = run(*MLP, "--json")
    data = json.loads(out)
    assert code == 0
    assert {"objective_s", "bound_s", "gap", "status", "predicted", "stages", "collectives", "placements",
            "timings"} <= set(data)
    assert data["objective_s"] == pytest.approx(data["predicted"]["step_s"])
    assert data["bound_s"] <= data["objective_s"]
    assert "search" in data["timings"]


STAGES = ["gpt:tiny", "--mesh", "pp=2,dp=2", "--batch", "4", "--microbatches", "2", "--schedule", "gpipe", "--cut", "h.1", "--cluster", "cpu-gloo"]


def test_a_page_of_a_pipeline_is_of_the_plan_with_its_stages(run, tmp_path):
    code, out, err = run("plan", *STAGES, "--html", tmp_path / "page.html", "--json")
    assert code == 0, err
    assert [s["index"] for s in json.loads(out)["stages"]] == [0, 1]


@pytest.mark.parametrize("command", [["explain", "--op", "h.0.mlp.c_fc"], ["memory"]])
def test_what_looks_at_one_program_refuses_stages(run, command):
    assert_refused(run(command[0], *STAGES, *command[1:]), "pp", "leave that axis out of the mesh")


def test_same_arguments_give_the_same_bytes(run, tmp_path):
    first, second = tmp_path / "a.json", tmp_path / "b.json"
    assert run(*MLP, "-q", "-o", first)[0] == run(*MLP, "-q", "-o", second)[0] == 0
    assert first.read_bytes() == second.read_bytes()


def test_quiet_prints_nothing(run, tmp_path):
    assert run(*MLP, "--quiet", "-o", tmp_path / "p.json") == (0, "", "")


def test_inference_has_no_gradients(run):
    code, out, _ = run(*MLP, "--inference", "--json")
    data = json.loads(out)
    assert code == 0 and data["settings"]["training"] is False and data["stages"][0]["memory"]["gradients"] == 0


def test_seed_holds(run):
    code, out, err = run(*MLP, "--json", "--seed", "input:0=d,-")
    assert code == 0, err
    assert [x["spec"] for x in json.loads(out)["layouts"] if x["name"] == "input:0"] == ["S0"]


def test_report_of_a_saved_plan(run, tmp_path):
    path = tmp_path / "plan.json"
    sample_plan().save(path)
    code, out, err = run("report", path)
    assert code == 0 and err == "" and "layers.{0-2}" in out
    assert json.loads(run("report", path, "--json")[1])["objective_s"] == 1.0


def test_quiet_means_the_same_everywhere(run, tmp_path):
    """No progress and no report; files are written and JSON is printed. Mistakes are still named."""
    plan, page, answer = tmp_path / "plan.json", tmp_path / "page.html", tmp_path / "answer.json"
    sample_plan().save(plan)
    problem = tmp_path / "problem.json"
    problem.write_text(json.dumps(TWO_NODES))
    assert run("report", plan, "-q") == (0, "", "")
    assert run("report", plan, "--quiet", "--html", page) == (0, "", "") and page.exists()
    assert json.loads(run("report", plan, "-q", "--json")[1])["objective_s"] == 1.0
    assert run("clusters", "-q") == run("clusters", "show", "h100-dgx", "-q") == run("clusters", "-q", "show", "h100-dgx") == (0, "", "")
    assert_refused(run("clusters", "show", "h100-dgxx", "-q"), "h100-dgx")
    solve = ("solve", problem, "-q", "--time-limit", 10**6)  # from when this process began
    assert run(*solve, "-o", answer) == (0, "", "") and json.loads(answer.read_text())["status"] == "optimal"
    assert json.loads(run(*solve, "--json")[1])["status"] == "optimal"


def test_clusters(run):
    code, out, _ = run("clusters")
    assert code == 0 and all(name in out for name in ("h100-dgx", "a100-dgx", "cpu-gloo"))
    code, out, _ = run("clusters", "show", "h100-dgx")
    assert code == 0 and "memory_bandwidth" in out


def test_clusters_as_json(run):
    code, out, _ = run("clusters", "--json")
    found = {c["name"]: c for c in json.loads(out)}
    assert code == 0 and found["h100-dgx"]["links"][0]["devices"] == 8 and found["h100-dgx"]["links"][-1]["devices"] is None
    assert "cpu-gloo:shared" in found and all(c["memory"] > 1e9 and c["device"] for c in found.values())
    shown = [run(*words) for words in (("clusters", "show", "h100-dgx", "--json", "-q"), ("clusters", "--json", "show", "h100-dgx"))]
    profile = json.loads(shown[0][1])
    assert shown[0] == shown[1] and Cluster.from_snapshot({k: v for k, v in profile.items() if k != "sources"}).name == "h100-dgx"
    assert profile["sources"]


@pytest.mark.parametrize("arguments", [[], ["plan"], ["report"], ["clusters"], ["clusters", "show"], ["solve"]])
def test_help_has_examples_or_says_what_it_does(run, arguments):
    code, out, _ = run(*arguments, "--help")
    assert code == 0 and "Usage: autoshard" in out
    if arguments in ([], ["plan"], ["clusters"], ["solve"]):
        assert "Examples" in out


def test_help_is_quick():
    start = time.process_time()
    spent = _cpu_seconds([sys.executable, "-m", "autoshard", "plan", "--help"])
    assert spent < 1.0, f"{spent:.2f} s of CPU time, {time.process_time() - start:.2f} s here"


def _cpu_seconds(command: list[str]) -> float:
    code = ("import resource, subprocess, sys; subprocess.run(sys.argv[1:], check=True, stdout=subprocess.DEVNULL);"
            "u = resource.getrusage(resource.RUSAGE_CHILDREN); print(u.ru_utime + u.ru_stime)")
    done = subprocess.run([sys.executable, "-c", code, *command], capture_output=True, text=True, check=True)
    return float(done.stdout)


def test_solve_writes_an_answer(tmp_path):
    problem, answer = tmp_path / "problem.json", tmp_path / "answer.json"
    problem.write_text(json.dumps(TWO_NODES))
    done = subprocess.run([sys.executable, "-m", "autoshard", "solve", problem, "--time-limit", "20", "-o", answer],
                          capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert json.loads(answer.read_text())["cost"] == 5  # both first: 1 + 4; both second: 5 + 1; else 9 more
    assert "cost     5" in done.stdout


# -- mistakes -------------------------------------------------------------------------------------

def test_unknown_model(run):
    assert_refused(run("plan", "lama:8b", "--mesh", "tp=2"), "lama", "llama", "package.module:factory")


def test_unknown_size(run):
    assert_refused(run("plan", "llama:9b", "--mesh", "tp=2"), "llama", "9b", "8B")


def test_no_model(run):
    assert_refused(run("plan", "--mesh", "tp=2"), "no model", "--hf")


def test_missing_hugging_face_config(run, tmp_path):
    assert_refused(run("plan", "--hf", tmp_path / "none.json", "--mesh", "tp=2"), "none.json")


@pytest.mark.parametrize(("mesh", "words"), [
    ("dp=2,tp", ("dp=2,tp", "dp=2,tp=4")),
    ("banana", ("banana", "dp=2,tp=4")),
    ("dp=2,dp=4", ("'dp'", "twice")),
    ("dp=0", ("'dp'", "0", "at least 1")),
    ("dp=-2", ("'dp'", "-2", "at least 1")),
    ("2d=2", ("2d", "identifier")),
])
def test_bad_mesh(run, mesh, words):
    assert_refused(run("plan", "mlp", "--mesh", mesh), *words)


def test_mesh_is_needed(run):
    code, _, err = run("plan", "mlp")
    assert code == 2 and "--mesh" in err


def test_unknown_cluster_names_the_nearest(run):
    assert_refused(run("plan", "mlp", "--mesh", "d=2", "--cluster", "h100dgx"), "h100dgx", "h100-dgx")


def test_unknown_cluster_to_show(run):
    assert_refused(run("clusters", "show", "h200"), "h200", "did you mean")


def test_memory_that_does_not_parse(run):
    assert_refused(run(*MLP, "--memory", "lots"), "lots", "70GiB")


@pytest.mark.parametrize("memory", ["0", "0GiB"])
def test_memory_that_is_not_positive(run, memory):
    assert_refused(run(*MLP, "--memory", memory), "memory", "positive")


def test_infeasible_memory_says_how_much_is_needed(run, tmp_path):
    path = tmp_path / "plan.json"
    assert_refused(run(*MLP, "--quiet", "--memory", "4KiB", "-o", path),
                   "no plan fits", "Its peak is in", "(proven)", "least found")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("option", "value", "words"), [
    ("--seed", "nothing", ("nothing", "tp,-")),
    ("--seed", "no.such.weight=d,-", ("no.such.weight", "matches nothing")),
    ("--seed", "input:0=zz,-", ("zz",)),
    ("--precision", "bf17", ("bf17", "bf16")),
    ("--precision", "parm=bf16", ("parm", "param=bf16")),
    ("--dtype", "bf17", ("bf17", "bf16")),
    ("--batch", "0", ("batch", "0")),
    ("--batch", "-4", ("batch", "-4")),
    ("--seq", "16", ("seq",)),
    ("--time-limit", "0", ("time_limit", "positive")),
    ("--search", "magic", ("magic",)),
    ("--optimizer", "magic", ("magic", "adamw")),
])
def test_bad_option(run, option, value, words):
    assert_refused(run(*MLP, "--quiet", option, value), *words)


def test_seed_given_twice(run):
    assert_refused(run(*MLP, "-q", "--seed", "input:0=d,-", "--seed", "input:0=-,d"), "input:0", "twice")


def test_output_in_a_missing_folder_is_refused_before_the_work(run, tmp_path):
    result = run(*MLP, "-o", tmp_path / "missing" / "plan.json")
    assert_refused(result, "cannot write", "missing")
    assert "trace" not in result[2]


def test_output_that_is_a_folder(run, tmp_path):
    assert_refused(run(*MLP, "-o", tmp_path), "cannot write", "folder")


def test_no_result_is_written_over_another_file_of_the_command(run, tmp_path):
    """The report would have been lost under the plan, and the plan, the seeds or the problem under a result."""
    plan, seeds, problem = tmp_path / "plan.json", tmp_path / "seeds.yaml", tmp_path / "problem.json"
    assert_refused(run(*MLP, "-o", plan, "--html", tmp_path / "." / "plan.json"), "--html", "plan.json", "over the file of -o")
    assert list(tmp_path.iterdir()) == []
    for path in (plan, seeds, problem):
        path.write_text("kept")
    assert_refused(run("report", plan, "--html", plan), "--html", "reads")
    assert_refused(run("simulate", plan, "--trace", plan), "--trace", "reads")
    assert_refused(run("simulate", plan, "--trace", tmp_path / "x", "--html", tmp_path / "x"), "--html", "over the file of --trace")
    assert_refused(run(*MLP, "--seeds", seeds, "-o", seeds), "-o", "reads")
    assert_refused(run("solve", problem, "-o", problem), "over the problem")
    assert_refused(run("calibrate", "-o", tmp_path / "my.toml", "--plot", tmp_path / "my.toml"), "--plot", "over the profile")
    assert {path.read_text() for path in tmp_path.iterdir()} == {"kept"}
    assert run(*MLP, "-q", "-o", "/dev/null", "--html", "/dev/null") == (0, "", "")


def test_ctrl_c_says_so_in_every_command(run, monkeypatch):
    """typer ends without a word."""
    def stopped(path):
        raise KeyboardInterrupt

    monkeypatch.setattr(Plan, "load", stopped)
    assert run("report", "plan.json") == (130, "", "interrupted\n")
    assert run("diff", "plan.json", "plan.json", "-q") == (130, "", "interrupted\n")


def test_solve_without_a_limit(tmp_path):
    """Of a problem that takes a solver, in a process of its own: an infinite limit ended in its OverflowError."""
    path = tmp_path / "problem.json"
    path.write_text(json.dumps(TWO_NODES))
    for limit in ("inf", "1e300"):
        done = subprocess.run([sys.executable, "-m", "autoshard", "solve", path, "--time-limit", limit, "--json"], capture_output=True, text=True)
        assert done.returncode == 0 and json.loads(done.stdout)["cost"] == 5, done.stderr


def test_solve_of_a_missing_file(run, tmp_path):
    assert_refused(run("solve", tmp_path / "none.json"), "none.json")


def test_report_of_a_missing_file(run, tmp_path):
    assert_refused(run("report", tmp_path / "none.json"), "none.json", "No such file")


@pytest.mark.parametrize("text", ["", "not json", "[]", "{}", '{"format": 99}', '{"format": 1}', '{"format": 1, "x": 2}'])
def test_report_of_something_else(run, tmp_path, text):
    path = tmp_path / "plan.json"
    path.write_text(text)
    assert_refused(run("report", path), "plan.json")


def test_report_of_a_binary_file(run, tmp_path):
    path = tmp_path / "plan.json"
    path.write_bytes(b"\xff\xfe\x00")
    assert_refused(run("report", path), "plan.json")


def test_missing_package_is_named(run, monkeypatch):
    def missing(*_, **__):
        raise ModuleNotFoundError("No module named 'ortools'", name="ortools")

    monkeypatch.setattr(Request, "plan", missing)
    assert_refused(run(*MLP, "-q"), "ortools", "pip install")


def test_missing_transformers_is_named(run, monkeypatch, tmp_path):
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]}))
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert_refused(run("plan", "--hf", config, "--mesh", "tp=2", "-q"), "transformers", "pip install")


def test_an_own_factory_with_a_typo(run, tmp_path, monkeypatch):
    (tmp_path / "my_small_model.py").write_text("def factory():\n    return 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert_refused(run("plan", "my_small_model:factry", "--mesh", "d=2", "-q"), "factry", "factory")
    assert_refused(run("plan", "my_small_model:factory", "--mesh", "d=2", "-q"), "(model, example_inputs)")


# -- option parsing -------------------------------------------------------------------------------

def test_seeds_parse():
    found = parse_seeds(["wq.weight=tp,-", "x=dp*tp,?", "y=[-,tp]"])
    assert {key: str(seed) for key, seed in found.items()} == {"wq.weight": "tp,-", "x": "dp*tp,?", "y": "-,tp"}


@pytest.mark.parametrize("text", ["wq", "=tp", "wq="])
def test_seeds_that_do_not_parse(text):
    with pytest.raises(UsageError, match="cannot read seed"):
        parse_seeds([text])


def test_precision_parses():
    assert parse_precision(None) is None
    short, long = parse_precision("bf16"), parse_precision("param=bf16,reduce=bf16")
    assert (short.param, short.master, short.reduce) == ("bf16", "fp32", "fp32")
    assert (long.param, long.master, long.reduce) == ("bf16", "fp32", "bf16")


def test_module_entry_point_exits_with_2():
    done = subprocess.run([sys.executable, "-m", "autoshard", "clusters", "show", "nope"],
                          capture_output=True, text=True, cwd=Path(cli.__file__).parents[2])
    assert done.returncode == 2 and done.stderr.startswith("error: ")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no file that is always full")
def test_a_full_disk_is_a_message():
    with open("/dev/full", "w") as full:
        done = subprocess.run([sys.executable, "-m", "autoshard", "clusters", "show", "h100-dgx"], stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 2 and "disk is full" in done.stderr and "Traceback" not in done.stderr and "ignored" not in done.stderr


def test_memory_sweeps_budgets(run):
    code, out, err = run("memory", "mlp:tiny", "--mesh", "dp=4", "--steps", "3", "--json", "--quiet")
    points = json.loads(out)
    assert code == 0 and [p["budget_bytes"] for p in points] == sorted((p["budget_bytes"] for p in points), reverse=True)
    fitting = [p for p in points if p["fits"]]
    assert fitting and all(p["peak_bytes"] <= p["budget_bytes"] for p in fitting)
    assert [p["step_s"] for p in fitting] == sorted(p["step_s"] for p in fitting)
