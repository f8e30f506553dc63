"""Fused projections of grouped heads on two and four processes: heads of the query split, the weight one parameter that users see as it is in the model."""
from __future__ import annotations

import pytest
import torch
from grouped_models import build, loss

import autoshard
from tests.dist.harness import assert_same_training, on_ranks, twins
from tests.dist.stored_forms import StoredForm

pytestmark = pytest.mark.dist
ATTENTION = "_scaled_dot_product_flash_attention_for_cpu_0"
HEADS = {ATTENTION: "-,tp,-,-", "attention.out.weight": (None, "tp")}
FORMS = ({"attention.qkv.weight": (None, "tp")}, {"attention.qkv.weight": ("tp", None), "attention.qkv.bias": ("tp",)},
         {"attention.qkv.weight": (None, None), "attention.qkv.bias": (None,)})
"""Ways to store the fused weight."""


def compiled(model, seeds, mesh="tp=2", **options):
    return autoshard.compile(model, mesh, loss_fn=loss, cluster="cpu-gloo", cache=False, seeds=HEADS | seeds, **options)


def loss_of(model, batch):
    return model(*batch)


def alone(model, batch):
    return loss(model(batch[0]), batch[1])


def trains_alike(mesh: str, way: str, heads: int, shared: int, form: int, backend: str = "eager") -> None:
    model, reference, batch = twins(lambda: build(way, heads, shared), torch.float64)
    original = {n: p.detach().clone() for n, p in model.named_parameters()}
    fast = compiled(model, FORMS[form], mesh, backend=backend)
    fast.prepare(*batch)
    assert fast.plan.ops[ATTENTION].inputs[0][-1] == 1, "heads of the query are split"
    for name, p in original.items():
        assert torch.equal(fast.get_parameter(name).full_tensor(), p), "the user sees the model's order"
    assert_same_training(fast, reference, [batch] * 3, loss_of, alone)


def of_two() -> None:
    trains_alike("tp=2", "split", 6, 2, 0)
    trains_alike("tp=2", "slices", 6, 3, 1)  # three heads of a rank share one head of keys and half of another


FORM = StoredForm(build, compiled, loss_of, alone)


def stored_and_read(folder: str) -> None:
    for at, seeds in enumerate(FORMS):
        FORM.goes_on(folder, at, seeds, "tp=2")


def test_training_is_that_of_one_process():
    on_ranks(2, of_two)


def test_checkpoints_go_on_under_other_plans(tmp_path):
    on_ranks(2, stored_and_read, str(tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize("mesh, way, heads, shared, form", [
    ("tp=4", "heads", 12, 3, 0),  # three heads of four that share one
    ("tp=4", "picked heads", 12, 2, 2),
    ("dp=2,tp=2", "transposed weight", 6, 2, 1),
])
def test_four_processes(mesh, way, heads, shared, form):
    on_ranks(4, trains_alike, mesh, way, heads, shared, form)


@pytest.mark.slow
def test_norms_count_every_share_once():
    for seeds in FORMS:
        on_ranks(2, FORM.clips_alike, seeds)


@pytest.mark.slow
def test_another_number_of_processes(tmp_path):
    """From two ranks to four."""
    on_ranks(2, FORM.goes_on, str(tmp_path), 0, FORMS[0], "tp=2")
    on_ranks(4, FORM.goes_on, str(tmp_path), 1, FORMS[1], "dp=2,tp=2")


@pytest.mark.slow
def test_compiled_by_inductor():
    on_ranks(2, trains_alike, "tp=2", "slices", 6, 3, 0, "inductor")
