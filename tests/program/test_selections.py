"""Indexing by masks that are data: what is done with the rows is computed for all of them, and counts where the mask holds."""
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import autoshard
from autoshard.errors import TraceError
from autoshard.program.interpret import run
from autoshard.program.trace import trace


class Selects(nn.Module):
    def __init__(self, body) -> None:
        super().__init__()
        self.body, self.a, self.norm, self.b = body, nn.Linear(6, 7), nn.LayerNorm(7), nn.Linear(7, 5)
        self.table, self.counts, self.w = nn.Embedding(9, 5), nn.Embedding(9, 5, scale_grad_by_freq=True), nn.Parameter(torch.rand(5) + 0.5)

        self.register_buffer("kept", torch.zeros(6))

    def forward(self, x: torch.Tensor, y: torch.Tensor):
        return self.body(self, x, y)


def classes(m, x, y):
    h, loss = m.a(x), nn.CrossEntropyLoss()
    return loss(m.b(F.gelu(m.norm(h[y != 2]))), y[y != 2]) + F.cross_entropy(m.b(h[y > 9]), y[y > 9], reduction="sum")


def losses_of_rows(m, x, y):
    h, known = m.b(m.a(x)), y > 1
    each = F.cross_entropy(h[known], y[known], reduction="none", label_smoothing=0.1, weight=m.w.detach())
    right = (h.detach()[known].argmax(-1) == y[known]).float().mean()
    return (each * 2 + 1).mean() + right


def elementwise_losses(m, x, y):
    h, t, known = m.b(m.a(x)), m.table(y), y > 1
    divergence = F.kl_div(h[known].log_softmax(-1), t[known].softmax(-1), reduction="batchmean")
    return F.mse_loss(h[known], t[known]) + F.smooth_l1_loss(h[known], t.detach()[known], reduction="sum") + divergence


def sums(m, x, y):
    h, known = m.b(m.a(x)), y > 1
    rows = (h[known] * m.w).sum(-1).mean() + h[known][:, :2].square().sum() + (h[known][..., 0] * h[known][:, None, 3].squeeze(1)).mean() + F.normalize(h[known]).sum() + m.table(y[known]).mean()
    return (h[known].sum(0) * h[known].mean(dim=0)).sum() + rows + (h[known] @ m.a.weight[:5]).square().mean()


def only_finite_inside(m, x, y):
    h = m.a(x)
    return h[h > 0.1].log().mean() + (1 / h[h > 0.1]).sum() + h.masked_select(h > 0.1).sqrt().sum()


def puts_back(m, x, y):
    h = m.a(x)
    inside, out = h.abs() < 0.5, torch.zeros_like(h)
    out[~inside] = h[~inside]
    both = out.clone()
    both[y > 1, :] = 2 * h[y > 1, ...]
    out[inside] = torch.log(h[inside].abs() + 0.1) * torch.sigmoid(h[inside])
    return out + both, h[y > 1, 0].mean() + h[y > 1, 1:3].sum()


def updates(m, x, y):
    h = m.b(m.a(x))
    low, high, out = h.floor().long(), h.ceil().long(), h.clone()
    low[(high > 0) * (low == high)] -= 1
    high[(low < 6) * (low == high)] += 1
    out[y == 0] *= m.w
    return out * (high - low)


def recomputed(m, x, y):
    def part(x):
        h = m.a(x)
        positive, out = h > 0, h.clone()
        out[positive] = h[positive].log1p()
        return m.b(out)

    return checkpoint(part, x, use_reentrant=False)


def updates_with_options(m, x, y):
    h = m.b(m.a(x))
    rows, floors = h[y > 1], h.detach()[y > 1]
    rows.add_(m.w, alpha=3)
    floors.div_(0.3, rounding_mode="floor")
    return rows.square().mean() + (floors.sum(0) * m.w).sum()


def weighted_means(m, x, y):
    h, t, known = m.b(m.a(x)), m.table(y), y > 1
    weights = h.detach().abs()
    return sum(f(h[known], t[known], weight=weights[known]) for f in (F.mse_loss, F.l1_loss, F.huber_loss)) + F.l1_loss(h, t, weight=weights)


