"""All ranks' actions over lowered windows, in one process, against the model itself; and what planted faults look like."""
from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch
from pipeline_ranks import Threads, gradients, ranks_of, train
from torch import nn
from torch.nn import functional as F

from autoshard import Pipeline
from autoshard.base.mesh import parse_mesh
from autoshard.runtime.pipeline.wires import Message
from tests.pipeline.cut_models import MODELS, even_cuts, subject

TOLERANCE = 1e-10  # key biases have gradients that are zero in exact arithmetic: 2e-12 of them is rounding


def off(name: str, mesh: str, options: Pipeline, rows: int = 2, wires: type = Threads, **sizes: int) -> tuple[float, str]:
    """The largest relative error of loss and gradients, and of what."""
    what = subject(name, rows * options.microbatches, options.microbatches, **sizes)
    options = replace(options, cuts=even_cuts(what, parse_mesh(mesh).size * (2 if options.chunks == 2 else 1)))
    _, steps = ranks_of(what.model, what.batch, mesh, options, what.loss, wires)
    losses = train(steps, what.batch)
    parts = what.parts(options.microbatches if name == "moe" else 1)  # its balance loss is not linear in the batch
    want = sum(what.loss(what.model(*p[:-1]), p[-1]) for p in parts) / len(parts)
    want.backward()
    scale = torch.stack([p.grad.norm() for p in what.model.parameters() if p.grad is not None]).norm()
    errors = {f"loss on rank {r}": abs(loss - want.item()) / abs(want.item()) for r, loss in enumerate(losses)}
    found, expected = gradients(steps), {n: p.grad for n, p in what.model.named_parameters() if p.grad is not None}
    assert found.keys() == expected.keys(), "some gradient is missing"
    for n, its in found.items():
        errors |= {f"{n} ({i})": float((g - expected[n]).norm() / max(expected[n].norm(), 1e-6 * scale)) for i, g in enumerate(its)}
    worst = max(errors, key=lambda k: errors[k])
    return errors[worst], worst


@pytest.mark.parametrize("name", MODELS)
def test_1f1b_on_two_ranks(name):
    error, worst = off(name, "pp=2", Pipeline(microbatches=3, inexact="accept"))
    assert error < TOLERANCE, worst


@pytest.mark.parametrize(("name", "mesh", "m", "schedule", "chunks"), [
    ("gpt", "pp=2", 1, "gpipe", 1), ("gpt", "pp=3", 2, "1f1b", 1), ("gpt", "pp=2", 4, "zb1p", 1), ("gpt", "pp=2", 3, "zbv", 2),
    ("gpt", "pp=2", 4, "interleaved", 2), ("t5", "pp=3", 4, "zb2p", 1), ("t5", "pp=2", 3, "interleaved", 2), ("llama", "pp=3", 5, "zb1p", 1)])
def test_schedules(name, mesh, m, schedule, chunks):
    error, worst = off(name, mesh, Pipeline(microbatches=m, schedule=schedule, chunks=chunks), layers=3)
    assert error < TOLERANCE, worst


def test_uneven_counts_under_ignore_index():
    """A mean over targets that count: micro-batches weigh as many as they have, one of them none at all. At cuts that are searched."""
    what = subject("gpt", 6, 3)
    ids, target = what.batch
    target = target.clone()
    target[2:4] = -100
    target[0, 1:5] = -100
    options = Pipeline(microbatches=3)
    _, steps = ranks_of(what.model, (ids, target), "pp=2", options, what.loss)
    losses = train(steps, (ids, target))
    want = what.loss(what.model(ids), target)
    want.backward()
    assert max(abs(loss - want.item()) for loss in losses) < 1e-12
    for n, its in gradients(steps).items():
        expected = dict(what.model.named_parameters())[n].grad
        assert all(torch.allclose(g, expected, rtol=1e-9, atol=1e-13) for g in its), n


