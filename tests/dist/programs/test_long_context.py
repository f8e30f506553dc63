"""Training with the sequence split all the way, on two and four processes: numbers of one process, calls and memory as planned."""
from __future__ import annotations

import pytest
import torch

import autoshard
from autoshard.runtime.trace_collectives import recorded_collectives
from tests.dist.harness import assert_same_training, on_ranks
from tests.dist.live_bytes import step_peak
from tests.support.long_context import along_sequence, build, loss_of

pytestmark = pytest.mark.dist


def train(name: str, mesh: str, axes: str, seq: int) -> tuple[float, float]:
    """(measured peak, planned peak)."""
    (model, batch), (reference, _) = build(name, seq), build(name, seq)
    loss = loss_of(name)
    fast = autoshard.compile(model, mesh, loss_fn=loss, cluster="cpu-gloo", cache=False, seeds=along_sequence(name, axes))
    fast.prepare(*batch)
    plan = fast.plan
    assert "," in mesh or any(c.kind == "mirror" for c in plan.collectives), "on two axes the plan is refined, and need not swap"
    assert_same_training(fast, reference, [batch] * 3, lambda m, b: m(*b), lambda m, b: loss(m(b[0]), b[1]))
    with recorded_collectives(fast.place.device_mesh) as calls:
        fast(*batch).backward()
    swaps = [(c.axis, c.nbytes) for c in plan.collectives if c.kind == "mirror"]
    assert sum(c.kind == "mirror" for c in calls) == len(swaps), f"{len(swaps)} swaps were planned"
    fast.zero_grad()
    return float(step_peak(fast, batch)), float(plan.memory["total"])


def on_two() -> list[tuple[float, float]]:
    return [train("llama", "cp=2", "cp", 74), train("gpt", "cp=2", "cp", 36)]


def on_four() -> list[tuple[float, float]]:
    torch.set_num_threads(1)
    return [train("llama", "a=2,b=2", "a*b", 36)]


@pytest.mark.parametrize("world, work", [(2, on_two), (4, on_four)])
def test_trains_alike(world, work):
    for peaks in on_ranks(world, work):
        assert all(measured <= planned * 1.001 and measured >= 0.9 * planned for measured, planned in peaks), peaks
