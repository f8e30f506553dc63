"""Every command of the pages on steering runs, in order, and does what its page says."""
from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from autoshard.base.plan import Plan

DOCS = Path(__file__).parents[2] / "docs"
DIFFERENT = 1


def commands(page: str) -> list[list[str]]:
    """The indented `autoshard` lines of a page, without the program's name."""
    return [shlex.split(line)[1:] for line in (DOCS / page).read_text().splitlines() if line.startswith("    autoshard ")]


def write_files(page: str, folder: Path) -> None:
    """YAML blocks whose first line names a file."""
    for block in re.findall(r"```yaml\n# ([^\s:]+)[^\n]*\n((?:.|\n)*?)```", (DOCS / page).read_text()):
        (folder / block[0]).write_text(block[1])


def test_the_tutorial(run, tmp_path, monkeypatch):  # noqa: F811
    monkeypatch.chdir(tmp_path)
    write_files("tutorial.md", tmp_path)
    found = commands("tutorial.md")
    assert len(found) >= 10
    for command in found:
        code, out, err = run(*command)
        assert code == (DIFFERENT if command[0] == "diff" else 0), f"{command}: {err}"
        assert out, command
    plans = {p.stem: Plan.load(p) for p in tmp_path.glob("*.json")}
    assert plans["free"].objective_s <= plans["steered"].objective_s <= plans["megatron"].objective_s
    assert all(x.spec[0] == 0 for x in plans["dp"].layouts if x.kind == "input")
    assert plans["megatron"].placements["h.1.mlp.c_fc.weight"] == (-1, 0), "seeds hold"
    assert plans["megatron"].objective_s <= 1.1 * plans["steered"].objective_s
    assert any("no layout without communication" in n for n in plans["megatron"].notes)
    assert "seed h.*.mlp holds for 2 tensors" in plans["marked"].notes


@pytest.mark.parametrize("page", ["seeds.md", "propagate.md", "explain.md"])
def test_commands_of_the_reference_pages(run, tmp_path, monkeypatch, page):  # noqa: F811
    monkeypatch.chdir(tmp_path)
    write_files(page, tmp_path)
    found = [c for c in commands(page) if c[0] != "diff"]
    assert found
    for command in found:
        code, _, err = run(*command)
        assert code == 0, f"{command}: {err}"


def test_commands_for_a_config_of_hugging_face(run, tmp_path, monkeypatch):  # noqa: F811
    import transformers
    monkeypatch.chdir(tmp_path)
    transformers.LlamaConfig(vocab_size=128, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
                             max_position_embeddings=64, architectures=["LlamaForCausalLM"]).save_pretrained(".")
    found = commands("hugging-face.md")
    assert [c[0] for c in found] == ["plan", "report"]
    for command in found:
        code, out, err = run(*command)
        assert code == 0 and out, f"{command}: {err}"
