"""`autoshard.verify` of pipelines: all ranks' actions in one process, and where planted faults are found."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import autoshard
from autoshard import Pipeline
from autoshard.errors import UsageError
from autoshard.verification.one_process import stage_programs
from autoshard.verification.one_process.stage_programs import StagePrograms, Wires
from models import gpt, llama

aten = torch.ops.aten
THREE = Pipeline(3, "1f1b", ["h.1"])


def report(model: Any = gpt, mesh: str = "pp=2", options: Pipeline = THREE, **more: Any) -> Any:
    torch.manual_seed(0)
    module, batch = model.build(batch=2 * options.microbatches, seq=8, layers=2)
    return autoshard.verify(module, mesh, batch, loss_fn=model.loss, pipeline=options, plans=("searched",), **more)


@pytest.mark.parametrize("options", [Pipeline(3, "1f1b", ["h.1"]), Pipeline(4, "zb1p", ["h.1"]), Pipeline(2, "interleaved", ["h.0", "h.1", "lm_head"], 2)])
def test_a_pipeline_is_the_model(options):
    found = report(options=options, steps=2)
    assert found.ok, str(found)
    assert {c.kind for c in found.plans[0].checks} == {"output", "gradient", "weight"}


def test_stages_that_are_split():
    torch.manual_seed(0)
    module, batch = llama.build(batch=8, seq=8, layers=2)
    found = autoshard.verify(module, "pp=2,dp=2", batch, loss_fn=llama.loss, pipeline=Pipeline(2, "gpipe", ["layers.1"]), plans=("data_parallel",))
    assert found.ok and found.plans[0].split > 50, str(found)


class Mirrored(nn.Module):
    """As a U-Net's: the last layers read what the first ones were given."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.last = nn.ModuleList([nn.Linear(16, 16) for _ in range(6)]), nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kept = []
        for i, layer in enumerate(self.layers):
            kept.append(x)
            x = torch.tanh(layer(x)) + (kept[5 - i] if i > 2 else 0.0)
        return self.last(x)


@pytest.mark.parametrize("schedule", ["interleaved", "zbv"])
def test_values_that_skip_stages(schedule):
    """They have channels of their own, as in a real run: the order of schedules is that of neighbours."""
    torch.manual_seed(0)
    options = Pipeline(4, schedule, ["layers.2", "layers.3", "layers.5"], 2)
    found = autoshard.verify(Mirrored(), "pp=2", (torch.randn(8, 16), torch.randn(8, 4)), loss_fn=F.mse_loss, pipeline=options, plans=("searched",))
    assert found.ok, str(found)


def test_uneven_counts_under_ignore_index():
    torch.manual_seed(0)
    module, (ids, target) = gpt.build(batch=6, seq=8, layers=2)
    target = target.clone()
    target[2:4] = -100
    target[0, 1:5] = -100
    found = autoshard.verify(module, "pp=2", (ids, target), loss_fn=gpt.loss, pipeline=Pipeline(3, "1f1b", ["h.1"]), plans=("searched",))
    assert found.ok, str(found)


def test_a_wrong_wire_order_is_named(monkeypatch):
    held: list[Any] = []
    right = Wires.send

    def send(self: Wires, channel: tuple[int, int, str], value: Any) -> None:
        if channel == (0, 1, "forward") and len(held) < 2:
            held.append(value)
            if len(held) == 2:
                right(self, channel, held[1])
                right(self, channel, held[0])
            return
        right(self, channel, value)

    monkeypatch.setattr(Wires, "send", send)
    monkeypatch.setattr(StagePrograms, "step", _afresh(StagePrograms.step, held))
    found = report(options=Pipeline(3, "gpipe", ["h.1"]))
    wrong = found.plans[0].first_wrong
    assert not found.ok and (wrong.kind, wrong.stage, wrong.microbatch) == ("wire", 1, 0), str(wrong)
    assert "messages are out of order" in str(wrong) and dict(wrong.matched)[0] > 0


def _afresh(step: Callable[..., Any], held: list[Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        held.clear()
        return step(*args, **kwargs)

    return run


def test_a_wrong_loss_weight_is_named(monkeypatch):
    class Results(stage_programs.Results):
        def tangent(self, loss: int) -> torch.Tensor:
            return super().tangent(loss) * 0.5

    monkeypatch.setattr(stage_programs, "Results", Results)
    found = report()
    wrong = found.plans[0].first_wrong
    assert not found.ok and (wrong.kind, wrong.stage, wrong.microbatch) == ("weight", 1, 0), str(wrong)
    assert "0.166667 instead of 0.333333" in str(wrong)


def test_a_broken_op_is_named_with_its_stage(monkeypatch):
    right = StagePrograms.__init__

    def broken(self: StagePrograms, *args: Any) -> None:
        right(self, *args)
        for node in self.programs[1].windows["forward"].graph.nodes:
            if node.target is aten.gelu.default:
                node.target, node.kwargs = (lambda x, *rest: F.silu(x)), {}

    monkeypatch.setattr(StagePrograms, "__init__", broken)
    found = report()
    wrong = found.plans[0].first_wrong
    assert not found.ok and (wrong.kind, wrong.stage, wrong.microbatch, wrong.target) == ("op", 1, 0, "aten.gelu.default"), str(wrong)
    assert "h.1.mlp" in wrong.where and "stage 1, micro-batch 0" in str(found)


def test_a_given_plan_of_another_program_is_refused():
    torch.manual_seed(0)
    module, batch = gpt.build(batch=6, seq=8, layers=2)
    plan = autoshard.plan(module, "pp=2", batch, loss_fn=gpt.loss, cluster="cpu-gloo", pipeline=Pipeline(3, "1f1b", ["h.1"]))
    assert autoshard.verify(module, "pp=2", batch, loss_fn=gpt.loss, plan=plan).ok
    with pytest.raises(UsageError, match="--processes"):
        autoshard.verify(module, "pp=2", batch, loss_fn=gpt.loss, plan=plan, elsewhere=lambda *a: None)  # type: ignore[arg-type, return-value]


class Checked(torch.nn.Module):
    """Blocks, of which every one checks its inputs; the first may clamp."""

    def __init__(self, clamps: bool) -> None:
        super().__init__()
        self.h, self.clamps = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(2)), clamps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.h:
            if not torch.isfinite(x).all():
                raise ValueError("not finite")
            x = block(x)
            if self.clamps:
                if x.abs().max() > 0.5:
                    x = torch.clamp(x, -0.5, 0.5)
        return x


def checked(clamps: bool) -> Any:
    torch.manual_seed(0)
    return autoshard.verify(Checked(clamps), "pp=2", (torch.randn(8, 8), torch.randn(8, 8)), loss_fn=F.mse_loss, pipeline=Pipeline(2, "gpipe", ["h.1"]),
                            plans=("searched",))


def test_stages_check_their_micro_batches():
    """A truth of the first stage is sent to the last, whose loss waits for it. A clamp by the largest number of the batch is no clamp of micro-batches."""
    found = checked(clamps=False)
    assert found.ok, str(found)
    with pytest.raises(UsageError, match="2 micro-batches compute something else than the batch.*max"):
        checked(clamps=True)
