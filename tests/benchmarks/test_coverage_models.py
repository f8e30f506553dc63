"""The zoo of benchmarks/coverage/coverage_models.py: families are found, built small, and examined without a false 'verified'."""
import pytest
import torch

pytest.importorskip("transformers")

from benchmarks.coverage.zoo import page
from benchmarks.coverage.zoo.build import CannotBuild, build, stopped, traced_variant
from benchmarks.coverage.zoo.families import Candidate, candidates, families
from benchmarks.coverage.zoo.shrink import NEITHER, ODD, odd_sizes


def test_families_are_found():
    known = families()
    assert len(known) > 300 and {"llama", "bert", "vit", "whisper", "clip", "t5"} <= set(known)
    assert candidates(known["bert"])[0].class_name == "BertForMaskedLM"


@pytest.mark.parametrize("family", ["gpt2", "vit"])
def test_small_models_train_and_trace(family):
    example = build(candidates(families()[family])[0])
    assert sum(p.numel() for p in example.model.parameters()) < 1_000_000
    assert stopped(example) is None
    variant, traced, refused = traced_variant(example)
    assert variant is example and not refused and traced.graph.training


def test_what_cannot_be_built_says_why():
    with pytest.raises(CannotBuild, match="no inputs known for"):
        build(Candidate("sam3_tracker_video", "model", "Sam3TrackerVideoModel"))


def test_page_counts_what_was_found(tmp_path):
    verified = {"family": "a", "stage": "verified", "why": "", "class": "A", "inputs": {"x": [4]}, "own_loss": True, "ops": 3,
                "targets": ["aten.mm.default"], "meshes": {"d=4": {"outcome": "verified", "why": "", "error": 1e-15, "collectives": [2]}}}
    built = {"family": "b", "stage": "built", "why": "depends on data <x>", "clear": True, "class": "B", "inputs": {}, "own_loss": False}
    ops = {"command": "c", "samples": {"traced": 2}, "ops": {"aten.mm.default": {
        "origin": "own", "calls": 1, "rows": 5, "checks": 7, "undivided": 0, "wrong": 0, "missing": 1}}}
    page.write(tmp_path / "page.md", {"a": verified, "b": built}, {"a": (), "b": (), "c": ()}, ops, "abc")
    text = (tmp_path / "page.md").read_text()
    assert "3 families; 2 built and tried, 50% of them verified, 0 wrong; 1 not run yet" in text
    assert "| own | 1 | 1 | 5 | 7 | 0 | 1 |" in text and "use 1 ops; 1 of them were tried, with 0 wrong rows" in text
    assert "* **b**: depends on data \\<x>" in text and torch.__version__ in text


def test_page_keeps_what_it_has_no_new_figures_for(tmp_path):
    whole = {"d=4": {"outcome": "verified"}, "dp=2,tp=2": {"outcome": "failed"}}
    refused = {"family": "b", "stage": "built", "why": "data", "clear": True, "class": "B", "inputs": {}, "own_loss": False, "whole": whole,
               "date": "2026-01-02", "commit": "abc"}
    good = {"stage": "verified", "why": "", "odd": ["heads", "vocabulary"], "date": "2026-01-02", "commit": "abc"}
    path = tmp_path / "page.md"
    page.write(path, {"b": refused}, {"b": ()}, {"command": "first", "samples": {}, "ops": {}}, "abc")
    known = {"b": refused, "e": {**refused, "stage": "verified", "meshes": {}, "date": "2026-01-01"}}
    odd = {"a": good, **{f: {"stage": "no model", "why": why, "date": "2026-01-02", "commit": "abc"} for f, why in (("b", "too small"), ("c", NEITHER))}}
    page.write(path, known, {"b": (), "e": ()}, None, "def", odd)
    text = path.read_text()
    assert "`first`" in text and "1 of 2026-01-02 abc" in text
    assert "0 compute the right numbers on all meshes: none" in text, "one of its meshes failed"
    assert "3 families looked at, 1 built and tried, 1 verified (1 of them with both sizes), 0 wrong: 100.0% of those built." in text
    assert "1 have neither heads nor a vocabulary, 1 cannot be built so. 1 of the families that verify above were not run so." in text
    assert "* **b**: too small" in text and "### Not run with these sizes\n\ne\n" in text


@pytest.mark.parametrize("family", ["llama", "bert"])
def test_odd_sizes_are_those_of_the_model(family):
    config = build(candidates(families()[family])[0], ODD).model.config
    assert odd_sizes(config.to_dict()) == {"vocabulary", "heads"}
    assert (config.vocab_size, config.num_attention_heads, config.hidden_size % 6) == (251, 6, 0)
