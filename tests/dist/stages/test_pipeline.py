"""Pipelines on gloo processes: training against one process, evaluation, clipping, checkpoints into another cut, a rank that ends."""
from __future__ import annotations

import copy
import os
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict
from torch.nn import functional as F

import autoshard
from autoshard import Pipeline
from autoshard.errors import PlanError, UsageError
from tests.dist.harness import on_ranks, whole
from tests.dist.pipeline_cases import Case, run_cases, subject


def test_two_processes():
    results = on_ranks(2, run_cases, [Case("gpt", "pp=2", 3), Case("llama", "pp=2", 4, "zb1p"), Case("t5", "pp=2", 3, "interleaved", (), 2)])[0]
    assert all(r.passed for r in results), results


@pytest.mark.slow
def test_four_processes():
    results = on_ranks(4, run_cases, [Case("gpt", "pp=2,dp=2", 2), Case("llama", "pp=2,tp=2", 3, "zb1p"), Case("t5", "pp=4", 3)])[0]
    assert all(r.passed for r in results), results


def _local_inputs() -> float:
    """Every rank passes the piece of its place on dp; the difference to one process on the whole batch."""
    case = Case("gpt", "pp=2,dp=2", 2)
    model, batch, loss = subject(case)
    reference = copy.deepcopy(model)
    dp = dist.get_rank() % 2
    pieces = tuple(t.chunk(2)[dp] for t in batch)
    compiled = autoshard.compile(model, case.mesh, pieces, loss_fn=loss, cluster="cpu-gloo", cache=False, inputs="local",
                                 pipeline=Pipeline(microbatches=2))
    got, want = compiled(*pieces), loss(reference(batch[0]), batch[1])
    got.backward()
    want.backward()
    expected = {n: p.grad for n, p in reference.named_parameters()}
    errors = [float((whole(p.grad) - expected[n]).norm() / expected[n].norm()) for n, p in compiled.named_parameters()]
    return max(abs(got.item() - want.item()), *errors)


@pytest.mark.slow
def test_local_inputs():
    assert max(on_ranks(4, _local_inputs)) < 1e-9


def _resumed_groups(model: nn.Module, folder: str) -> list[float]:
    """Learning rates of two groups after states by name were loaded; the last rank has no parameter of the first group."""
    def grouped(lr: float) -> torch.optim.Optimizer:
        apart = [[p for n, p in model.named_parameters() if ("wpe" in n) == first] for first in (True, False)]
        assert bool(apart[0]) == (dist.get_rank() == 0) and apart[1]
        return torch.optim.AdamW([{"params": apart[0], "lr": 2 * lr}, {"params": apart[1]}], lr=lr)

    model.zero_grad()
    saved, fresh = grouped(1e-3), grouped(1.0)
    by_name = StateDictOptions(flatten_optimizer_state_dict=True)
    dcp.save(get_optimizer_state_dict(model, saved, options=by_name), checkpoint_id=folder)
    state = get_optimizer_state_dict(model, fresh, options=by_name)
    dcp.load(state, checkpoint_id=folder)
    set_optimizer_state_dict(model, fresh, state, options=by_name)
    return [group["lr"] for group in fresh.param_groups]


def _training_loop(folder: str) -> dict[str, float]:
    """Differences to one process."""
    case = Case("gpt", "pp=2", 4)
    model, batch, loss = subject(case)
    reference, blank = copy.deepcopy(model), copy.deepcopy(model).to("meta")
    compiled = autoshard.compile(model, "pp=2", batch, loss_fn=loss, cluster="cpu-gloo", cache=False, pipeline=Pipeline(microbatches=4))
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-3) for m in (compiled, reference)]
    with torch.no_grad():
        compiled(*batch)  # whose variant has no gradients, and so none of a tied weight
    compiled(*batch).backward()
    loss(reference(batch[0]), batch[1]).backward()
    got = autoshard.clip_grad_norm_(compiled, 0.5)
    want = torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.5)
    for optimizer in optimizers:
        optimizer.step()
    compiled.eval(), reference.eval()
    with torch.no_grad():
        evaluated, expected = compiled(*batch), loss(reference(batch[0]), batch[1])
    dcp.save(compiled.state_dict(), checkpoint_id=folder)
    other = autoshard.compile(blank, "pp=2", batch, loss_fn=loss, cluster="cpu-gloo", cache=False, checkpoint=folder, training=False,
                              pipeline=Pipeline(cuts=["lm_head"]))
    with torch.no_grad():
        loaded = other(*batch)
    names: list[list[str]] = [[], []]
    dist.all_gather_object(names, sorted(dict(other.named_parameters())))
    assert len(names[1]) == 1 and "wte.weight" in names[0], names  # the other cut
    assert _resumed_groups(compiled, f"{folder}-groups") == [2e-3 if dist.get_rank() == 0 else 2.0, 1e-3]
    return {"norm": abs(got.item() - want.item()), "evaluated": abs(evaluated.item() - expected.item()), "loaded": abs(loaded.item() - expected.item())}