def zeros_left_out(m, x, y):
    rows = y[y > 1].unsqueeze(-1)
    return (m.w / rows).sum() + (rows ** -m.w).sum()


def dims_by_place(m, x, y):
    rows = m.b(m.a(x))[y > 1]
    return (rows / rows.exp().sum(-1, True)).mean() + rows.softmax(1, torch.float64).square().mean()


def computed_twice(m, x, y):
    def mask(h):
        for _ in range(40):  # what is read twice is compared once
            h = h * h.sigmoid()
        return h > 0

    h = m.a(x)
    return (h[mask(h)] * h.detach()[mask(h)]).sum()


@pytest.mark.parametrize("body", [
    classes, losses_of_rows, elementwise_losses, sums, only_finite_inside, puts_back, updates, recomputed, updates_with_options, weighted_means,
    zeros_left_out, dims_by_place, computed_twice])
def test_computed_everywhere(body):
    inputs = torch.randn(4, 5, 6), torch.randint(0, 5, (4, 5))
    report = autoshard.verify(Selects(body), "d=2", inputs, plans=("split", "random:1"))
    assert report.ok, str(report)


class Scaled(torch.autograd.Function):
    """Its gradient is its own, so what it computes must not go on as a selection."""

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x)
        return x * (w * 2)

    @staticmethod
    def backward(ctx, g):
        return None, (g * ctx.saved_tensors[0]).sum()


def counts(m, x, y):
    h = m.a(x)[y > 1]
    return h.sum() / h.shape[0]


def two_masks(m, x, y):
    return (m.a(x)[y > 1] * m.a(x)[y > 2]).sum()


def joined(m, x, y):
    return torch.cat([m.a(x)[y > 1], m.a(x)[:, 0]]).sum()


def shared_memory(m, x, y):
    rows = x[y > 1]
    same = rows.detach()
    rows += 1
    return m.a(x).sum() + same.sum()


def added_to_each(m, x, y):
    rows = (m.w[:, None] * m.w)[m.w > 1]
    rows += m.w[m.w > 1]  # a number for each column, which computed everywhere are rows too
    return rows.sum()


@pytest.mark.parametrize("body", [
    counts, two_masks, joined, shared_memory, added_to_each, lambda m, x, y: m.counts(y[y > 1]).sum(),
    lambda m, x, y: F.layer_norm(m.b(m.a(x))[y > 1], (5,), m.w, eps=0.0).sum(), lambda m, x, y: torch.softmax(input=m.a(x)[y > 1], dim=-1).sum(), lambda m, x, y: m.a(x)[y > 1], lambda m, x, y: Scaled.apply(x[y > 1], m.w[0]).mean(),
    lambda m, x, y: m.a(x)[y > 1][0].sum(), lambda m, x, y: m.w.to(m.b(m.a(x))[y > 1]).sum(), lambda m, x, y: m.a(x)[y > 1, y[0, 0]].sum(), lambda m, x, y: m.a(x)[y > 1][:, y[0]].sum(), lambda m, x, y: F.dropout(m.a(x)[y > 1]).sum(), lambda m, x, y: (m.b(m.a(x))[y > 1] * m.table(y)[0]).sum()])
def test_rows_themselves_are_data(body):
    with pytest.raises(TraceError, match="selection whose length depends on data.*\n  at .*test_selections.py:"):
        autoshard.plan(Selects(body), "d=2", (torch.randn(4, 5, 6), torch.randint(0, 5, (4, 5))))


def test_means_of_halves():
    """The sum and the count are larger than a half can be."""
    model = Selects(lambda m, x, y: (m.w.sum() * 10 + x)[y > 0].mean()).half()
    x, y = torch.rand(300, 300).half() + 1, torch.randint(0, 5, (300, 300))
    traced = trace(model, (x, y))
    state = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    torch.testing.assert_close(run(traced, state, (x, y)).users[0], model(x, y), rtol=2e-3, atol=0)


def test_rows_as_a_buffer():
    def body(m, x, y):
        m.kept = x[y > 1]
        return m.a(x).sum()

    with pytest.raises(TraceError, match="(?s)selection whose length depends on data.*changes the shape of buffer 'kept'"):
        trace(Selects(body), (torch.randn(4, 5, 6), torch.randint(2, 5, (4, 5))))
