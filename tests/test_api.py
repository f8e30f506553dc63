"""The public page: what `plan` and `compile` agree on, and what `compile` refuses."""
from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import autoshard
from autoshard.errors import MeshError, PlanError

X, TARGET = torch.randn(8, 16), torch.randint(4, (8,))


def model(width: int = 32) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, width), nn.ReLU(), nn.Linear(width, 4))


def planned(mesh: str, width: int = 32) -> autoshard.Plan:
    return autoshard.plan(model(width), mesh, (X, TARGET), loss_fn=F.cross_entropy, cluster="cpu-gloo")


def compiled(mesh: str, **options) -> nn.Module:
    return autoshard.compile(model(), mesh, (X, TARGET), loss_fn=F.cross_entropy, cluster="cpu-gloo", cache=False, **options)


def test_one_process_gives_the_same_loss_and_gradients():
    plain, sharded = model(), compiled("d=1")
    want, got = F.cross_entropy(plain(X), TARGET), sharded(X, TARGET)
    want.backward()
    got.backward()
    torch.testing.assert_close(got, want)
    for (name, a), b in zip(plain.named_parameters(), sharded.parameters(), strict=True):
        torch.testing.assert_close(b.grad, a.grad, msg=name)


def test_a_saved_plan_is_replayed(tmp_path):
    path = tmp_path / "plan.json"
    planned("d=1").save(path)
    assert compiled("d=1", plan=path).plan == autoshard.Plan.load(path)


def test_plan_for_another_mesh():
    with pytest.raises(PlanError, match="d=2.*d=1"):
        compiled("d=1", plan=planned("d=2"))


def test_plan_for_another_model():
    with pytest.raises(PlanError, match="another program"):
        compiled("d=1", plan=planned("d=1", width=64))


def test_mesh_larger_than_the_world_says_how_to_start():
    with pytest.raises(MeshError, match="nproc-per-node 4"):
        compiled("d=4")


def test_plans_do_not_depend_on_weights():
    with torch.device("meta"):
        bare = model()
    assert autoshard.plan(bare, "d=2", (X, TARGET), loss_fn=F.cross_entropy, cluster="cpu-gloo") == planned("d=2")