def test_a_training_loop(tmp_path):
    for found in on_ranks(2, _training_loop, str(tmp_path / "checkpoint")):
        assert all(error < 1e-12 for error in found.values()), found


def _clipped_beside_a_frozen_stage() -> list[float]:
    """Differences of norms to one process: the first rank has no gradient, then gradients of another dtype than the second one's, then none again,
    while the pipelines before are let go, and at last kept. Of weights after a step of an optimizer of what is trained, of which the first rank has none."""
    off = []
    for frozen in (True, False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 8, dtype=torch.float64 if frozen else torch.float32).requires_grad_(not frozen), Wide(),
                              nn.Linear(8, 8).double(), nn.Linear(8, 3).double())
        x, target = torch.randn(4, 6, dtype=model[0].weight.dtype), torch.randint(3, (4,))
        compiled = autoshard.compile(model, "pp=2", (x, target), loss_fn=F.cross_entropy, cache=False, pipeline=Pipeline(microbatches=2, cuts=["2"]))
        compiled(x, target).backward()
        F.cross_entropy(model(x), target).backward()
        theirs = torch.nn.utils.clip_grad_norm_
        for norm, clip in ((2.0, theirs), (float("inf"), None), (float("inf"), theirs), (1.0, theirs), (2.0, None)):
            wanted = theirs([p for p in model.parameters() if p.requires_grad], 0.1, norm)
            got = clip(compiled.parameters(), 0.1, norm, error_if_nonfinite=True) if clip else autoshard.clip_grad_norm_(compiled, 0.1, norm)
            off.append(abs(got.item() - wanted.item()))
        expected = dict(model.named_parameters())
        off += [float((p.grad - expected[n].grad).norm()) for n, p in compiled.named_parameters() if p.grad is not None]
        steps = [torch.optim.SGD([p for p in m.parameters() if p.requires_grad], lr=0.1, momentum=0.9) for m in (compiled, model)]
        for optimizer in steps:
            optimizer.step()
        by_name = StateDictOptions(flatten_optimizer_state_dict=True)
        state = get_optimizer_state_dict(compiled, steps[0], options=by_name)
        assert bool(state) == any(p.requires_grad for p in compiled.parameters())
        set_optimizer_state_dict(compiled, steps[0], state, options=by_name)
        off += [float((p - expected[n]).norm()) for n, p in compiled.named_parameters()]
        compiled.circle = [compiled]  # only the garbage collector finds it
    _refused_norms(compiled, nn.Linear(2, 2).double())
    return off


def _refused_norms(first: nn.Module, other: nn.Module) -> None:
    """Without a gradient here and beside another pipeline that trains, and of gradients that are not all of the pipeline."""
    model, x, target = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 3)), torch.randn(4, 6), torch.randint(3, (4,))
    second = autoshard.compile(model, "pp=2", (x, target), loss_fn=F.cross_entropy, cache=False, pipeline=Pipeline(microbatches=2, cuts=["1"]))
    second(x, target).backward()
    beside = nn.functional.mse_loss(other(torch.zeros(1, 2).double()), torch.ones(1, 2).double())
    beside.backward()
    with pytest.raises(UsageError, match="clip each model's parameters in a call of its own"):
        torch.nn.utils.clip_grad_norm_([*second.parameters(), *other.parameters()], 0.1)
    if dist.get_rank() == 0:
        with pytest.raises(UsageError, match="2 pipelines that train are alive"):
            torch.nn.utils.clip_grad_norm_(first.parameters(), 0.1)
    assert torch.nn.utils.clip_grad_norm_(other.parameters(), 0.1) > 0


