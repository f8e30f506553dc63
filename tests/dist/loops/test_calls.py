"""How a compiled module is called, on ranks: forms of call, inputs that require gradients, batches that differ, hooks."""
from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from call_forms import case
from torch import nn
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn import functional as F

from autoshard.decide.options import Passing
from autoshard.errors import AutoshardError, UsageError
from autoshard.runtime.module import CompiledModule
from autoshard.runtime.ranks.place import locate
from tests.dist.call_forms_run import check
from tests.dist.harness import assert_near, on_ranks, same_gradients
from tests.dist.planners import by_planner, random_planner

pytestmark = pytest.mark.dist
FAST, ALL = 4, 200


def compiled(model: nn.Module, seed: int = 0, mesh: str = "dp=2", inputs: str = "global", outputs: str = "replicate", **settings: Any) -> CompiledModule:
    return CompiledModule(copy.deepcopy(model), locate(mesh), by_planner(random_planner(seed, outputs), passing=Passing(inputs, outputs), **settings))


def piece(t: torch.Tensor) -> torch.Tensor:
    """Of dim 0, this rank's half."""
    return t.chunk(2)[dist.get_rank()] if t.ndim and t.shape[0] else t


# --- forms of call ---

def random_calls(seeds: range) -> None:
    for seed in seeds:
        local = bool(seed % 2)
        found = case(seed, empty=False)  # pieces of nothing cannot be redistributed
        fast = compiled(found.model, seed, inputs="local" if local else "global", loss_fn=found.loss_fn)
        for calls in found.calls:
            before = len(fast._steps)
            for args, kwargs in calls:
                check(f"seed {seed}", fast, found, args, kwargs, *((piece, 2.0) if local else ()))
            assert len(fast._steps) <= before + 1, f"seed {seed}: one call written in other ways was planned again"


# --- inputs that require gradients ---

class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return self.two(F.gelu(self.one(x)) * y.mean()) + y


class Plain(nn.Module):
    """No parameters."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x * x).sum(1).softmax(0)


def net() -> Net:
    torch.manual_seed(0)
    return Net().double()


def two_inputs() -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(1)
    return tuple(torch.randn(8, 8, generator=g, dtype=torch.float64).requires_grad_() for _ in range(2))


def in_a_row(mesh: str) -> None:
    """Two compiled modules and one without parameters, with torch's own ops in between; the gradient of the first input."""
    for seed in range(2):
        models = net(), net(), Plain()
        fast = [compiled(m, seed + i, mesh) for i, m in enumerate(models)]
        grads = []
        for one, two, three in (fast, models):
            x, y = two_inputs()
            three(two(torch.tanh(one(x, y)), y)).square().sum().backward()
            grads.append((x.grad, y.grad))
        for a, b in zip(*grads, strict=True):
            assert_near(f"{mesh}, seed {seed}: gradient of an input", a, b, 1e-9)
        for f, m in zip(fast[:2], models[:2], strict=True):
            same_gradients(f, m, 1e-9)


def behind_a_replica() -> None:
    """What makes the pieces is a model of every rank, whose gradients are averaged over the ranks, as DistributedDataParallel does."""
    for seed in range(2):
        model, fast = net(), compiled(net(), seed, inputs="local")
        torch.manual_seed(3)
        front, mine = (nn.Linear(8, 8).double() for _ in range(2))
        mine.load_state_dict(front.state_dict())
        x, y = (t.detach() for t in two_inputs())
        fast(torch.tanh(mine(piece(x))), piece(y)).square().mean().backward()
        model(torch.tanh(front(x)), y).square().mean().backward()
        same_gradients(fast, model, 1e-9)
        for p in mine.parameters():
            dist.all_reduce(p.grad)
            p.grad /= 2
        same_gradients(mine, front, 1e-9)


def dtensors_in_a_row() -> None:
    for seed in range(2):
        models = net(), net()
        fast = [compiled(m, seed + i, outputs="dtensor") for i, m in enumerate(models)]
        x, y = two_inputs()
        mesh = fast[0].place.device_mesh
        cut = distribute_tensor(x.detach(), mesh, [Shard(0)]).requires_grad_()
        out = fast[1](fast[0](cut, y.detach()), y.detach())
        out.full_tensor().square().sum().backward()
        models[1](models[0](x, y.detach()), y.detach()).square().sum().backward()
        assert cut.grad.placements == cut.placements
        assert_near("gradient of a DTensor", cut.grad, x.grad, 1e-9)
        for f, m in zip(fast, models, strict=True):
            same_gradients(f, m, 1e-9)


# --- batches that differ ---

