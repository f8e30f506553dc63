"""PipeDream's weight stashing against its recurrence in one process, all ranks on threads; and what cannot be a stale pipeline."""
from __future__ import annotations

import copy
from functools import partial

import pytest
import stale_reference
import torch
from pipeline_ranks import on_threads, ranks_of

import autoshard
from autoshard import Pipeline
from autoshard.decide.pipeline_options import SCHEDULES
from autoshard.errors import UsageError
from autoshard.pipeline import schedules
from autoshard.runtime.pipeline.stale import StaleRank, made_by
from autoshard.runtime.pipeline.stash import Stash
from models import llama, mlp
from tests.pipeline.cut_models import SEQ, subject

SGD = partial(torch.optim.SGD, lr=0.1)
MOMENTUM = partial(torch.optim.SGD, lr=0.05, momentum=0.9)
ADAMW = partial(torch.optim.AdamW, lr=0.01)
MANY = 9


def model_of(name: str) -> tuple[torch.nn.Module, list[tuple[torch.Tensor, ...]], object]:
    """In float64, with mini-batches of five rows."""
    torch.manual_seed(3)
    module, sizes = {"mlp": (mlp, dict(widths=(12, 20, 20, 20, 7))), "llama": (llama, dict(seq=SEQ, layers=2))}[name]
    made = [module.build("tiny", batch=5, **sizes) for _ in range(MANY)]
    model = made[0][0].double()
    return model, [tuple(t.double() if t.is_floating_point() else t for t in batch) for _, batch in made], module.loss


CUTS = {("mlp", 2): ("layers.1",), ("mlp", 4): ("layers.1", "layers.2", "layers.3"), ("llama", 2): ("layers.1",),
        ("llama", 4): ("layers.0", "layers.1", "norm")}


def stale(name: str, ranks: int, optimizer, pieces: tuple[int, ...] = (MANY,)):
    """Trained in calls of so many mini-batches: losses on every rank, weights by name, the stages of these, versions that ranks held."""
    model, batches, loss = model_of(name)
    _, steps = ranks_of(copy.deepcopy(model), batches[0], f"pp={ranks}", Pipeline(1, "1f1b", CUTS[name, ranks]), loss)
    pipes = {id(step): StaleRank(step, optimizer(list(step.stored.params.values()))) for step in steps}
    losses, first = [[] for _ in steps], 0
    for count in pieces:
        def run(step, part=batches[first:first + count]):
            return pipes[id(step)].run(len(part), lambda m: (part[m], [None] * len(part[m]), m)).tolist()

        losses = [so_far + more for so_far, more in zip(losses, on_threads(steps, run), strict=True)]
        first += count
    stage_of = {n: s.index for s in steps[0].made.cut.stages for n in s.names("param")}
    return losses, {n: p.detach() for step in steps for n, p in step.stored.params.items()}, stage_of, [pipe.versions for pipe in pipes.values()]


def off(found: dict, want: dict) -> float:
    assert found.keys() == want.keys(), "some parameter is missing"
    return max(float((found[n] - want[n]).norm() / want[n].norm()) for n in want)


@pytest.mark.parametrize(("name", "ranks", "optimizer"), [
    ("mlp", 2, SGD), ("mlp", 2, MOMENTUM), ("mlp", 4, SGD), ("mlp", 4, MOMENTUM), ("mlp", 4, ADAMW), ("llama", 2, SGD), ("llama", 4, MOMENTUM)])
def test_the_recurrence(name, ranks, optimizer):
    """And it is not what training without stages computes."""
    losses, weights, stage_of, versions = stale(name, ranks, optimizer)
    model, batches, loss = model_of(name)
    wanted, final = stale_reference.trained(model, stage_of, batches, loss, optimizer)
    assert all(rank == pytest.approx(wanted, rel=1e-9) for rank in losses)
    assert off(weights, final) < 1e-9
    assert versions == list(range(ranks, 0, -1)), "stage s of n holds n - s + 1 versions of its weights"
    fresh = stale_reference.trained(model, dict.fromkeys(stage_of, 0), batches, loss, optimizer)[1]
    assert off(weights, fresh) > 1e-5


def test_every_call_fills_and_drains():
    """Behind a call all updates are made: the next one begins with them."""
    losses, weights, stage_of, _ = stale("mlp", 4, SGD, (4, 1, 4))
    model, batches, loss = model_of("mlp")
    wanted = []
    for part in (batches[:4], batches[4:5], batches[5:]):
        found, final = stale_reference.trained(model, stage_of, part, loss, SGD)
        model.load_state_dict(final)
        wanted += found
    assert losses[0] == pytest.approx(wanted, rel=1e-9)
    assert off(weights, final) < 1e-9


@pytest.mark.parametrize("fault", ["the newest weights in backward", "updates in place"])
def test_a_fault_is_seen(monkeypatch, fault):
    if fault == "updates in place":
        monkeypatch.setattr("autoshard.runtime.params.stored.Stored.renew", lambda self, name: None)
    else:
        monkeypatch.setattr(Stash, "go_back", lambda self, m: None)
    _, weights, stage_of, _ = stale("mlp", 4, SGD)  # the first stage of two reads its weights in forward alone
    model, batches, loss = model_of("mlp")
    assert off(weights, stale_reference.trained(model, stage_of, batches, loss, SGD)[1]) > 1e-6


def test_tied_weights_are_refused():
    what = subject("gpt", 2, 1)
    _, steps = ranks_of(what.model, what.batch, "pp=2", Pipeline(1, "1f1b", ("h.1",)), what.loss)
    with pytest.raises(UsageError, match=r"wte\.weight is read in stages 0, 1, .* a stale pipeline has no tied weights"):
        StaleRank(steps[0], None)


def test_nothing_chooses_it():
    assert not [n for n in (*SCHEDULES, *schedules.SCHEDULES) if "stale" in n or "pipedream" in n]


@pytest.mark.parametrize(("given", "words"), [
    ({"mesh": "dp=2"}, "never chosen, so its stages are given"), ({"mesh": "pp=1,dp=2"}, "never chosen"), ({"mesh": "auto:2"}, "never chosen"),
    ({"pipeline": Pipeline(2)}, "pipeline= has no meaning|unexpected"), ({"training": False}, "training= has no meaning"),
    ({"optimizer": "sgd"}, "a function that makes one"), ({"mesh": "pp=8"}, "8 stages need 8 blocks at least, and the model has 4")])
def test_bad_calls(given, words):
    model, batches, loss = model_of("mlp")
    with pytest.raises(UsageError, match=words):
        autoshard.stale_pipeline(model, **{"mesh": "pp=2", "example_inputs": batches[0], "loss_fn": loss, "optimizer": SGD, **given})


def test_what_makes_no_optimizer():
    with pytest.raises(UsageError, match="every rank has one for its own stage"):
        made_by(lambda params: None, [])
    assert isinstance(made_by(SGD, [torch.nn.Parameter(torch.zeros(1))]), torch.optim.SGD)
