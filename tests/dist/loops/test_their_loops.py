"""Loops as users have them, unchanged: clipping, accumulation, schedulers, averages of weights, scalers, autocast, foreach and fused
optimizers, groups by name, freezing, checkpoints in the background, resuming to the bit. Two ranks against one process, in one start.

Each loop gets a compiled model under a random plan and the same model on one device, and does the same with both."""
from __future__ import annotations

import copy
import logging
import tempfile
import traceback
import warnings
from collections.abc import Callable
from functools import partial
from math import inf
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.tensor import DTensor, Shard
from torch.nn import functional as F
from torch.optim import lr_scheduler, swa_utils

import autoshard
from autoshard.decide.kept import KEPT
from autoshard.errors import UsageError
from autoshard.runtime.between.step import Between
from autoshard.runtime.module import CompiledModule
from autoshard.runtime.params.update import local_update
from autoshard.runtime.ranks.place import locate
from autoshard.runtime.step import Step
from tests.dist.harness import assert_near, on_ranks, same_gradients, whole
from tests.dist.planners import by_planner, random_planner

pytestmark = pytest.mark.dist
Both = tuple[CompiledModule, nn.Module]
EXACT = 1e-9


class Net(nn.Module):
    """An embedding of 251 words, a norm with running statistics, dropout (off by default), a head."""

    def __init__(self, p: float = 0.0) -> None:
        super().__init__()
        self.words, self.mix, self.norm = nn.Embedding(251, 12), nn.Linear(12, 24, bias=False), nn.BatchNorm1d(24)
        self.drop, self.head, self.config = nn.Dropout(p), nn.Linear(24, 6), SimpleNamespace(gain=1.0)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.drop(F.gelu(self.norm(self.mix(self.words(ids) * self.config.gain)))))