def batches_that_differ() -> None:
    rank = dist.get_rank()
    g = torch.Generator().manual_seed(0)
    x, y = (torch.randn(8, 8, generator=g, dtype=torch.float64) for _ in range(2))
    own = x + rank
    message = r'rank 1 passes other numbers than rank 0 for the input x \(8, 8\) float64, and with inputs="global".*DistributedSampler.*inputs="local"'
    for model in (compiled(net()), compiled(net()).prepare(x, y)):
        with pytest.raises(UsageError, match=message):
            model(own, y)
        model(x, y)
        with pytest.raises(UsageError, match=message):  # the second that runs is compared too
            model(own, y)
        model(x, y)
        with pytest.raises(UsageError, match=message.replace("8, 8", "4, 8")):  # of every variant
            model(own[:4], y[:4])
        with torch.no_grad(), pytest.raises(UsageError, match="the input y"):
            model(x, y + rank)
    always, never = (compiled(net(), check_inputs=when) for when in ("always", "never"))
    for _ in range(4):
        always(x, y)
    with pytest.raises(UsageError, match="rank 1 passes other numbers"):
        always(own, y)
    never(own, y)
    compiled(net(), inputs="local")(own, y)
    flags = torch.tensor([True]), torch.tensor(2.0 + rank).to(torch.bfloat16), torch.zeros(0, 3), torch.zeros(2, dtype=torch.complex64).conj()
    with pytest.raises(UsageError, match=r"the input args\[1\] \(\) bfloat16"):
        compiled(Any_())(*flags)


class Any_(nn.Module):
    def forward(self, *args: torch.Tensor) -> torch.Tensor:
        return args[1] * 2


def pieces_that_differ() -> None:
    """On dp=2,tp=2 ranks of one tp group must hold the same piece of the batch."""
    x, y = (t.detach() for t in two_inputs())
    rank = dist.get_rank()
    by_rank = compiled(net(), mesh="dp=2,tp=2", inputs="local")
    with pytest.raises(UsageError, match=r"ranks 1, 3 pass other numbers than rank 0 for the input x \(2, 8\) float64, and ranks that differ in tp only"):
        by_rank(x.chunk(4)[rank], y[:2])
    same = compiled(net(), mesh="dp=2,tp=2", inputs="local")
    assert_near("output", same(x.chunk(2)[rank // 2], y.chunk(2)[rank // 2]).detach(), net()(x, y).detach(), 1e-9)
    odd = compiled(net(), mesh="dp=2,tp=2")
    with pytest.raises(UsageError, match="rank 0 passes other numbers than rank 1 for the input x"):
        odd(x + (rank == 0), y)


def left_alone() -> None:
    """Rank 1's last batch is smaller: what rank 0 says when it waits for it in a collective."""
    model = compiled(net(), check_inputs="never")
    x, y = (t.detach() for t in two_inputs())
    model(x, y)
    place = model.place
    if dist.get_rank() == 1:
        with pytest.raises(AutoshardError, match=r"rank 0 does not prepare call 2.*\(8, 8\) float64.*this rank has .*\(4, 8\) float64"):
            model(x[:4], y[:4])
        dist.barrier()
        model(x, y)
        return
    place.pulse.told[0] += 1  # stands for call 2 of the variant that it has, in whose collective it would wait
    dist.barrier()
    with pytest.raises(AutoshardError, match=r"rank 1 could not go on with call 2 .*inputs \(4, 8\) float64"):
        model.name_who_left(RuntimeError("connection closed"))
    model(x, y)


# --- hooks ---

def hooks() -> None:
    """Registered before the first call or later, they hold for every variant, under no_sync (once, with the sum) and after replan."""
    for seed in range(2):
        model = net()
        fast = compiled(model, seed)
        x, y = (t.detach() for t in two_inputs())
        ran = {id(fast): [], id(model): []}

        def watch(m: nn.Module) -> None:
            m.one.weight.register_hook(lambda g: g * 2)
            for name, p in m.named_parameters():
                p.register_post_accumulate_grad_hook(lambda p, name=name: ran[id(m)].append(name))

        watch(fast), watch(model)
        for n in (8, 4, 8):
            for m in (fast, model):
                m.zero_grad()
                m(x[:n], y[:n]).square().sum().backward()
            same_gradients(fast, model, 1e-9)
        with torch.no_grad():
            fast(x, y)
        fast.replan()
        for m in (fast, model):
            m.zero_grad()
        with fast.no_sync():
            fast(x[:4], y[:4]).square().sum().backward()
        assert len(ran[id(fast)]) == len(ran[id(model)]), "a hook ran where gradients are kept for later"
        fast(x, y).square().sum().backward()
        (model(x, y).square().sum() + model(x[:4], y[:4]).square().sum()).backward()
        same_gradients(fast, model, 1e-9)
        assert sorted(ran[id(fast)]) == sorted(ran[id(model)])
        loss = fast(x, y).sum()
        with fast.no_sync(), pytest.raises(UsageError, match="call the model inside no_sync"):
            loss.backward()


def on_two(seeds: range) -> None:
    random_calls(seeds)
    in_a_row("dp=2")
    behind_a_replica()
    dtensors_in_a_row()
    batches_that_differ()
    hooks()
    left_alone()  # last: the ranks are out of step after it


def on_four() -> None:
    in_a_row("dp=2,tp=2")
    pieces_that_differ()


def test_calls_on_two_ranks() -> None:
    on_ranks(2, on_two, range(FAST))


def test_calls_on_four_ranks() -> None:
    on_ranks(4, on_four)


@pytest.mark.slow
def test_random_calls_on_two_ranks() -> None:
    on_ranks(2, random_calls, range(FAST, ALL), timeout=1500)