class Detached(nn.Module):
    """Words and head are one weight, read without a gradient in one of the two."""

    def __init__(self, in_head: bool) -> None:
        super().__init__()
        self.words, self.layers, self.in_head = nn.Embedding(11, 6), nn.ModuleList(nn.Linear(6, 6) for _ in range(2)), in_head

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        w = self.words.weight
        x = F.embedding(ids, w if self.in_head else w.detach())
        for layer in self.layers:
            x = layer(x).relu()
        return F.linear(x, w.detach() if self.in_head else w)


@pytest.mark.parametrize("in_head", [True, False])
@pytest.mark.parametrize("m", [1, 2])
def test_a_tied_weight_without_a_gradient_in_one_stage(in_head, m):
    """That stage gets the other one's: its copy would not be trained."""
    torch.manual_seed(0)
    model, ids, target = Detached(in_head).double(), torch.randint(11, (4, 3)), torch.randint(11, (4, 3))

    def loss(out: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(out.flatten(0, 1), target.flatten())

    _, steps = ranks_of(model, (ids, target), "pp=2", Pipeline(microbatches=m, cuts=("layers.1",)), loss)
    train(steps, (ids, target))
    loss(model(ids), target).backward()
    found = gradients(steps)["words.weight"]
    assert len(found) == 2 and all(torch.allclose(g, model.words.weight.grad, rtol=1e-9) for g in found)


def test_what_is_sent_is_what_is_planned():
    what = subject("t5", 8, 4)
    plan, steps = ranks_of(what.model, what.batch, "pp=3", Pipeline(microbatches=4, cuts=("decoder.bias", "decoder.norm")), what.loss)
    train(steps, what.batch)
    sent = Counter((m.value, m.microbatch, m.source, m.target) for s in steps for m in s.runner.wires.sent if m.channel != "step")
    planned = Counter((t["value"], m, t["from"], t["to"]) for t in plan.pipeline["transfers"] for m in range(4))
    assert sent == planned
    tied = [m.value for s in steps for m in s.runner.wires.sent if m.channel == "step" and m.value.startswith("grad:")]
    assert len(tied) == 6 and all(v.startswith("grad:shared.weight@") for v in tied), "three stages exchange their parts, once a step"


class WrongOrder(Threads):
    """Sends activations of two micro-batches in the wrong order."""

    def send(self, message: Message, value: torch.Tensor) -> None:
        if message.channel == "forward" and message.microbatch in (0, 1):
            held = self.__dict__.setdefault("held", [])
            held.append((message, value))
            if len(held) == 2:
                for m, v in reversed(held):
                    super().send(m, v)
            return
        super().send(message, value)


def test_a_wrong_wire_order_is_seen():
    error, _ = off("gpt", "pp=2", Pipeline(microbatches=3, schedule="gpipe"), wires=WrongOrder)
    assert error > 1e-3


def test_a_wrong_loss_weight_is_seen(monkeypatch):
    """Without weights micro-batches count alike, and losses of equal counts cannot tell."""
    from autoshard.pipeline.microbatches.results import Results

    real = Results.tangent
    monkeypatch.setattr(Results, "tangent", lambda self, loss: real(self, loss) * (1.0 if self.total is None or self.total < 20 else 0.5))
    error, worst = off("gpt", "pp=2", Pipeline(microbatches=3))
    assert error > 1e-3, worst


@pytest.mark.parametrize("m", [1, 4])
def test_dropout_does_not_depend_on_the_number_of_stages(m):
    """A random op draws under the seed of the step, its name and the micro-batch, also in stages of one rank: generators of processes may be alike."""
    what = subject("gpt", 8, m, dropout=0.2)
    losses = set()
    for stages in (2, 3, 4):
        _, steps = ranks_of(what.model, what.batch, f"pp={stages}", Pipeline(microbatches=m, cuts=even_cuts(what, stages)), what.loss)
        losses |= {round(x, 12) for x in train(steps, what.batch)}
    plain = subject("gpt", 8, m)
    _, steps = ranks_of(plain.model, plain.batch, "pp=2", Pipeline(microbatches=m, cuts=even_cuts(plain, 2)), plain.loss)
    assert len(losses) == 1 and losses != {round(x, 12) for x in train(steps, plain.batch)}
