"""Micro-batches compute what the batch computes, or the op that keeps them from it is named."""
from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import autoshard
from autoshard import Pipeline
from autoshard.base.roles import Role
from autoshard.errors import TraceError, UsageError
from autoshard.pipeline.microbatches.batch import traced
from models import bert, dlrm, gpt, llama, mlp, moe, t5, vit
from tests.pipeline.small_nets import ROWS, Net, assert_same, both, classes, features, made


def uneven() -> torch.Tensor:
    """Of the first three rows none counts, of the others some."""
    y = classes()
    y[[0, 1, 2, 5, 7, 8]] = -100
    return y


def summed(out: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(out, target, reduction="sum")


def per_row(out: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """What a sum divided by the number of rows is depends on how many rows the program sees."""
    return F.cross_entropy(out, target, reduction="sum") / out.shape[0]


def masked(out: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    mask = (target >= 0).to(out.dtype)
    return (F.cross_entropy(out, target.clamp(min=0), reduction="none") * mask).sum() / mask.sum()


def counted(out: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Divided by an integer."""
    return (F.cross_entropy(out, target.clamp(min=0), reduction="none") * (target >= 0)).sum() / (target >= 0).sum()


def weighted(out: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(out, target, weight=torch.linspace(0.5, 2.0, 5, dtype=out.dtype))


def regularised(out: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return 0.5 * F.mse_loss(out, F.one_hot(target.clamp(min=0), 5).to(out.dtype)) + out.abs().mean()


def smoothed(out: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """The sum of two means over the targets that are not ignored, by two counts of them."""
    return F.cross_entropy(out, target, label_smoothing=0.1)


def with_z_loss(out: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """A second mean over the same targets, written with a mask."""
    mask = (target != -100).to(out.dtype)
    return F.cross_entropy(out, target) + 1e-2 * (out.logsumexp(1).square() * mask).sum() / mask.sum()


def dissimilar(out: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return 1 - F.cosine_similarity(out, F.one_hot(target.clamp(min=0), 5).to(out.dtype)).mean()


def counted_by_ones(out: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Divided by the sum of a new tensor with one number per row."""
    return F.cross_entropy(out, target, reduction="sum") / target.new_ones(target.shape[0]).sum()


LOSSES = [F.cross_entropy, counted_by_ones, summed, per_row, masked, counted, weighted, regularised, smoothed, with_z_loss, dissimilar]


@pytest.mark.parametrize("count", [2, 3, 4, 12])
@pytest.mark.parametrize("loss_fn", LOSSES, ids=lambda f: f.__name__)
def test_losses(loss_fn: Callable, count: int) -> None:
    assert_same(Net(), (features(), classes()), loss_fn, count)


@pytest.mark.parametrize("count", [2, 4, 6])
@pytest.mark.parametrize("loss_fn", [F.cross_entropy, masked, counted, weighted, summed, smoothed, with_z_loss], ids=lambda f: f.__name__)
def test_uneven_counts(loss_fn: Callable, count: int) -> None:
    """Some micro-batches have nothing that counts."""
    assert_same(Net(), (features(), uneven()), loss_fn, count)


def test_a_loss_divided_by_an_integer_keeps_its_dtype() -> None:
    whole = Net().bfloat16()
    compiled = autoshard.compile(copy.deepcopy(whole), "d=1", loss_fn=counted, cluster="cpu-gloo", cache=False, pipeline=Pipeline(3))
    batch = (features().bfloat16(), uneven())
    got, want = compiled(*batch), counted(whole(batch[0]), batch[1])
    assert got.dtype == want.dtype == torch.bfloat16 and torch.allclose(got, want, rtol=0.05)


def test_a_batch_in_which_nothing_counts_is_no_number_either() -> None:
    compiled, whole, got, want = both(Net(), (features(), torch.full((ROWS,), -100)), F.cross_entropy, 3)
    assert got.isnan() and want.isnan()


def test_the_worked_number() -> None:
    """Of two micro-batches one and three targets count."""
    def counted(out: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return F.nll_loss(-out, target)

    out, target = torch.tensor([[2.0], [9.0], [9.0], [1.0], [1.0], [1.0]], dtype=torch.float64), torch.tensor([0, -100, -100, 0, 0, 0])

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones((), dtype=torch.float64))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.scale

    compiled = autoshard.compile(Scaled(), "d=1", loss_fn=counted, cluster="cpu-gloo", cache=False, pipeline=Pipeline(2))
    loss = compiled(out, target)
    loss.backward()
    assert loss.item() == 1.25 and compiled.scale.grad.item() == 1.25


class Attends(nn.Module):
    """Attention that also gives its weights, in whose program heads and samples share a dim."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.out = nn.MultiheadAttention(6, 3, batch_first=True), nn.Linear(6, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y, weights = self.attention(*3 * (x.view(-1, 2, 3).repeat(1, 1, 2),), average_attn_weights=False)
        return self.out(y.mean(1)) + weights.square().mean((1, 2, 3), keepdim=True).flatten(1)


@pytest.mark.parametrize("model", [Net(nn.GroupNorm(4, 8)), Attends()], ids=["group norm", "weights of attention"])
def test_blocks(model: nn.Module) -> None:
    assert_same(model, (features(), classes()), F.cross_entropy, 4)


class Tokens(nn.Module):
    """A token beside those of a sample, and layers that swap rows and positions: at one row a trace lacks some of these ops."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.rnn, self.out = nn.Parameter(torch.zeros(1, 1, 6)), nn.GRU(6, 6, batch_first=True), nn.Linear(6, 5)
        self.layer = nn.TransformerEncoderLayer(6, 3, 8, dropout=0.0, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = torch.cat([self.first.expand(len(x), -1, -1), x.view(-1, 2, 3).repeat(1, 1, 2)], 1)
        return self.out(self.layer(self.rnn(tokens)[0])[:, 0])


@pytest.mark.parametrize("rows", [2, 4])
def test_one_row_computes_what_the_batch_does(rows: int) -> None:
    assert_same(Tokens(), (features(rows), classes(rows)), F.cross_entropy, rows)


OWN = {"mlp": mlp, "gpt": gpt, "llama": llama, "bert": bert, "vit": vit, "moe": moe, "t5": t5, "dlrm": dlrm}


@pytest.mark.parametrize("name", sorted(OWN))
def test_every_model_is_exact(name: str) -> None:
    """Also for a micro-batch of one row, where some copies are views."""
    model, batch = OWN[name].build(batch=6)
    for count in (3, 6):
        graph = traced(model, batch, {}, Pipeline(count), loss_fn=OWN[name].loss).graph
        assert graph.microbatches == count and not graph.notes


def test_dims_of_inputs() -> None:
    class Attends(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(6, 5)

        def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            return self.a(mask @ x).mean(1)

    x = torch.randn(ROWS, 4, 6, dtype=torch.float64)
    batch = (x, torch.rand(4, 4, dtype=torch.float64), classes())
    assert_same(Attends(), batch, F.cross_entropy, 3, batch_dims={"mask": None})
    with pytest.raises(UsageError, match=r"mask \(input:1\) of shape \(4, 4\) has 4 rows, and the batch 12; .*batch_dims=\{'input:1': None\}"):
        both(Attends(), batch, F.cross_entropy, 3)

    class Turned(Attends):
        def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            return super().forward(x.transpose(0, 1), mask)

    assert_same(Turned(), (x.transpose(0, 1).contiguous(), *batch[1:]), F.cross_entropy, 4, batch_dims={"mask": None, "x": 1})

    class Square(Attends):
        def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            return super().forward(x, mask.view(ROWS, ROWS))

    square = (torch.randn(ROWS, ROWS, 6, dtype=torch.float64), torch.rand(ROWS, ROWS, dtype=torch.float64), classes())  # positions as rows
    assert_same(Square(), square, F.cross_entropy, 3, batch_dims={"mask": None})
    with pytest.raises(TraceError, match=r"(?s)the part of it that one of 3 .* x \(input:0\), mask \(input:1\), .*batch_dims=\{'input:1': None\}"):
        both(Square(), square, F.cross_entropy, 3)


def shifted(x: torch.Tensor) -> torch.Tensor:
    """Written into a new tensor, as T5 and BART make what their decoders read of the labels."""
    out = x.new_zeros(x.shape)
    out[..., 1:] = x[..., :-1].clone()
    return out


def test_samples_may_be_written_into_a_new_tensor() -> None:
    assert_same(Net(shifted), (features(), classes()), F.cross_entropy, 3)


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm, self.b = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.norm(self.a(x)))


def test_buffers_go_from_one_micro_batch_to_the_next() -> None:
    compiled, whole, _, _ = both(Normed(), (features(), classes()), F.cross_entropy, 3, inexact="accept")
    alone = made(Normed())
    for part in features().chunk(3):
        alone(part)
    for name, b in compiled.named_buffers():
        assert torch.allclose(b, alone.get_buffer(name), rtol=1e-12), name
    assert compiled.norm.num_batches_tracked == 3 and whole.norm.num_batches_tracked == 1
    assert any("micro-batches compute something else" in note for note in compiled.plan.notes)


# --- outputs, calls, errors ---

def test_outputs_beside_the_loss() -> None:
    def loss_fn(out: torch.Tensor, target: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": F.cross_entropy(out, target), "right": (out.argmax(1) == target).sum(), "scores": out, "share": (out > 0).double().mean()}

    whole, batch = made(Net()), (features(), uneven())
    compiled = autoshard.compile(copy.deepcopy(whole), "d=1", loss_fn=loss_fn, cluster="cpu-gloo", cache=False, pipeline=Pipeline(4))
    got, want = compiled(*batch), loss_fn(whole(batch[0]), batch[1])
    assert got.keys() == want.keys() and got["right"].dtype == torch.int64
    for name, value in want.items():
        assert got[name].shape == value.shape and torch.allclose(got[name], value, rtol=1e-12), name
    assert {name: t.requires_grad for name, t in got.items()} == {name: t.requires_grad for name, t in want.items()}
    with pytest.raises(UsageError, match="a gradient arrives at output 2 .*only the loss is differentiated"):
        (got["loss"] + got["scores"].square().mean()).backward()


def test_backward_scales_and_adds_up() -> None:
    whole, batch = made(Net()), (features(), classes())
    compiled = autoshard.compile(copy.deepcopy(whole), "d=1", loss_fn=F.cross_entropy, cluster="cpu-gloo", cache=False, pipeline=Pipeline(3))
    for _ in range(2):
        (compiled(*batch) / 4).backward()
    with compiled.no_sync():
        compiled(*batch).backward()
    compiled(*batch).backward()
    (2.5 * F.cross_entropy(whole(batch[0]), batch[1])).backward()
    for p, q in zip(whole.parameters(), compiled.parameters(), strict=True):
        assert torch.allclose(p.grad, q.grad, rtol=1e-12)
    loss = compiled(*batch)
    loss.backward(retain_graph=True)
    with pytest.raises(UsageError, match="hands out gradients once"):
        loss.backward()


def test_evaluation_runs_the_batch() -> None:
    whole, batch = made(Net()), (features(7), classes(7))
    compiled = autoshard.compile(copy.deepcopy(whole), "d=1", loss_fn=F.cross_entropy, cluster="cpu-gloo", cache=False, pipeline=Pipeline(3))
    with torch.no_grad():
        assert torch.allclose(compiled(*batch), F.cross_entropy(whole(batch[0]), batch[1]))
    with pytest.raises(UsageError, match="a batch of 7 rows does not divide into 3 micro-batches; choose a divisor of 7"):
        compiled(*batch)


@pytest.mark.parametrize(("loss_fn", "inputs", "options", "said"), [
    (None, (features(),), {}, r"need the loss in the graph: .* output 0 of shape \(12, 5\)"),
    (F.cross_entropy, (features().requires_grad_(), classes()), {}, "input:0 requires a gradient"),
    (F.cross_entropy, (features(), classes()), {"batch_dims": {"y": 0}}, r"batch_dims names 'y', and the inputs are x \(input:0\)"),
    (F.cross_entropy, (features(), classes()), {"batch_dims": {"x": 2}}, r"the batch dim 2, and its shape is \(12, 6\)"),
    (F.cross_entropy, (features(), classes()), {"batch_dims": {"input:0": None, "input:1": None}}, "no input has a batch dim"),
])
def test_bad_input(loss_fn: Callable | None, inputs: tuple, options: dict, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        autoshard.plan(made(Net()), "d=2", inputs, loss_fn=loss_fn, cluster="cpu-gloo", pipeline=Pipeline(3, **options))


# --- random numbers ---

def dropped(seed: int, count: int, mesh: str = "d=1") -> torch.Tensor:
    """What is left of ones."""
    class Drops(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()))

        def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
            y = F.dropout(x * self.scale, 0.5, self.training)
            return {"loss": y.mean(), "y": y}

    torch.manual_seed(seed)
    compiled = autoshard.compile(Drops(), mesh, cluster="cpu-gloo", cache=False, pipeline=Pipeline(count))
    return compiled(torch.ones(ROWS, 64))["y"]


def test_micro_batches_draw_their_own_numbers() -> None:
    once, again, other = dropped(0, 3), dropped(0, 3), dropped(1, 3)
    assert torch.equal(once, again) and not torch.equal(once, other)
    first, second, third = once.chunk(3)
    assert not torch.equal(first, second) and not torch.equal(second, third)


# --- precision ---

@pytest.mark.parametrize(("reduce", "dtype"), [("fp32", torch.float32), ("bf16", torch.bfloat16)])
def test_gradients_are_accumulated_as_they_are_reduced(reduce: str, dtype: torch.dtype) -> None:
    graph = traced(Net(), (features().float(), classes()), {}, Pipeline(3), loss_fn=F.cross_entropy,
                   precision=autoshard.Precision("bf16", master="fp32", reduce=reduce)).graph
    sums = [op for op in graph.ops if op.name.startswith("sum:")]
    assert len(sums) == 4 and {op.outputs[0].dtype for op in sums} == {dtype}
    assert {graph.meta(op.refs[0]).dtype for op in graph.outputs(Role.GRADIENT).values()} == {torch.float32}