class Follows(nn.Module):
    """A parameter and a buffer become the sums of a trained one, which are whole before they are cut."""

    def __init__(self) -> None:
        super().__init__()
        self.bias, self.average = nn.Parameter(torch.arange(6.0)), nn.Parameter(torch.zeros(6), requires_grad=False)
        self.register_buffer("seen", torch.zeros(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.average.copy_(self.bias.cumsum(0))
            self.seen.copy_(self.bias.cumsum(0))
        return x + self.bias


def both(seed: int = 0, dtype: torch.dtype = torch.float64, p: float = 0.0) -> Both:
    torch.manual_seed(0)
    model = Net(p).to(dtype)
    return CompiledModule(copy.deepcopy(model), locate("dp=2"), by_planner(random_planner(seed))), model


def batch(i: int) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(i)
    return torch.randint(251, (10,), generator=g), torch.randint(6, (10,), generator=g)


def loss(model: nn.Module, i: int = 0) -> torch.Tensor:
    ids, target = batch(i)
    return F.cross_entropy(model(ids), target)


def steps(pair: Both, make: Callable[[nn.Module], Any], n: int = 2, after: Callable[[nn.Module, Any, int], None] | None = None,
          tol: float = EXACT) -> tuple[Any, Any]:
    """`n` steps of both with the optimizers that `make` gives; gradients and weights are compared in each. `after` runs before a step."""
    optimizers = [make(m) for m in pair]
    for i in range(n):
        for m, o in zip(pair, optimizers, strict=True):
            loss(m, i).backward()
            if after is not None:
                after(m, o, i)
        same_gradients(*pair, tol, i)
        for o in optimizers:
            o.step()
            o.zero_grad()
        same_weights(pair, tol)
    return optimizers[0], optimizers[1]


def same_weights(pair: Both, tol: float = EXACT) -> None:
    expected = pair[1].state_dict()
    for name, t in pair[0].state_dict().items():
        assert_near(name, whole(t), expected[name], tol)


def adamw(model: nn.Module, **kwargs: Any) -> torch.optim.Optimizer:
    """Eps well above rounding: Adam divides by the size of gradients that should be zero."""
    return torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-5, **kwargs)


def number(t: Any) -> float:
    return float(whole(t)) if isinstance(t, torch.Tensor) else float(t)


# --- what steps are made of ---

def clipping() -> None:
    pair = both()
    ways: list[Callable[[nn.Module], Any]] = [
        *(lambda m, f=f: nn.utils.clip_grad_value_(m.parameters(), 1e-3, foreach=f) for f in (None, False, True)),
        *(lambda m, f=f, n=n: nn.utils.clip_grad_norm_(m.parameters(), 0.1, norm_type=n, foreach=f, error_if_nonfinite=True)
          for f in (None, True) for n in (1.0, 2.0, inf)),
        lambda m: nn.utils.clip_grads_with_norm_(m.parameters(), 0.1, nn.utils.get_total_norm([p.grad for p in m.parameters()]))]
    for way in ways:
        norms = []
        for m in pair:
            m.zero_grad()
            loss(m).backward()
            norms.append(way(m))
        if norms[0] is not None:
            assert number(norms[0]) == pytest.approx(number(norms[1]), rel=1e-9) and number(norms[0]) > 0.1, "nothing was clipped"
        same_gradients(*pair, EXACT)


def accumulation() -> None:
    """With and without `no_sync`, and with gradients set to zero instead of None."""
    pair = both(1)
    optimizers = [adamw(m) for m in pair]
    for quiet in (False, True):
        for m in pair:
            for i in range(3):
                if quiet and m is pair[0] and i < 2:
                    with pair[0].no_sync():
                        (loss(m, i) / 3).backward()
                else:
                    (loss(m, i) / 3).backward()
        same_gradients(*pair, EXACT)
        for o in optimizers:
            o.step()
            o.zero_grad(set_to_none=False)
        assert all(p.grad is not None and not p.grad.to_local().any() for p in pair[0].parameters())
    same_weights(pair)


def accumulation_given_up() -> None:
    """What `no_sync` keeps goes with `zero_grad`, of all parameters or of some, and no optimizer steps without it."""
    for zeroed in ("optimizer", "model", "some"):
        pair = both(2)
        some = [torch.optim.SGD([p for n, p in m.named_parameters() if n.endswith("bias")], lr=0.1) for m in pair]
        every = [adamw(m) for m in pair]
        with pair[0].no_sync():
            for m in pair:
                loss(m, 0).backward()
        with pytest.raises(UsageError, match=r"would leave out the gradient of .* that backward\(\) kept inside no_sync"):
            every[0].step()
        for m, o, s in zip(pair, every, some, strict=True):
            {"optimizer": o, "model": m, "some": s}[zeroed].zero_grad()
            loss(m, 1).backward()
        same_gradients(*pair, EXACT)


def optimizers() -> None:
    """Plain, foreach and fused, as they are and with `local_update`; a random plan places parameters in different ways."""
    def sgd(m: nn.Module, **kwargs: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(m.parameters(), lr=1e-2, momentum=0.9, nesterov=True, **kwargs)

    def rmsprop(m: nn.Module, **kwargs: Any) -> torch.optim.Optimizer:
        return torch.optim.RMSprop(m.parameters(), lr=1e-3, **kwargs)

    def adagrad(m: nn.Module, **kwargs: Any) -> torch.optim.Optimizer:
        """Makes its state at once, before the first call places the parameters."""
        return torch.optim.Adagrad(m.parameters(), lr=1e-2, eps=1e-5, **kwargs)

    def local(make: Callable[..., Any], m: nn.Module, **kwargs: Any) -> torch.optim.Optimizer:
        return local_update(make(m, **kwargs)) if isinstance(m, CompiledModule) else make(m, **kwargs)

    wrong = []
    for seed, (make, kwargs) in enumerate(((adamw, {"foreach": True}), (adamw, {"fused": True}), (adamw, {"amsgrad": True, "maximize": True}),
                                           (sgd, {"foreach": True}), (rmsprop, {"foreach": True}), (adagrad, {}))):
        for how, of in (("as it is", partial(make, **kwargs)), ("local_update", partial(local, make, **kwargs))):
            try:
                steps(both(seed), of)
            except AssertionError as e:
                wrong.append(f"{make.__name__} {kwargs} {how}: {e}")
    assert not wrong, "\n".join(wrong)
    pair = both(3)
    with pytest.raises(UsageError, match="SGD.fused=True. .*local_update"):
        steps(pair, partial(sgd, fused=True))
    steps(both(3), partial(local, sgd, fused=True))


def parts_outside() -> None:
    """A head that was not compiled behind a model that was: one optimizer and one clipping for the parameters of both."""
    makes = (lambda p: torch.optim.AdamW(p, 1e-2, eps=1e-5, foreach=True), lambda p: torch.optim.AdamW(p, 1e-2, eps=1e-5, fused=True),
             lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, foreach=True))
    for seed, (make, foreach) in enumerate(zip(makes, (None, True, False), strict=True)):
        pair, wholes, optimizers = both(seed), [], []
        for m in pair:
            torch.manual_seed(5)
            wholes.append(nn.Sequential(m, nn.Tanh(), nn.Linear(6, 6, dtype=torch.float64)))
            optimizers.append(make(wholes[-1].parameters()))
        for i in range(2):
            norms = []
            for m, o in zip(wholes, optimizers, strict=True):
                loss(m, i).backward()
                norms.append(nn.utils.clip_grad_norm_(m.parameters(), 0.1, foreach=foreach))
                nn.utils.clip_grad_value_(m.parameters(), 0.05, foreach=foreach)
            assert number(norms[0]) == pytest.approx(number(norms[1]), rel=1e-9)
            same_gradients(*wholes, EXACT, i)
            for o in optimizers:
                o.step()
                o.zero_grad()
            same_weights((wholes[0], wholes[1]))


def groups_by_name() -> None:
    def make(model: nn.Module) -> torch.optim.Optimizer:
        named = dict(model.named_parameters())
        kept = [(n, p) for n, p in named.items() if p.ndim < 2]
        return torch.optim.AdamW([{"params": [(n, p) for n, p in named.items() if p.ndim > 1], "weight_decay": 0.1},
                                  {"params": kept, "weight_decay": 0.0, "lr": 1e-3}], lr=1e-2, eps=1e-5)

    one, two = steps(both(2), make)
    assert [g["param_names"] for g in one.state_dict()["param_groups"]] == [g["param_names"] for g in two.state_dict()["param_groups"]]


def schedulers() -> None:
    makes: list[Callable[[Any], Any]] = [
        lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=8),
        lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0, threshold=10.0),
        lambda o: lr_scheduler.SequentialLR(o, [lr_scheduler.LinearLR(o, total_iters=2), lr_scheduler.CosineAnnealingLR(o, 4)], [2]),
    ]
    pair = both(4)
    for make in makes:
        made: dict[int, Any] = {}

        def optimizer(model: nn.Module, made: dict[int, Any] = made, make: Callable[[Any], Any] = make) -> Any:
            found = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
            made[id(found)] = make(found)
            return found

        def advance(model: nn.Module, o: Any, i: int, made: dict[int, Any] = made) -> None:
            scheduler = made[id(o)]
            scheduler.step(loss(model, i).item()) if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau) else o.step() or scheduler.step()

        one, two = steps(pair, optimizer, 3, advance)
        rates = [made[id(o)].get_last_lr()[0] for o in (one, two)]
        assert rates[0] == pytest.approx(rates[1], rel=1e-9) and rates[0] != 0.05


