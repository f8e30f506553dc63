"""`F.embedding_bag` with a matrix of ids: torch's numbers, which calls of a model become the op, and its plans."""
from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import autoshard
from autoshard.program.trace import trace
from autoshard.rules.ops.embedding_bag import EMBEDDING_BAG
from autoshard.verification.check import verify

WITHIN = {torch.float64: 1e-12, torch.float32: 1e-6, torch.bfloat16: 2e-2}


class Bags(nn.Module):
    """One table in `own` way, and a head."""

    def __init__(self, rows: int = 11, weighted: bool = False, **own: object) -> None:
        super().__init__()
        self.bag, self.head, self.weighted = nn.EmbeddingBag(rows, 6, **own), nn.Linear(6, 3), weighted

    def forward(self, ids: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return self.head(self.bag(ids, per_sample_weights=scale.sigmoid() if self.weighted else None)).square()


def inputs(rows: int = 11, bags: int = 6, each: int = 5) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(rows, (bags, each), generator=generator)
    ids[0] = 2  # where that is the row of padding, nothing is left
    return ids, torch.randn(bags, each, dtype=torch.float64, generator=generator)


WAYS = {"mean": {}, "sum": {"mode": "sum"}, "weighted": {"mode": "sum", "weighted": True}, "padded mean": {"padding_idx": 2},
        "padded sum": {"mode": "sum", "padding_idx": -9}, "padded and weighted": {"mode": "sum", "padding_idx": 2, "weighted": True}}
NOT_TAKEN = {"max": {"mode": "max"}, "by frequency": {"scale_grad_by_freq": True}}


def is_taken(model: nn.Module) -> bool:
    graph = trace(model.double(), inputs(), training=True).graph
    return any(op.target is EMBEDDING_BAG for op in graph.of_kind("call"))


@pytest.mark.parametrize("way", WAYS)
def test_on_ranks_numbers_are_those_of_one(way):
    """Split by bags, by rows and by columns of the table, rows that do not divide among them."""
    torch.manual_seed(0)
    for rows, mesh, seed in ((12, "d=2", "d,-"), (12, "d=2", "-,d"), (11, "d=3", None), (11, "a=2,b=2", None)):
        model = Bags(rows, **WAYS[way]).double()
        result = verify(model, mesh, inputs(rows), cluster="cpu-gloo",
                        plans=("searched", "random"), seeds={"bag.weight": seed} if seed else None)
        assert result.ok, result
    assert is_taken(Bags(**WAYS[way]))


@pytest.mark.parametrize("way", NOT_TAKEN)
def test_other_ways_stay_torchs(way):
    assert not is_taken(Bags(**NOT_TAKEN[way]))


@pytest.mark.parametrize("pad", ["weights", "all"])
def test_bags_that_do_not_divide(pad):
    """Five bags on two ranks, and a table of eleven rows."""
    for way in ("mean", "padded and weighted"):
        result = verify(Bags(**WAYS[way]).double(), "d=2", inputs(bags=5), cluster="cpu-gloo", pad=pad)
        assert result.ok, result


@pytest.mark.parametrize("dtype", WITHIN, ids=str)
@pytest.mark.parametrize("skip", [None, 2])
@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("ids_in", [torch.int64, torch.int32], ids=str)
def test_the_op_is_torchs(ids_in, dtype, skip, scaled):
    ids, scale = inputs()
    ids = ids.to(ids_in)
    table, grad = (torch.randn(n, 6, generator=torch.Generator().manual_seed(n)).to(dtype) for n in (11, 6))
    leaves = [table.requires_grad_(), *([scale.to(dtype).detach().requires_grad_()] if scaled else [])]
    found = []
    for out in (EMBEDDING_BAG(table, ids, leaves[1] if scaled else None, skip),
                F.embedding_bag(ids, table, mode="sum", per_sample_weights=leaves[1] if scaled else None, padding_idx=skip)):
        found.append((out, *torch.autograd.grad(out, leaves, grad)))
    for got, want in zip(*found, strict=True):
        assert got.dtype == want.dtype and (got - want).norm() <= WITHIN[dtype] * want.norm()


def test_rows_that_are_skipped_may_be_inf():
    table = torch.tensor([[1.0], [torch.inf], [2.0]])
    assert EMBEDDING_BAG(table, torch.tensor([[0, 1], [2, 2]]), torch.ones(2, 2), 1).tolist() == [[1.0], [4.0]]
    with pytest.raises(RuntimeError):
        EMBEDDING_BAG(table, torch.tensor([[0, 3]]), None, 1)


def test_a_rank_may_have_no_id_of_its_own():
    """All ids lie in the first half of the table."""
    result = verify(Bags(12, mode="sum").double(), "d=2", inputs(6), cluster="cpu-gloo", seeds={"bag.weight": "d,-"}, plans=("searched",))
    assert result.ok, result


@pytest.mark.parametrize("skip", [None, 2])
def test_a_gradient_has_a_gradient(skip):
    ids, scale = inputs(bags=3, each=2)
    table = torch.randn(11, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradgradcheck(lambda t, s: EMBEDDING_BAG(t, ids, s, skip), (table, scale.requires_grad_()))


def test_micro_batches_take_bags():
    model, target = Bags(padding_idx=2).double(), torch.randint(3, (6,), generator=torch.Generator().manual_seed(0))
    result = verify(model, "d=2", (*inputs(), target), loss_fn=F.cross_entropy, cluster="cpu-gloo", plans=("searched",),
                    pipeline=autoshard.Pipeline(microbatches=3))
    assert result.ok, result