def _unfrozen() -> str:
    """In the first stage, whose rank alone sees it; calls without gradients do not mind."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8).requires_grad_(False), nn.Linear(8, 8), nn.Linear(8, 3))
    x, target = torch.randn(4, 6), torch.randint(3, (4,))
    compiled = autoshard.compile(model, "pp=2", (x, target), loss_fn=F.cross_entropy, cache=False, pipeline=Pipeline(microbatches=2, cuts=["2"]))
    compiled.requires_grad_(True)
    with torch.no_grad():
        compiled(x, target)
    if dist.get_rank() == 1:
        return ""
    with pytest.raises(UsageError) as refused:
        compiled(x, target)
    return str(refused.value)


def test_unfreezing_is_refused():
    """The program of a pipeline is not made anew for it, and would not train the parameter."""
    assert "0.weight.requires_grad became True behind autoshard.compile" in on_ranks(2, _unfrozen)[0]


class Wide(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.double()


def test_clipping_and_steps_where_a_rank_has_no_gradient():
    assert max(max(off) for off in on_ranks(2, _clipped_beside_a_frozen_stage)) < 1e-6


def _left_alone() -> None:
    """A stage ends in the middle of training, with exit code 0, for which the harness does not end the others."""
    case = Case("gpt", "pp=2", 4)
    model, batch, loss = subject(case)
    compiled = autoshard.compile(model, "pp=2", batch, loss_fn=loss, cluster="cpu-gloo", cache=False, check_inputs="never",
                                 pipeline=Pipeline(microbatches=4))
    compiled(*batch).backward()
    if dist.get_rank() == 1:
        os._exit(0)
    compiled(*batch)


def test_a_stage_that_ends_is_named():
    with pytest.raises(AssertionError, match=r"rank 0 of the pipeline could not (send|receive) .* of micro-batch \d.*rank 1 being at the other end"):
        on_ranks(2, _left_alone, timeout=120.0)


class Evaluated(nn.Module):
    """Evaluation reads what training does not, in the first stage, in the last one, and in none."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.head, self.other_head = nn.ModuleList(nn.Linear(8, 8) for _ in range(4)), nn.Linear(8, 5), nn.Linear(8, 5)
        for name in ("mean", "shift", "ema"):
            self.register_buffer(name, torch.randn(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.training:
            x = x - self.mean
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.head(x) if self.training else self.head(x) + self.other_head(x + self.shift)


UNREAD = {"mean", "shift", "ema", "other_head.weight", "other_head.bias"}


def _evaluated(seed: int) -> tuple[nn.Module, nn.Module, tuple[torch.Tensor, torch.Tensor]]:
    torch.manual_seed(seed)
    model = Evaluated().double()
    torch.manual_seed(0)
    return model, copy.deepcopy(model), (torch.randn(4, 8, dtype=torch.float64), torch.randint(5, (4,)))


def _keeps_what_evaluation_reads(folder: str) -> dict[str, float]:
    """Differences to one process. The second rank initialises the model differently, and gets the first one's numbers of what both have."""
    _, reference, batch = _evaluated(3)
    model = _evaluated(3)[0]
    if dist.get_rank():
        with torch.no_grad():
            for name in UNREAD:
                model.get_parameter(name).zero_() if "head" in name else model.get_buffer(name).zero_()
    options = {"loss_fn": F.cross_entropy, "cluster": "cpu-gloo", "cache": False}
    compiled = autoshard.compile(model, "pp=2", batch, pipeline=Pipeline(microbatches=2, cuts=["layers.2"]), **options)
    one, two = (torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (compiled, reference))
    compiled(*batch).backward()
    F.cross_entropy(reference(batch[0]), batch[1]).backward()
    off = {"norm": abs(torch.nn.utils.clip_grad_norm_(compiled.parameters(), 0.5) - torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.5)).item()}
    for optimizer in (one, two):
        optimizer.step()
    reference.eval()
    want = F.cross_entropy(reference(batch[0]), batch[1]).item()

    def evaluated(module: nn.Module) -> float:
        module.eval()
        with torch.no_grad():
            return abs(whole(module(*batch)).item() - want)

    off["evaluated"] = evaluated(compiled)
    assert UNREAD <= compiled.state_dict().keys(), "every rank has what no stage of training reads"
    dcp.save(compiled.state_dict(), checkpoint_id=folder)
    dist.barrier()
    other = autoshard.compile(_evaluated(4)[0].to("meta"), "dp=2", checkpoint=folder, **options)
    off["data parallel"] = evaluated(other)
    again = autoshard.compile(_evaluated(5)[0], "pp=2", batch, pipeline=Pipeline(microbatches=2, cuts=["layers.1"]), **options)
    again.load_state_dict({name: t.clone() for name, t in reference.state_dict().items()})
    off["loaded whole"] = evaluated(again)
    expected = reference.state_dict()
    of_a_stage = next(name for name in ("layers.0.weight", "layers.1.weight") if name not in again.state_dict())
    with pytest.raises(RuntimeError, match=f"size mismatch for {of_a_stage}, which another stage has"):
        again.load_state_dict({**expected, of_a_stage: torch.zeros(3, 3)})
    return off | {name: float((whole(t) - expected[name]).abs().max()) for name, t in again.state_dict().items()}


def test_what_evaluation_alone_reads_is_kept(tmp_path):
    """It was in no state dict, and the first evaluation raised."""
    for found in on_ranks(2, _keeps_what_evaluation_reads, str(tmp_path / "checkpoint")):
        assert all(error < 1e-12 for error in found.values()), found


class Trained(Evaluated):
    """The other head is for training."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.head(x) + self.other_head(x) if self.training else self.head(x)


def _changed_behind_evaluation() -> str:
    """The first call does not read a head that a later one trains."""
    torch.manual_seed(3)
    model, batch = Trained().double(), _evaluated(3)[2]
    compiled = autoshard.compile(model.eval(), "pp=2", batch, loss_fn=F.cross_entropy, cache=False, training=False,
                                 pipeline=Pipeline(microbatches=2, cuts=["layers.2"]))
    compiled.train()
    with pytest.raises(PlanError) as refused:
        compiled(*batch)
    return str(refused.value)


def test_training_what_every_rank_has_is_refused():
    assert all("this call changes other_head.bias, which the program of the first call did not read" in text
               for text in on_ranks(2, _changed_behind_evaluation))


def _normed(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 5)).double()


def _loads_batch_norms() -> dict[str, float]:
    """Also a state dict without versions, as those of `get_model_state_dict`."""
    batch = (torch.randn(4, 6, dtype=torch.float64), torch.randint(5, (4,)))
    model = autoshard.compile(_normed(0), "pp=2", batch, loss_fn=F.cross_entropy, cluster="cpu-gloo", cache=False, pipeline=Pipeline(cuts=["2"]))
    found = {}
    for seed, kind in ((1, lambda state: state), (2, dict)):
        wanted = _normed(seed).state_dict()
        model.load_state_dict(kind(wanted))
        found |= {f"{name} of {seed}": float((whole(t) - wanted[name]).abs().max()) for name, t in model.state_dict().items()}
    return found


def test_batch_norms_of_other_stages_are_no_obstacle_to_loading():
    for found in on_ranks(2, _loads_batch_norms):
        assert found and not any(found.values()), found


class Gained(nn.Module):
    """A layer with a number in a config, which all layers share, one in a list, and a tensor that is no buffer."""

    def __init__(self, config: SimpleNamespace) -> None:
        super().__init__()
        self.layer, self.config, self.gains, self.mask = nn.Linear(6, 6), config, [1.0], torch.linspace(0, 1, 6).double()
        self.dropped: bool = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x if self.dropped else torch.tanh(self.layer(x)) * self.mask * self.config.gain * self.gains[0]


def _changed_config() -> list[float]:
    torch.manual_seed(0)
    config = SimpleNamespace(gain=1.0)
    model, batch = nn.Sequential(Gained(config), Gained(config)).double(), (torch.randn(4, 6).double(), torch.randn(4, 6).double())
    fast = autoshard.compile(copy.deepcopy(model), "pp=2", batch, loss_fn=F.mse_loss, cluster="cpu-gloo", cache=False,
                             pipeline=Pipeline(microbatches=2))
    errors = []
    for change in (lambda m: None, lambda m: setattr(m[0].config, "gain", 0.5), lambda m: m[1].gains.__setitem__(0, 2.0),
                   lambda m: setattr(m[1], "mask", 2 * m[1].mask)):
        for m in (model, fast):
            change(m)
        errors.append(abs(fast(*batch).item() - F.mse_loss(model(batch[0]), batch[1]).item()))
    fast[1].dropped = True
    with pytest.raises(UsageError, match="Stages of this call begin where those of the first one do"):
        fast(*batch)
    return errors


def test_numbers_in_configs_and_constants_may_change():
    assert max(max(errors) for errors in on_ranks(2, _changed_config)) < 1e-12