def scaler() -> None:
    """GradScaler with a step that overflows: both leave it out and halve the scale."""
    pair = both(5)
    scalers = [torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2) for _ in pair]
    optimizers = [adamw(m) for m in pair]
    for i in range(4):
        for m, s, o in zip(pair, scalers, optimizers, strict=True):
            s.scale(loss(m, i) * (inf if i == 1 else 1.0)).backward()
            s.unscale_(o)
            nn.utils.clip_grad_norm_(m.parameters(), 0.5)
            s.step(o)
            s.update()
            o.zero_grad()
        same_weights(pair)
        assert scalers[0].get_scale() == scalers[1].get_scale()
    assert scalers[0].get_scale() == 1024.0, "one step overflowed (half), then two did not (twice)"


def scaler_of_one_piece() -> None:
    """An overflow in one element of a split gradient, behind gradients that are whole: all ranks leave the step out."""
    model = autoshard.compile(Net().double(), "dp=2", (batch(0)[0],), seeds={"*.weight": "-,...", "head.weight": "-,dp"}, cluster="cpu-gloo", cache=False)
    plain = nn.Linear(6, 6, dtype=torch.float64)
    assert [p.placements[0].is_replicate() for p in model.parameters()].index(False) > 0
    for last in (0, 11):
        for params in (model.parameters(), (*plain.parameters(), *model.parameters())):
            theirs, optimizer = torch.amp.GradScaler("cpu", init_scale=16.0), torch.optim.SGD(params, lr=0.1)
            model.zero_grad()
            theirs.scale(F.mse_loss(plain(model(batch(0)[0])), torch.zeros(10, 6, dtype=torch.float64))).backward()
            spoilt = torch.zeros(6, 24, dtype=torch.float64)
            spoilt[0, 12 + last] = inf
            with torch.no_grad():
                model.head.weight.grad.add_(DTensor.from_local(spoilt.chunk(2, 1)[dist.get_rank()], model.head.weight.device_mesh, [Shard(1)]))
            before = [whole(p).clone() for p in model.parameters()]
            theirs.step(optimizer)
            theirs.update()
            assert theirs.get_scale() == 8.0 and all(torch.equal(whole(p), q) for p, q in zip(model.parameters(), before, strict=True))


