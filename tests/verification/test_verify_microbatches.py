"""`verify` with micro-batches: every rank against the model on the batch, and mistakes that are planted."""
from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import autoshard
from autoshard import Pipeline
from autoshard.pipeline.microbatches.results import Results
from autoshard.runtime.microbatches import MicroStep
from models import moe


class Net(nn.Module):
    def __init__(self, p: float = 0.0) -> None:
        super().__init__()
        self.a, self.norm, self.b, self.p = nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 5), p

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(F.dropout(self.norm(self.a(x)), self.p, self.training))


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    """Of 12 rows the first three do not count, and of the others some."""
    g = torch.Generator().manual_seed(0)
    y = torch.randint(5, (12,), generator=g)
    y[[0, 1, 2, 5, 7]] = -100
    return torch.randn(12, 6, generator=g), y


def checked(model: nn.Module, mesh: str = "dp=2", count: int = 4, plans: tuple[str, ...] = ("data_parallel", "fully_sharded", "random:1"), **more):
    torch.manual_seed(0)
    return autoshard.verify(model, mesh, batch(), loss_fn=F.cross_entropy, plans=plans, steps=2, pipeline=Pipeline(count), **more)


@pytest.mark.parametrize("mesh, count", [("dp=2", 4), ("dp=3", 2), ("dp=2,tp=2", 3)])
def test_uneven_counts(mesh: str, count: int) -> None:
    report = checked(Net(), mesh, count)
    assert report.ok, [p.first_wrong for p in report.plans]
    assert {c.kind for p in report.plans for c in p.checks} == {"output", "gradient", "weight"}


def test_nothing_counts_in_any_micro_batch() -> None:
    nothing = torch.randn(4, 6), torch.full((4,), -100)
    report = autoshard.verify(Net(), "dp=2", nothing, loss_fn=F.cross_entropy, plans=("random:1",), pipeline=Pipeline(2))
    assert report.ok, str(report)


def test_random_numbers_are_those_of_the_ranks() -> None:
    report = checked(Net(0.5))
    assert report.ok, [p.first_wrong for p in report.plans]


@pytest.mark.parametrize("mesh", ["dp=2", "dp=3", "pp=2,dp=2"])
def test_two_dropouts_draw_what_the_model_does(mesh: str) -> None:
    """Of the batch all numbers of the first come before those of the second, of micro-batches some; three ranks pad the hidden features."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 16), nn.Dropout(0.3), nn.Linear(16, 12), nn.Dropout(0.2))
    report = autoshard.verify(model, mesh, (torch.randn(4, 12), torch.randn(4, 12)), loss_fn=F.mse_loss, plans=("split",), pipeline=Pipeline(2))
    assert report.ok, str(report)


def test_dropout_of_samples_that_lie_along_the_second_dim() -> None:
    class Sequences(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(12, 12), nn.Linear(12, 12)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            rows = F.dropout(self.a(x).reshape(-1, 12), 0.3)
            return F.dropout(self.b(rows).view(x.shape), 0.3)

    report = autoshard.verify(Sequences(), "dp=2", (torch.randn(5, 4, 12), torch.randn(5, 4, 12)), loss_fn=F.mse_loss, plans=("split",),
                              pipeline=Pipeline(2, batch_dims={"x": 1, "target": 1}))
    assert report.ok, str(report)


def test_precision() -> None:
    report = checked(Net(), precision=autoshard.Precision("bf16"), plans=("fully_sharded",))
    assert report.ok, [p.first_wrong for p in report.plans]


def test_experts() -> None:
    model, inputs = moe.build(batch=6)
    report = autoshard.verify(model, "tp=2", inputs, loss_fn=moe.loss, plans=("fully_sharded", "random:0"), pipeline=Pipeline(3))
    assert report.ok, [p.first_wrong for p in report.plans]


def test_a_wrong_loss_weight_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Results, "tangent", lambda self, loss: torch.full((), 1.0 / self.count, dtype=self.metas[loss].dtype))
    monkeypatch.setattr(Results, "factor", None)
    report = checked(Net(), plans=("data_parallel",))
    assert not report.ok and any(c.kind == "gradient" and not c.ok for c in report.plans[0].checks)
    assert all(c.ok for c in report.plans[0].checks if c.kind == "output" and c.step == 0), "the loss looks right"


def test_the_compiled_model_uses_what_verify_checks() -> None:
    assert MicroStep._step.__globals__["Results"] is Results
