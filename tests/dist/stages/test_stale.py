"""`autoshard.stale_pipeline` on gloo processes, as a user calls it."""
from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import stale_reference
import torch
import torch.distributed as dist

import autoshard
from autoshard.errors import InfeasibleError, UsageError
from models import mlp
from tests.dist.harness import on_ranks, whole

OPTIMIZER = partial(torch.optim.SGD, lr=0.05, momentum=0.9)


def _train(mesh: str, rows: int) -> dict[str, Any]:
    """Differences to the recurrence."""
    torch.manual_seed(1)
    model, batch = mlp.build("tiny", batch=rows, widths=(12, 20, 20, 20, 7))
    model = model.double()
    batches = [(torch.randn(rows, 12, dtype=torch.float64), torch.randint(7, (rows,))) for _ in range(7)]
    how = dict(loss_fn=mlp.loss, optimizer=OPTIMIZER, cluster="cpu-gloo", cache=False)
    pipe = autoshard.stale_pipeline(copy.deepcopy(model), mesh, batches[0], **how)
    losses = pipe.train(batches)
    names: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(names, (pipe.module.place.coordinates[0], list(dict(pipe.module.named_parameters()))))
    wanted, final = stale_reference.trained(model, {n: s for s, own in names for n in own}, batches, mlp.loss, OPTIMIZER)
    out: dict[str, Any] = {"weights": max(float((whole(p) - final[n]).norm() / final[n].norm()) for n, p in pipe.module.named_parameters()),
                           "losses": float((losses - torch.tensor(wanted, dtype=torch.float64)).abs().max()), "versions": pipe.versions}
    least = pipe.module.plan.fullest.total
    pipe.module.eval()
    with torch.no_grad():
        out["evaluated"] = abs(pipe.module(*batches[0]).item() - mlp.loss(torch.func.functional_call(model, final, batches[0][:1]), batches[0][1]).item())
    pipe.module.train()
    for bad, words in (((b for b in batches), "batches with a length"), ([], "no batches"),
                       ([tuple(t[:2] for t in batches[0])], "drop a last batch that is smaller")):
        with pytest.raises(UsageError, match=words):
            pipe.train(bad)
    with pytest.raises(InfeasibleError, match=r"stage 0 .* 1 further mini-batches under way|rank 0 failed: stage 0"):
        autoshard.stale_pipeline(copy.deepcopy(model), mesh, batches[0], memory_budget=1.02 * least, **how)
    return out


def _check(found: list[dict[str, Any]], ranks: list[int]) -> None:
    for of, stage in zip(found, ranks, strict=True):
        assert max(of["weights"], of["losses"], of["evaluated"]) < 1e-9, of
        assert of["versions"] == 2 - stage


def test_two_processes():
    _check(on_ranks(2, _train, "pp=2", 5), [0, 1])


@pytest.mark.slow
def test_stages_of_two_ranks():
    _check(on_ranks(4, _train, "pp=2,dp=2", 6), [0, 0, 1, 1])