def autocast() -> None:
    """Around the call: a variant of its own, whose casts are in the graph."""
    pair = both(6, torch.float32)
    for enabled in (True, False):
        losses = []
        for m in pair:
            m.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
                losses.append(loss(m))
            losses[-1].backward()
        assert_near("loss", losses[0].detach(), losses[1].detach(), 2e-2 if enabled else 1e-5)
        both_all = [torch.cat([whole(p.grad).flatten() for p in m.parameters()]) for m in pair]  # one by one they are mostly rounding in bf16
        assert_near("all gradients", *both_all, 5e-2 if enabled else 1e-5)
        assert all(p.grad.dtype == torch.float32 for p in pair[0].parameters())
    assert len(pair[0]._steps) == 2


def freezing() -> None:
    pair = both(7)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2, eps=1e-5) for m in pair]
    for i, frozen in enumerate((False, True, True, False)):
        for m, o in zip(pair, optimizers, strict=True):
            m.get_submodule("words").requires_grad_(not frozen)
            m.get_parameter("norm.bias").requires_grad_(not frozen)
            loss(m, i).backward()
            o.step()
        same_gradients(*pair, EXACT)
        assert (pair[0].words.weight.grad is None) == frozen
        for o in optimizers:
            o.zero_grad()
        same_weights(pair)
    assert len(pair[0]._steps) == 2, "frozen and not: two variants"


def changed_attributes() -> None:
    """A dropout switched off, a momentum and a number in a config changed, between two steps."""
    pair = both(8, p=0.5)
    for m in pair:
        m.get_submodule("drop").p = 0.0
    steps(pair, adamw)
    for m in pair:
        m.get_submodule("norm").momentum = 0.5
    steps(pair, adamw)
    for m in pair:
        m.config.gain = 0.5
    steps(pair, adamw)
    assert len(pair[0]._steps) == 3
    pair[0].get_submodule("drop").p = 1.0
    assert_near("everything dropped", pair[0](batch(0)[0]).detach(), pair[1].head.bias.detach().expand(10, 6), EXACT)


def weights_that_change_before_backward() -> None:
    """On one device this is an error, too; of DTensors it is theirs that count changes."""
    pair = both(10)
    for m in pair:
        value = loss(m)
        with torch.no_grad():
            m.head.weight.mul_(2.0)
        with pytest.raises(UsageError if m is pair[0] else RuntimeError, match="head.weight was changed" if m is pair[0] else "inplace operation"):
            value.backward()
    steps(pair, adamw)


def closures() -> None:
    """An optimizer that calls the model, and reads all parameters as one vector."""
    pair = both(9)
    for m in pair:
        o = torch.optim.LBFGS(m.parameters(), lr=0.1, max_iter=3)

        def closure(m: nn.Module = m, o: Any = o) -> torch.Tensor:
            o.zero_grad()
            value = loss(m)
            value.backward()
            return value

        o.step(closure)
    same_weights(pair, 1e-7)


# --- averages of weights ---

