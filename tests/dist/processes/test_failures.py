"""What goes wrong on one rank alone, and checkpoints that do not fit: an error on every rank, soon."""
from __future__ import annotations

import time
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

import autoshard
from autoshard.errors import AutoshardError, LoweringError, ModelError, TraceError, UsageError
from autoshard.runtime.module import CompiledModule
from autoshard.runtime.ranks.agree import alone, share
from autoshard.runtime.ranks.place import locate
from tests.dist.harness import on_ranks, whole
from tests.dist.planners import by_planner, random_planner

pytestmark = pytest.mark.dist
MESH, SOON = "dp=2", 60.0


class Odd(nn.Module):
    """Fails to trace on `rank` alone: there its control flow depends on data."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.linear, self.rank = nn.Linear(8, 8), rank

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        return y if dist.get_rank() != self.rank or float(y.sum()) > 0 else -y


class Table(nn.Module):
    """A buffer that no state dict holds, beside a parameter that it does."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))
        self.register_buffer("scale", torch.full((8,), 3.0), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight * self.scale


class Resettable(Table):
    def reset_parameters(self) -> None:
        with torch.no_grad():
            self.weight.fill_(1.0)
            self.scale.fill_(3.0)


def compiled(model: nn.Module, **settings) -> CompiledModule:
    return CompiledModule(model, locate(MESH), by_planner(random_planner(1), **settings))


# --- on both ranks ---

def one_rank_fails_to_trace() -> None:
    for rank in (0, 1):
        start = time.monotonic()
        with pytest.raises(TraceError) as caught:
            compiled(Odd(rank))(torch.ones(4, 8))
        assert time.monotonic() - start < SOON
        if dist.get_rank() == 0 != rank:
            assert "rank 1 failed" in str(caught.value)
    compiled(Odd(-1))(torch.ones(4, 8))  # and the ranks are still in step


def one_rank_fails_otherwise() -> None:
    place = locate(MESH)

    def broken() -> None:
        raise ValueError("only here")

    for rank in (0, 1):
        with pytest.raises(ValueError if dist.get_rank() == rank else AutoshardError, match="only here"):
            alone(place, broken if dist.get_rank() == rank else lambda: None)
            share(place, "same", lambda: "text", timeout=SOON)
    with pytest.raises(LoweringError, match="different programs"):
        share(place, f"rank {dist.get_rank()}", lambda: "text", timeout=SOON)
    assert share(place, "same", lambda: f"from {dist.get_rank()}", timeout=SOON) == "from 0"


def checkpoints(folder: str) -> None:
    x = torch.ones(4, 8)
    dcp.save({"weight": torch.full((8,), 2.0)}, checkpoint_id=f"{folder}/fits")
    dcp.save({"model": {"weight": torch.ones(8)}}, checkpoint_id=f"{folder}/prefix")
    dcp.save({"weight": torch.ones(4)}, checkpoint_id=f"{folder}/small")
    for name, message in (("prefix", "lacks 1 of the model's 1 tensors"), ("small", r"holds weight as \(4,\)"),
                          ("absent", "cannot be read")):
        model = compiled(meta(Resettable), checkpoint=f"{folder}/{name}")
        for _ in range(2):  # a model that could not be filled never runs on what its memory held
            with pytest.raises(ModelError, match=message):
                model(x)
    fast = compiled(meta(Resettable), checkpoint=f"{folder}/fits")
    assert torch.equal(fast(x).detach(), 6 * x), "the checkpoint's weight and the initialiser's buffer"
    assert torch.equal(whole(fast.weight), torch.full((8,), 2.0))
    with pytest.raises(ModelError, match="scale"):
        compiled(meta(Table), checkpoint=f"{folder}/fits")(x)


def meta(build) -> nn.Module:
    with torch.device("meta"):
        return build()


def saved_by_one_rank(folder: str) -> None:
    """`torch.save` writes a rank's own pieces: no other rank may load them as its own."""
    model = autoshard.compile(nn.Linear(8, 8), MESH, (torch.ones(4, 8),), cluster="cpu-gloo", cache=False, seeds={"weight": "dp,-", "bias": "-"})
    if dist.get_rank() == 0:
        torch.save(model.state_dict(), f"{folder}/one.pt")
        torch.save({"bias": model.state_dict()["bias"]}, f"{folder}/bias.pt")
    dist.barrier()
    state, before = torch.load(f"{folder}/one.pt"), whole(model.weight)
    with nullcontext() if dist.get_rank() == 0 else pytest.raises(UsageError, match="the piece of weight that another rank holds"):
        model.load_state_dict(state)
    model.load_state_dict(torch.load(f"{folder}/bias.pt"), strict=False)  # whole on every rank
    model.load_state_dict(get_model_state_dict(model, options=StateDictOptions(full_state_dict=True)))
    assert torch.equal(whole(model.weight), before)


def all_failures(folder: str) -> None:
    one_rank_fails_to_trace()
    one_rank_fails_otherwise()
    checkpoints(folder)
    saved_by_one_rank(folder)


def test_failures(tmp_path: Path) -> None:
    on_ranks(2, all_failures, str(tmp_path))
