"""`autoshard verify` as a user calls it: verdicts, exit codes, what was scaled down."""
import json

import pytest
import torch
from typer.testing import CliRunner

from autoshard.base.spec import R
from autoshard.cli import app
from autoshard.errors import AutoshardError, UsageError
from autoshard.rules.types import Row
from autoshard.verification.models.shrink import shrunk
from autoshard.verification.models.small import Source, fitting

LLAMA = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
         "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 8192,
         "bos_token_id": 128000, "eos_token_id": 128001}


def called(*words):
    return CliRunner().invoke(app, ["verify", *words])


def test_a_table_and_code_0():
    result = called("mlp:tiny", "--mesh", "tp=2", "--plans", "split,random:4", "--steps", "2")
    assert result.exit_code == 0, result.output
    for text in ("Verified", "random:4", "layers.", "all 2 ranks in one process, 2 steps, in float64", "--batch"):
        assert text in result.output, text


def test_json_and_nothing_else_and_code_1_with_a_broken_rule(broken_rule):
    with broken_rule(torch.ops.aten.mm.default, Row((1, 0), (R,))):
        result = called("mlp:tiny", "--mesh", "tp=2", "--plans", "split", "--json", "--quiet")
        shown = called("mlp:tiny", "--mesh", "tp=2", "--plans", "split")
    assert result.exit_code == 1 and shown.exit_code == 1
    data = json.loads(result.stdout)
    assert not data["ok"] and data["plans"][0]["first_wrong"]["target"] == "aten.mm.default"
    assert "MISMATCH" in shown.output and "first wrong op: mm" in shown.output and "models/mlp.py:" in shown.output


def test_a_plan_file_is_run_as_it_was_made(tmp_path):
    path = str(tmp_path / "plan.json")
    made = CliRunner().invoke(app, ["plan", "mlp:tiny", "--mesh", "tp=2", "--batch", "16", "--seed", "layers.0.weight=tp,-", "-o", path, "-q"])
    assert made.exit_code == 0, made.output
    result = called("mlp:tiny", "--mesh", "tp=2", "--plan", path)
    assert result.exit_code == 0 and "the given plan" in result.output, result.output
    for given, words in (("--memory", "1KiB"), "memory_budget is 1.00 KiB"), (("--seed", "layers.1.weight=tp,-"), "where seed 'layers.1.weight'"):
        assert words in str(called("mlp:tiny", "--mesh", "tp=2", "--plan", path, *given).exception)
    other = called("mlp:tiny", "--mesh", "tp=2", "--plan", path, "--batch", "8")
    assert isinstance(other.exception, AutoshardError) and "another program" in str(other.exception)
    data = json.loads(open(path).read())
    data["model"]["batch"] = "../x"
    open(path, "w").write(json.dumps(data))
    assert isinstance(called("mlp:tiny", "--mesh", "tp=2", "--plan", path).exception, AutoshardError)


def test_the_search_that_is_asked_for():
    """It was left aside. The other kinds of plans are made as they always are."""
    result = called("mlp:tiny", "--mesh", "tp=2", "--search", "propagate", "--seed", "layers.0.weight=tp,-", "--plans", "searched,split", "--json")
    assert result.exit_code == 0 and len(json.loads(result.stdout)["plans"]) == 2
    assert "spreads seeds" in str(called("mlp:tiny", "--mesh", "tp=2", "--search", "propagate").exception)


@pytest.mark.dist
def test_real_processes():
    result = called("mlp:tiny", "--mesh", "tp=2", "--plans", "split", "--steps", "2", "--processes", "--json", "-q")
    data = json.loads(result.stdout)
    assert result.exit_code == 0 and data["ok"] and data["plans"][0]["ops_split"] > 30
    assert max(m["error"] for m in data["plans"][0]["modules"].values()) > 0, "a comparison of a thing with itself"


@pytest.mark.dist
def test_real_processes_under_a_policy(tmp_path):
    """The policy is that of the plan."""
    path = str(tmp_path / "plan.json")
    made = CliRunner().invoke(app, ["plan", "mlp:tiny", "--mesh", "tp=2", "--precision", "bf16", "--seed", "layers.0.weight=tp,-", "-o", path, "-q"])
    assert made.exit_code == 0, made.output
    for words in ((), ("--processes",)):
        result = called("mlp:tiny", "--mesh", "tp=2", "--plan", path, "--json", "-q", *words)
        data = json.loads(result.stdout)
        assert result.exit_code == 0 and data["dtype"] == "float32 and float64", result.output


def test_models_too_big_are_scaled_down_and_said_so(tmp_path):
    source, notes = fitting(Source("gpt:1.5b"), 4, str(tmp_path), budget=1e9)
    assert source.reference == "gpt:tiny" and any("gpt:tiny was run instead" in n for n in notes)
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    (tmp_path / "small").mkdir()
    source, notes = fitting(Source(None, str(tmp_path)), 4, str(tmp_path / "small"), budget=1e9)
    assert any("hidden_size 4096 -> 128" in n for n in notes)
    model = source.load(fake=True).model
    assert model.config.num_hidden_layers == 2 and model.config.num_attention_heads == 2 * 4 == 4 * model.config.num_key_value_heads
    with pytest.raises(UsageError, match="--plan"):
        fitting(Source("gpt:1.5b"), 4, str(tmp_path), whole=True, budget=1e9)
    with pytest.raises(UsageError, match="give a smaller model"):
        fitting(Source("gpt:tiny"), 4, str(tmp_path), budget=1e3)


def test_small_configs_stay_as_they_are():
    small, said = shrunk({"hidden_size": 32, "num_attention_heads": 2, "num_hidden_layers": 1, "vocab_size": 10})
    assert small["hidden_size"] == 32 and said == ""