def averages() -> None:
    """swa_utils as it is: an equal average, and an exponential one with buffers; evaluated, saved, trained on."""
    for seed, kwargs in enumerate(({}, {"multi_avg_fn": swa_utils.get_ema_multi_avg_fn(0.8), "use_buffers": True},
                                   {"avg_fn": swa_utils.get_ema_avg_fn(0.8)})):
        pair = both(seed)
        if seed == 0:
            pair[0].prepare(batch(0)[0])  # before there is a plan, too
        averaged = [swa_utils.AveragedModel(m, **kwargs) for m in pair]
        steps(pair, adamw, 3, lambda m, o, i, averaged=averaged, pair=pair: averaged[pair.index(m)].update_parameters(m))
        assert [n for n, _ in averaged[0].named_parameters()] == [n for n, _ in averaged[1].named_parameters()]
        expected = averaged[1].state_dict()
        for name, t in averaged[0].state_dict().items():
            assert_near(name, whole(t), expected[name], EXACT)
        outs = []
        for m in averaged:
            m.eval()
            with torch.no_grad():
                outs.append(m(batch(9)[0]))
        assert_near("evaluated", *outs, EXACT)
        with torch.no_grad():
            pair[0].eval()
            assert (whole(pair[0](batch(9)[0])) - outs[0]).abs().max() > 1e-6, "the average should be another model"
            pair[0].train()
        scheduled = [swa_utils.SWALR(adamw(m), swa_lr=0.05) for m in pair]
        assert scheduled[0].get_last_lr() == scheduled[1].get_last_lr()


def assigned_data() -> None:
    """Weights put in place by `p.data = value`: old ones behind a step of SAM, an average for an evaluation, one vector, a whole tensor."""
    pair = both(3)
    for i in range(2):
        for m in pair:
            loss(m, i).backward()
            old = [p.data for p in m.parameters()]
            for p in m.parameters():
                p.data = p.data + 0.1 * p.grad
            m.zero_grad()
            loss(m, i).backward()
            for p, q in zip(m.parameters(), old, strict=True):
                p.data = q
        same_gradients(*pair, EXACT, i)
        same_weights(pair)
    for m in pair:
        nn.utils.vector_to_parameters(torch.linspace(-1, 1, sum(p.numel() for p in m.parameters()), dtype=torch.float64), m.parameters())
        m.mix.weight.data = torch.ones(24, 12, dtype=torch.float64)
        m.words.weight.data, m.words.weight.grad.data = m.words.weight.grad.data, m.words.weight.data
    same_gradients(*pair, EXACT)
    steps(pair, adamw)
    averages = [copy.deepcopy(pair[1]) for _ in pair]
    for m, average in zip(pair, averages, strict=True):
        for old, new in zip((*average.parameters(), *average.buffers()), (*m.parameters(), *m.buffers()), strict=True):
            old.data = 0.25 * old.data + 0.75 * new.data if new.is_floating_point() else new.data
        assert all(type(t) is torch.Tensor for t in average.state_dict().values())
    assert_near("called", averages[0](batch(2)[0]), averages[1](batch(2)[0]), EXACT)
    with pytest.raises(UsageError, match=r"\.data of a DTensor of \(24, 12\) torch.float64 cannot become \(12, 24\) torch.float64: its shape"):
        pair[0].mix.weight.data = pair[0].mix.weight.data.T


def a_copy_is_another_model() -> None:
    pair = both(2, p=0.5)
    loss(pair[0]).backward()
    twin = copy.deepcopy(pair[0])
    assert twin.plan is not None and twin.plan.key == pair[0].plan.key and len(twin._steps) == 1
    assert all(a is not b and torch.equal(whole(a), whole(b)) for a, b in zip(twin.parameters(), pair[0].parameters(), strict=True))
    assert all(p.grad is None for p in twin.parameters())
    got, want = loss(twin), loss(pair[0])
    assert torch.equal(got, want), "a copy draws what the model would have drawn"
    got.backward()
    assert isinstance(twin.mix.weight.grad, DTensor)
    with torch.device("meta"):
        virtual = Net()
    with pytest.raises(UsageError, match="meta device"):
        copy.deepcopy(CompiledModule(virtual, locate("dp=2"), by_planner(random_planner(0))))


