"""Own models compiled for one GPU: the numbers of eager mode there, the memory of the plan, and a profile of the machine."""
from __future__ import annotations

import copy
import importlib
import json

import pytest
import torch

import autoshard
from autoshard.cost.cluster import load_cluster
from models import gpt

MODELS = ("mlp", "gpt", "llama", "bert", "vit", "resnet", "moe", "t5", "dlrm")
SLACK = 64 << 20
"""Bytes that libraries keep for themselves (cuBLAS has 32 MiB for each stream)."""


def losses(run, model, batch, steps: int = 3) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    out = []
    for _ in range(steps):
        loss = run(model, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        out.append(loss.item())
    return out


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-9), (torch.float32, 1e-4)])
@pytest.mark.parametrize("name", MODELS)
def test_parity_with_eager(name, dtype, tolerance, monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)  # cuDNN's convolutions round float32 otherwise
    module = importlib.import_module(f"models.{name}")
    torch.manual_seed(0)
    model, batch = module.build()
    batch = tuple(t.to("cuda", dtype if t.is_floating_point() else None) for t in batch)
    model = model.to("cuda", dtype)
    twin = copy.deepcopy(model)
    compiled = autoshard.compile(model, "one=1", loss_fn=module.loss)
    assert {p.device for p in compiled.parameters()} == {torch.device("cuda", torch.cuda.current_device())}
    got = losses(lambda m, b: m(*b), compiled, batch)
    want = losses(lambda m, b: module.loss(m(*b[:-1]), b[-1]), twin, batch)
    assert got == pytest.approx(want, rel=tolerance)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_memory_is_as_planned(dtype):
    """Of a step of gpt 124M; attention is the flash kernel in bf16, the memory-efficient one in float32."""
    model, batch = gpt.build("124M", batch=4, seq=512)
    batch = tuple(t.to("cuda") for t in batch)
    compiled = autoshard.compile(model.to(dtype), "one=1", batch, loss_fn=gpt.loss)
    optimizer = torch.optim.AdamW(compiled.parameters(), foreach=False)
    for _ in range(2):
        torch.cuda.reset_peak_memory_stats()
        compiled(*batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    planned, measured = compiled.plan.memory["total"], torch.cuda.max_memory_allocated()
    assert 0.9 * planned - SLACK <= measured <= 1.1 * planned + SLACK


def all_ranks(name, dtype, plans):
    """The programs of four ranks by the kernels of the GPU, with collectives as they are defined: loss, gradients, buffers, weights."""
    module = importlib.import_module(f"models.{name}")
    torch.manual_seed(0)
    model, batch = module.build()
    batch = tuple(t.to("cuda", dtype if t.is_floating_point() else None) for t in batch)
    report = autoshard.verify(model.to("cuda", dtype), "dp=2,tp=2", batch, loss_fn=module.loss, plans=plans, dtype=dtype, steps=2)
    assert report.ok, str(report)


@pytest.mark.parametrize(("dtype", "plans"), [(torch.float64, ("split", "random:3")), (torch.float32, ("data_parallel", "random:4"))])
@pytest.mark.parametrize("name", MODELS)
def test_all_ranks_on_one_gpu(name, dtype, plans):
    all_ranks(name, dtype, plans)


@pytest.mark.parametrize("name", ["gpt", "llama", "bert", "vit", "t5"])
def test_all_ranks_in_half_precision(name):
    """Of models in which rounding does not grow as in batch norms of 8 rows, or choose another expert."""
    all_ranks(name, torch.bfloat16, ("fully_sharded", "tensor_parallel", "random:5"))


def test_calibrate_and_doctor(run, tmp_path):
    profile = tmp_path / "mine.toml"
    code, _, err = run("calibrate", "-o", profile, "--seconds", 30)
    assert code == 0, err
    device = load_cluster(str(profile)).device
    assert max(device.peak.values()) > 1e12 and device.memory_bandwidth > 1e11 and device.memory_capacity > 4e9
    code, out, err = run("doctor", "--cluster", profile, "--json")
    assert code == 0, err
    assert json.loads(out)
