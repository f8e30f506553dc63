"""What kind of plan it is, in one sentence: plans by hand are called by their names, whatever the model."""
from __future__ import annotations

import re

import pytest
import torch
from torch import nn

import autoshard
from autoshard.base.mesh import parse_mesh
from autoshard.base.plan import Plan
from autoshard.decide.options import Options
from autoshard.program.trace import trace
from autoshard.report.page.html import page
from autoshard.report.what import header, to_json
from autoshard.study.compare import Comparison, comparison
from models import gpt, llama, mlp, moe

MODELS = {"mlp": mlp, "gpt": gpt, "llama": llama, "moe": moe}


def compared(name: str, mesh: str) -> Comparison:
    module = MODELS[name]
    model, batch = module.build(**({"batch": 64} if name == "mlp" else {"batch": 8}))
    return comparison(trace(model, batch, loss_fn=module.loss), parse_mesh(mesh), Options(cluster="h100-dgx", time_limit=120), has_loss=True,
                      model={"reference": name})


@pytest.fixture(scope="module", params=[("mlp", "d=2"), ("gpt", "dp=4"), ("llama", "dp=2,tp=2"), ("moe", "d=2")], ids=lambda p: f"{p[0]}-{p[1]}")
def found(request) -> Comparison:
    return compared(*request.param)


def kinds(found: Comparison) -> dict[str, str]:
    return {c.name: c.plan.kind for c in found.contenders if c.plan is not None}


def test_plans_by_hand_over_all_axes_are_called_by_their_names(found):
    said, axes = kinds(found), "*".join(found.mesh.names)
    assert said["DDP"] == f"data parallel over {axes}"
    assert said["ZeRO-1"] == f"ZeRO-1 over {axes}"
    assert said["ZeRO-2"] == f"ZeRO-2 over {axes}"
    assert said["FSDP (ZeRO-3)"] == f"ZeRO-3 (FSDP) over {axes}"


def test_megatron(found):
    said, mesh = kinds(found), found.mesh
    heads = "hidden" if "heads" not in said["Megatron TP"] else "heads, hidden"
    assert re.search(rf"tensor parallel \({heads}\) over {mesh.names[-1]}\b", said["Megatron TP"])
    assert ("data parallel over dp" in said["Megatron TP"]) == (mesh.ndim > 1)
    assert "sequence" not in said["Megatron TP"]
    assert "gathered" not in said["Megatron TP"]


def test_what_has_a_vocabulary_and_heads_says_so():
    said = kinds(compared("gpt", "dp=2,tp=2"))
    assert said["Megatron TP"] == "data parallel over dp; tensor parallel (heads, hidden) over tp; vocabulary split over tp"
    assert said["TP + sequence parallel"] == said["Megatron TP"] + "; sequence split over tp"
    assert said["FSDP x TP"] == said["Megatron TP"].replace("data parallel over dp", "ZeRO-3 (FSDP) over dp")


def planned(mesh: str, **options) -> Plan:
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64))
    return autoshard.plan(model, mesh, (torch.ones(16, 64),), **{"cluster": "cpu-gloo", **options})


def test_more_ranks_that_bring_nothing():
    found = planned("dp=2,tp=4", cluster="h100-dgx")
    assert found.kind == "nothing is split: 8 ranks do the work of one" and planned("d=1").kind == "one rank does everything"


def test_an_axis_that_brings_nothing():
    found = planned("a=2,b=3", seeds={"0.weight": "a,-"})
    assert "over a" in found.kind and "nothing is split over b: its 3 ranks do the work of one" in found.kind, found.kind


@pytest.mark.parametrize(("seeds", "words"), [
    ({"0.weight": "d,-", "2.weight": "-,d"}, "tensor parallel (hidden) over d"),
    ({"input:0": "d,-", "0": "d,-", "2": "d,-", "0.weight": "-,-", "2.weight": "-,-"}, "data parallel over d"),
    ({"input:0": "d,-", "0": "d,-", "2": "d,-", "0.weight": "d,-", "2.weight": "d,-"}, "ZeRO-2 over d"),
])
def test_searched_plans(seeds, words):
    assert planned("d=2", seeds=seeds).kind.partition("; ")[0] == words


def test_text_json_html_and_files_say_it(tmp_path):
    found = planned("dp=2,tp=4", cluster="h100-dgx")
    assert ("kind", found.kind) in list(header(found)) and found.kind in to_json(found) and found.kind in page(found)
    found.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json").kind == found.kind