def a_copy_with_its_optimizer() -> None:
    """In either order: the copied optimizer steps the copied model, and the first two stay as they are."""
    for turned in (False, True):
        pair, twins = both(4), []
        optimizers = steps(pair, adamw, 1)
        for m, o in zip(pair, optimizers, strict=True):
            m2, o2 = copy.deepcopy((o, m))[::-1] if turned else copy.deepcopy((m, o))
            twins.append(m2)
            loss(m2, 1).backward()
            o2.step()
        same_weights((twins[0], twins[1]))
        same_weights(pair)


# --- checkpoints ---

def async_save(folder: str) -> None:
    """The file has the weights of the moment of the call, though training goes on."""
    pair = both(3)
    steps(pair, adamw, 1)
    state = pair[0].state_dict()
    group = dist.new_group(backend="gloo")
    then = {n: whole(t).clone() for n, t in state.items()}
    saving = dcp.async_save(state, checkpoint_id=folder, process_group=group)
    steps(pair, adamw, 2)
    saving.result()
    other, _ = both(4)
    other.prepare(batch(0)[0])
    found = other.state_dict()
    dcp.load(found, checkpoint_id=folder)
    for name, t in found.items():
        assert torch.equal(whole(t), then[name]), name
    assert any(not torch.equal(whole(t), then[n]) for n, t in pair[0].state_dict().items()), "training went on"
    written = autoshard.compile(Follows(), "dp=2", seeds={"bias": "-", "average": "dp", "seen": "dp"}, cache=False)
    written(torch.ones(4, 6)).sum().backward()
    dcp.async_save(written.state_dict(), checkpoint_id=f"{folder}-written", process_group=group).result()
    found = {name: torch.zeros(6) for name in ("average", "seen")}
    dcp.load(found, checkpoint_id=f"{folder}-written", process_group=group)
    assert all(torch.equal(t, torch.arange(6.0).cumsum(0)) for t in found.values()), found


def whole_state_dicts(_: str) -> None:
    pair = both(5)
    steps(pair, adamw, 1)
    on_first = dist.get_rank() == 0
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights = get_model_state_dict(pair[0], options=options)
    assert bool(weights) == on_first
    other, plain = both(6)
    other.prepare(batch(0)[0])
    set_model_state_dict(other, weights, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True))
    same_weights((other, pair[1]))
    again = get_model_state_dict(pair[0], options=StateDictOptions(full_state_dict=True))
    plain.load_state_dict(again)
    assert_near("loaded whole", loss(plain).detach(), loss(pair[1]).detach(), EXACT)


