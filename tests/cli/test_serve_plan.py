"""`autoshard serve-plan`: the table, JSON, plan files, and what is refused."""
from __future__ import annotations

import json
import re

import pytest

from autoshard.base.plan import Plan

TINY = ["serve-plan", "llama:tiny", "--mesh", "tp=2", "--prompt", "8", "--new", "4", "--batches", "1,2", "--time-limit", "20"]


def test_a_table_and_plans(run, tmp_path):
    code, out, err = run(*TINY, "--slo", "tpot=1s", "--save-dir", tmp_path / "plans")
    assert code == 0, err
    for words in ("llama:tiny on tp=2 of h100-dgx", "tokens/s/device", "picked: batch 2", "largest batch of these that fits: 2"):
        assert words in out
    prompt, token = (Plan.load(tmp_path / "plans" / f"{name}.json") for name in ("prompt", "token"))
    assert prompt.placements == token.placements and prompt.graph_hash != token.graph_hash


def test_json_is_all_there_is_on_standard_output(run):
    code, out, err = run(*TINY, "--json", "-q")
    said = json.loads(out)
    assert (code, err, said["picked"], said["context"]) == (0, "", 2, 12)
    first = said["points"][0]
    assert first["fits"] and first["request_s"] == pytest.approx(first["first_token_s"] + 3 * first["token_s"])
    assert first["tokens_per_s_and_device"] == pytest.approx(4 / first["request_s"] / 2)
    assert first["whole_cache_bytes"] == 2 * 2 * 4 * 12 * 8 * 4  # keys and values, 2 layers, 4 heads, 12 tokens, 8 numbers in float32


def test_a_level_that_cannot_be_met_is_said_below_the_table(run):
    code, out, err = run(*TINY, "--slo", "tpot=1us,ttft=1s")
    assert code == 2 and "first token" in out and "Traceback" not in err
    assert "no batch that was tried meets the service level: tpot is 0.001 ms, and the least is" in err


@pytest.mark.parametrize(("change", "words"), [
    (["--slo", "tpot=fast"], "service level"), (["--batches", "many"], "batches"), (["--context", "4"], "larger context"),
    (["--mesh", "tp=x"], "tp=x"), (["--mesh", "pp=2,tp=2"], "not divided into pipeline stages"), (["--hf", "config.json"], "not both"), (["--dtype", "int8"], "dtype"), (["--cluster", "none"], "none"),
])
def test_bad_input_is_refused_in_a_sentence(run, change, words):
    code, out, err = run(*TINY, *change)
    assert (code, out) == (2, "") and words in err and "Traceback" not in err


def test_a_model_without_caches_says_which_have_them(run):
    code, _, err = run("serve-plan", "gpt:tiny", "--mesh", "tp=2")
    assert code == 2 and "those that have: llama" in err


def test_a_config_of_transformers(run, tmp_path):
    pytest.importorskip("transformers")
    (tmp_path / "config.json").write_text(json.dumps({
        "model_type": "mamba", "vocab_size": 251, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 4, "time_step_rank": 4}))
    code, out, err = run("serve-plan", "--hf", tmp_path / "config.json", "--mesh", "tp=2", "--prompt", "4", "--new", "4", "--batches", "2", "--json", "-q")
    assert code == 0, err
    assert json.loads(out)["points"][0]["whole_cache_bytes"] == 2 * 2 * (64 * 4 + 64 * 4) * 4  # 2 layers, 2 sequences, two states


def test_a_page_has_the_figures_of_the_picked_batch_and_the_plan_of_its_token(run, tmp_path):
    html = tmp_path / "serving.html"
    code, out, err = run(*TINY, "--slo", "tpot=1s", "--html", html, "--save-dir", tmp_path, "--json")
    assert code == 0 and str(html) in err, err
    said = json.loads(out)["points"][1]
    data = json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', html.read_text(), re.DOTALL)[1])
    shown = data["serving"]
    assert (shown["batch"], shown["largest"], shown["first"], shown["token"], shown["cache"]) == (
        2, 2, said["first_token_s"], said["token_s"], said["cache_bytes"])
    assert [row[0] for row in data["tables"]["serving"]["rows"]] == [1, 2] and data["tables"]["serving"]["rows"][1][3] == said["token_s"]
    assert data["objective"] == Plan.load(tmp_path / "token.json").objective_s
    code, _, err = run(*TINY, "--html", "/no/such/folder/page.html")
    assert code == 2 and "/no/such/folder" in err and "trace" not in err
