"""What training loops do around a model, on two ranks against one process: tied, frozen and decayed parameters, clipping,
accumulation, evaluation in between, state dicts, hooks."""
from __future__ import annotations

import copy
import tempfile
import warnings
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

import autoshard
from autoshard.runtime.module import CompiledModule
from autoshard.runtime.params.update import local_update
from autoshard.runtime.ranks.place import locate
from tests.dist.harness import assert_near, on_ranks, same_gradients, whole
from tests.dist.planners import by_planner, random_planner

pytestmark = pytest.mark.dist
SEEDS = (0, 3)


class Tagger(nn.Module):
    """Tied head, frozen layer, batch norm, a frozen average of a weight, a weight in bounds, a buffer that forward reads and one that it counts in."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(16, 8), nn.Linear(8, 16, bias=False)
        self.head.weight = self.words.weight
        self.frozen, self.mix, self.norm = nn.Linear(8, 8), nn.Linear(8, 8), nn.BatchNorm1d(8)
        self.frozen.requires_grad_(False)
        self.average, self.bounded = nn.Parameter(torch.ones(8, 8), requires_grad=False), nn.Parameter(torch.linspace(-1, 1, 8))
        self.register_buffer("scale", torch.linspace(0.5, 1.5, 8))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.calls += 1
            self.average.data = 0.5 * self.average.data + 0.5 * self.mix.weight.data
            self.bounded.data.clamp_(-0.5, 0.5)
        x = self.words(ids)
        x = x + x @ self.average * self.bounded
        x = x + F.gelu(self.mix(self.frozen(x))) * self.scale
        return self.head(self.norm(x))


def pair(seed: int, **settings: Any) -> tuple[CompiledModule, nn.Module]:
    torch.manual_seed(0)
    model = Tagger().double()
    return CompiledModule(copy.deepcopy(model), locate("dp=2"), by_planner(random_planner(seed), **settings)), model


def batch(i: int) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(i)
    return torch.randint(16, (8,), generator=g), torch.randint(16, (8,), generator=g)


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    """Weight decay on matrices only. Eps well above rounding: Adam divides by the size of gradients that should be zero."""
    trained = [p for p in model.parameters() if p.requires_grad]
    return torch.optim.AdamW([{"params": [p for p in trained if p.ndim > 1], "weight_decay": 0.1},
                              {"params": [p for p in trained if p.ndim <= 1], "weight_decay": 0.0}], lr=1e-2, eps=1e-5)


def loss(model: nn.Module, i: int) -> torch.Tensor:
    ids, target = batch(i)
    return F.cross_entropy(model(ids), target)


# --- on both ranks ---

def whole_loop(seed: int, folder: str) -> None:
    fast, model = pair(seed)
    assert fast.head.weight is fast.words.weight, "tied weights are one parameter"
    seen: list[tuple[int, ...]] = []
    fast.register_forward_hook(lambda m, args, out: seen.append(tuple(out.shape)))
    one, two = optimizer_of(fast), optimizer_of(model)
    if seed == SEEDS[-1]:
        one = local_update(one)
    schedules = [torch.optim.lr_scheduler.LambdaLR(o, lambda n: 1.0 / (n + 1)) for o in (one, two)]
    for step in range(4):
        for m in (fast, model):
            for part in (2 * step, 2 * step + 1):  # accumulation into .grad
                (loss(m, part) / 2).backward()
        norms = [torch.nn.utils.clip_grad_norm_([p for p in m.parameters() if p.requires_grad], 0.5) for m in (fast, model)]
        assert_near("norm of all gradients", *norms, 1e-9)
        assert norms[1] > 0.5, "nothing was clipped"
        same_gradients(fast, model, 1e-9, step)
        for optimizer, schedule in zip((one, two), schedules, strict=True):
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        if step == 1:
            evaluated(fast, model)
    assert len(seen) == 9
    assert all(isinstance(t, DTensor) for p, state in one.state.items() for t in state.values() if t.shape), "state for checkpoints"
    assert {id(p) for group in one.param_groups for p in group["params"]} <= {id(p) for p in fast.parameters()}
    same_state(fast, model)
    round_trip(fast, model, seed, folder)


def evaluated(fast: CompiledModule, model: nn.Module) -> None:
    """Between two steps, without gradients and with running statistics; then on with training."""
    outs = []
    for m in (fast, model):
        m.eval()
        with torch.no_grad():
            outs.append(m(batch(99)[0]))
        m.train()
    assert not outs[0].requires_grad
    assert_near("evaluation", *outs, 1e-9)


def same_state(fast: nn.Module, model: nn.Module) -> None:
    expected = model.state_dict()
    assert list(fast.state_dict()) == list(expected)
    for name, t in fast.state_dict().items():
        assert_near(name, whole(t), expected[name], 1e-9)
    torch.manual_seed(0)
    assert torch.equal(whole(fast.frozen.weight), Tagger().double().frozen.weight), "a frozen parameter moved"
    assert fast.frozen.weight.grad is None and int(whole(fast.calls)) == 8


def round_trip(fast: CompiledModule, model: nn.Module, seed: int, folder: str) -> None:
    """Through a checkpoint into another plan, and as whole tensors into the plain model."""
    dcp.save(fast.state_dict(), checkpoint_id=folder)
    other, _ = pair(seed + 1)
    other.prepare(batch(0)[0])
    state = other.state_dict()
    dcp.load(state, checkpoint_id=folder)
    same_state(other, model)
    plain = Tagger().double()
    plain.load_state_dict({n: whole(t) for n, t in other.state_dict().items()})
    assert_near("after loading", loss(plain, 5).detach(), loss(model, 5).detach(), 1e-9)


def token_loss(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits, target)


def penalised() -> None:
    """A penalty on weights is a DTensor, and so are a loss that it is added to and the gradient of that loss."""
    split = autoshard.compile(pair(1)[1].eval(), "dp=2", loss_fn=token_loss, cache=False, pipeline=autoshard.Pipeline(microbatches=2))
    for fast, model in (pair(1, loss_fn=token_loss), (split, pair(1)[1].eval())):
        for add in (lambda m, out: out + 0.1 * sum(p.square().sum() for p in m.parameters()),
                    lambda m, out: (1 + m.mix.weight.abs().mean()) * out):
            for m, out in ((fast, fast(*batch(1))), (model, loss(model, 1))):
                m.zero_grad()
                add(m, out).backward()
            same_gradients(fast, model, 1e-9)


def anomalies_looked_for() -> None:
    fast, model = pair(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # detect_anomaly says that it is slow
        with torch.autograd.detect_anomaly():
            for m in (fast, model):
                loss(m, 0).backward()
            same_gradients(fast, model, 1e-9)
            with torch.no_grad():
                fast.mix.weight.fill_(float("nan"))
            with pytest.raises(RuntimeError, match="returned nan values"):
                loss(fast, 0).backward()


def frozen_before_the_last_part() -> None:
    """What no_sync() kept of a parameter arrives, where the call that reduces it does not train the parameter any more."""
    fast, model = pair(1)
    for part in range(3):
        for m in (fast, model):
            m.mix.requires_grad_(part < 2)
            with fast.no_sync() if m is fast and part < 2 else nullcontext():
                loss(m, part).backward()
    same_gradients(fast, model, 1e-9)
    assert fast.mix.weight.grad is not None


def evaluated_before_training() -> None:
    """A model that is first called in inference mode, where tensors are made that autograd takes nowhere else."""
    fast, model = pair(0)
    with torch.inference_mode():
        for m in (fast, model):
            m(batch(9)[0])
    for i in range(2):
        for m in (fast, model):
            loss(m, i).backward()
        same_gradients(fast, model, 1e-9, i)
    for name, t in fast.named_buffers():
        assert_near(name, whole(t), dict(model.named_buffers())[name], 1e-9)


def around() -> None:
    penalised()
    anomalies_looked_for()
    frozen_before_the_last_part()
    evaluated_before_training()


def loops(folder: str) -> None:
    for seed in SEEDS:
        whole_loop(seed, f"{folder}/{seed}")


def test_what_loops_do_besides() -> None:
    on_ranks(2, around)


def test_training_loops() -> None:
    with tempfile.TemporaryDirectory() as folder:
        on_ranks(2, loops, folder)
