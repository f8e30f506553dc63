"""Fused projections on two and four processes: split by heads, stored as shares of every part, seen by the user in the model's order."""
from __future__ import annotations

from itertools import product

import pytest
import torch
import torch.distributed.checkpoint as dcp
from fused_models import SPLIT_HEADS, build, loss

import autoshard
from autoshard._torch import dtensor
from autoshard.base.graph import TensorMeta
from autoshard.base.spec import R
from autoshard.runtime.params.strided import cut, placements
from autoshard.runtime.ranks.place import locate
from tests.dist.harness import assert_near, assert_same_training, on_ranks, twins
from tests.dist.stored_forms import StoredForm

pytestmark = pytest.mark.dist
COLUMNS = {"attention.qkv.weight": (None, "tp"), "attention.qkv.bias": (None,), "gate_up.weight": (None, "tp")}
"""Plain shards of the same weights."""


def compiled(model, seeds, mesh="tp=2", **options):
    return autoshard.compile(model, mesh, loss_fn=loss, cluster="cpu-gloo", cache=False, seeds=seeds, **options)


def loss_of(model, batch):
    return model(*batch)


def alone(model, batch):
    return loss(model(batch[0]), batch[1])


def heads_stay_split(mesh: str, way: str, backend: str = "eager") -> None:
    model, reference, batch = twins(lambda: build(way), torch.float64)
    original = {n: p.detach().clone() for n, p in model.named_parameters()}
    fast = compiled(model, SPLIT_HEADS, mesh, backend=backend)
    fast.prepare(*batch)
    place = fast.place.coordinates[-1]
    for name, parts in (("attention.qkv.weight", 3), ("attention.qkv.bias", 3), ("gate_up.weight", 2)):
        p = fast.get_parameter(name)
        assert torch.equal(p.full_tensor(), original[name]), "the user sees the model's order"
        shares = [part.chunk(2)[place] for part in original[name].chunk(parts)]
        assert torch.equal(p.to_local(), torch.cat(shares)), "a rank has its share of every part"
    moved = [c for c in fast.plan.collectives if c.module.startswith("attention") and c.kind != "all_reduce"]
    assert not moved, f"heads are not gathered: {moved}"
    assert_same_training(fast, reference, [batch] * 3, loss_of, alone)


def trains_alike() -> None:
    for way in ("split", "view"):
        heads_stay_split("tp=2", way)


FORM = StoredForm(build, compiled, loss_of, alone)


def stored_and_read(folder: str) -> None:
    """Saved after a step from shares of parts, read into plain shards on the same ranks, saved from there, read into shares again."""
    for at, seeds in enumerate((SPLIT_HEADS, COLUMNS, SPLIT_HEADS)):
        FORM.goes_on(folder, at, seeds, "tp=2")


def loaded_whole() -> None:
    """`load_state_dict` of whole tensors, a model on the meta device from a checkpoint, and `replan`."""
    model, reference, batch = twins(build, torch.float64)
    with torch.device("meta"):
        empty = build()[0].double()
    fast = compiled(empty, SPLIT_HEADS)
    torch.manual_seed(5)
    fast.prepare(*batch)
    fast.load_state_dict(reference.state_dict())
    assert_near("loss", fast(*batch), alone(reference, batch), 1e-9)
    assert {n: tuple(t.shape) for n, t in fast.state_dict().items()} == {n: tuple(t.shape) for n, t in reference.state_dict().items()}
    fast.eval()
    with torch.no_grad():
        assert_near("loss of evaluation", fast(*batch), alone(reference, batch), 1e-9)


def from_checkpoint(folder: str) -> None:
    FORM.from_checkpoint(folder, SPLIT_HEADS)


def test_training_is_that_of_one_process():
    on_ranks(2, trains_alike)


def test_norms_count_every_share_once():
    on_ranks(2, FORM.clips_alike, SPLIT_HEADS)


def test_checkpoints_go_on_under_other_plans(tmp_path):
    on_ranks(2, stored_and_read, str(tmp_path))


def test_whole_tensors_and_checkpoints_are_cut_into_shares(tmp_path):
    on_ranks(2, loaded_whole)
    on_ranks(2, from_checkpoint, str(tmp_path / "whole"))


def test_whole_state_is_cut_into_shares():
    """Of a state dict that the first rank sends, torch cut one block: other rows of q, k and v."""
    on_ranks(2, FORM.takes_whole_state, SPLIT_HEADS, "tp=2")


def axes_nest(folder: str) -> None:
    """Every way to lay a weight with a dim of three parts on two axes, as torch and its checkpoints see it."""
    place = locate("dp=2,tp=2")
    meta = TensorMeta((24, 8), torch.float64, ((3, 8), (8,)), (0,))
    value, gradient = (torch.randn(24, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(i)) for i in range(2))
    for n, spec in enumerate(product((R, 1, 2), repeat=2)):
        laid = placements(spec, (2, 2), meta)
        one, grad = (dtensor(cut(t, laid, (2, 2), place.coordinates).contiguous(), place.device_mesh, laid, t.shape, t.dtype) for t in (value, gradient))
        mine, other = torch.nn.Parameter(one), torch.nn.Parameter(value.clone())
        assert torch.equal(mine.full_tensor(), value), f"{laid} put together"
        mine.grad, other.grad = grad, gradient.clone()
        optimizers = [torch.optim.AdamW([p], lr=0.1) for p in (mine, other)]
        for optimizer in optimizers:
            optimizer.step()
        assert_near(f"{laid} after a step", mine, other, 1e-12)
        states = [next(iter(o.state.values()))["exp_avg"] for o in optimizers]
        assert_near(f"state of {laid}", *states, 1e-12)
        dcp.save({"w": mine.detach(), "s": states[0]}, checkpoint_id=f"{folder}/{n}")
        read = {"w": torch.zeros_like(value), "s": torch.zeros_like(value)}
        dcp.load(read, checkpoint_id=f"{folder}/{n}")
        assert_near(f"{laid} from a checkpoint", read["w"], other, 1e-12)
        assert_near(f"state of {laid} from a checkpoint", read["s"], states[1], 1e-12)


@pytest.mark.slow
def test_two_axes_on_one_dim(tmp_path):
    on_ranks(4, axes_nest, str(tmp_path))
    on_ranks(4, heads_stay_split, "dp=2,tp=2", "split")


@pytest.mark.slow
def test_compiled_by_inductor():
    on_ranks(2, heads_stay_split, "tp=2", "slices", "inductor")