def optimizer_states_of_one_device(_: str) -> None:
    """Whole, as `torch.save` wrote them; loaded before the first call and behind it, for steps as they are and with `local_update`."""
    def momentum(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    for make in (adamw, momentum, lambda m: local_update(momentum(m))):
        for called in (False, True):
            model, plain = both(8)
            theirs = momentum(plain) if make is not adamw else adamw(plain)
            loss(plain, 0).backward()
            theirs.step()
            theirs.zero_grad()
            if called:
                loss(model, 0).backward()
                model.zero_grad()
            ours = make(model)
            model.load_state_dict(plain.state_dict())
            ours.load_state_dict(copy.deepcopy(theirs.state_dict()))
            for i in (1, 2):
                for m, o in ((model, ours), (plain, theirs)):
                    loss(m, i).backward()
                    o.step()
                    o.zero_grad()
            same_weights((model, plain))


def resuming(folder: str) -> None:
    """With dropout and momentum: from the checkpoint on, the same to the bit as going on, also under another seed of the process."""
    def made() -> tuple[CompiledModule, Any, Any]:
        model, _ = both(7, p=0.5)
        model.prepare(batch(0)[0])
        optimizer = adamw(model)
        return model, optimizer, lr_scheduler.StepLR(optimizer, 1, 0.9)

    def train(model: CompiledModule, optimizer: Any, scheduler: Any, i: int) -> None:
        loss(model, i).backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()

    def everything(model: CompiledModule, optimizer: Any, scheduler: Any) -> dict[str, Any]:
        weights, state = get_state_dict(model, optimizer)
        return {"model": weights, "optimizer": state, "scheduler": scheduler.state_dict(), "rng": model.get_rng_state()}

    run = made()
    train(*run, 0)
    dcp.save(everything(*run), checkpoint_id=folder)
    for i in (1, 2):
        train(*run, i)
    torch.manual_seed(99)
    again = made()
    torch.manual_seed(100 + dist.get_rank())
    train(*again, 5)  # makes state, and spoils it
    saved = everything(*again)
    dcp.load(saved, checkpoint_id=folder)
    set_state_dict(again[0], again[1], model_state_dict=saved["model"], optim_state_dict=saved["optimizer"])
    again[2].load_state_dict(saved["scheduler"])
    again[0].set_rng_state(saved["rng"])
    for i in (1, 2):
        train(*again, i)
    for (name, a), (_, b) in zip(run[0].state_dict().items(), again[0].state_dict().items(), strict=True):
        assert torch.equal(whole(a), whole(b)), name
    assert run[2].get_last_lr() == again[2].get_last_lr()
    with pytest.raises(UsageError, match="get_rng_state gave"):
        again[0].set_rng_state({"seed": 1})
    with pytest.raises(UsageError, match="first call"):
        both()[0].get_rng_state()


# --- shapes that change ---

def new_shapes() -> None:
    """Other lengths keep the plan of the first where it is good enough, at most so many variants are there, and numbers stay right."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(251, 24), nn.Linear(24, 48), nn.GELU(), nn.Linear(48, 6)).double()
    fast = autoshard.compile(copy.deepcopy(model), "dp=2", cluster="cpu-gloo", cache=False, variants=3, keep_within=0.5)
    optimizers, plans, lines = [adamw(fast), adamw(model)], {}, Lines()
    logging.getLogger("autoshard").addHandler(lines)
    logging.getLogger("autoshard").setLevel(logging.INFO)
    for length in (40, 37, 33, 39, 40, 2, 37):
        ids = torch.randint(251, (4, length), generator=torch.Generator().manual_seed(length))
        for m in (fast, model):
            m(ids).square().mean().backward()
        same_gradients(fast, model, EXACT)
        for o in optimizers:
            o.step()
            o.zero_grad()
        assert type(fast._current) is (Between if length == 39 else Step), "39 lies between 37 and 40, 33 and 2 do not"
        plans.setdefault(length, fast.plan)
        assert len(fast._steps) <= 3 and len(fast._recipes) <= 3
    same_weights((fast, model))
    kept = [n for n, plan in plans.items() if plan.status == KEPT]
    assert {37, 33, 39} <= set(kept) and 40 not in kept, kept
    assert plans[37].ops == plans[40].ops and plans[37].predicted["step_s"] <= plans[40].predicted["step_s"]
    built = [line for line in lines.texts if line.startswith("variant ")]
    assert len(built) >= 6 and all("at most 3 for inputs (4, " in line and "traced in" in line for line in built), "one was forgotten, and made again"


class Lines(logging.Handler):
    """Collects what is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


LOOPS = (new_shapes, clipping, parts_outside, accumulation, accumulation_given_up, optimizers, groups_by_name, schedulers, scaler,
         scaler_of_one_piece, autocast, freezing, changed_attributes, weights_that_change_before_backward, closures, averages, assigned_data, a_copy_is_another_model,
         a_copy_with_its_optimizer)
IN_FOLDERS = (async_save, whole_state_dicts, optimizer_states_of_one_device, resuming)


def all_loops(folder: str) -> list[str]:
    warnings.simplefilter("ignore")
    failed = []
    for fn in (*LOOPS, *IN_FOLDERS):
        dist.barrier()
        try:
            fn(*([f"{folder}/{fn.__name__}"] if fn in IN_FOLDERS else []))
        except (Exception, pytest.fail.Exception):
            failed.append(f"{fn.__name__}:\n{traceback.format_exc()}")
    return failed


def test_loops_as_users_have_them() -> None:
    with tempfile.TemporaryDirectory() as folder:
        for failed in on_ranks(2, all_loops, folder, timeout=900):
            assert not failed, "\n".join(failed)
