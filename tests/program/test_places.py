"""Indexing by where a mask holds, `torch.where(mask)` and `mask.nonzero()`: what indexing by the mask computes."""
import pytest
import torch
import torch.nn.functional as F

import autoshard
from autoshard.errors import TraceError
from tests.program.test_selections import Selects


def two_lists(m, x, y):
    h, at = m.b(m.a(x)), torch.where(y > 1)
    rows, columns = (y == 0).nonzero(as_tuple=True)
    scores = (h * m.table(y)).sum(-1)
    return F.binary_cross_entropy_with_logits(scores[at], torch.ones_like(scores[at])) + F.cross_entropy(h[rows, columns], y[rows, columns]) \
        + h[rows, columns, 1:3].square().sum()


def one_list(m, x, y):
    h, labels = m.b(m.a(x)).flatten(0, 1), y.flatten()
    at, near = torch.nonzero(labels > 1).squeeze(-1), torch.where(labels < 3)[0]
    below = (labels < 3).nonzero()[:, 0]
    return F.cross_entropy(h[at], labels[at]) + torch.index_select(h, 0, near).square().mean() + h.index_select(0, below).exp().mean() \
        + F.mse_loss(h[labels.nonzero().view(-1)], torch.zeros_like(h[labels.nonzero().view(-1)]))


def other_tables(m, x, y):
    h, labels = m.b(m.a(x)).flatten(0, 1), y.flatten()
    at = torch.where(labels > 1)[0]
    return h[at, labels[at].view(-1)].sin().sum() + (m.w[labels[at]] * h[at, labels[at]]).mean() + m.table.weight[labels[at]].square().sum()


def written(m, x, y):
    h, labels = m.b(m.a(x)).flatten(0, 1), y.flatten()
    at, (rows, columns) = torch.where(labels > 1)[0], torch.where(y == 1)
    out = h.clone()
    out[at] = h[at] * 2
    out[at, labels[at]] = torch.cos(out[at, labels[at].view(-1)])
    out[at, labels[at] - 1] = 3.0
    pairs = torch.zeros_like(x)
    pairs[rows, columns] = x[rows, columns] + 1
    pairs[(y == 3).nonzero(as_tuple=True)] = 0.5
    return out, pairs * m.w[0]


def experts(m, x, y):
    h, out, sums = m.b(m.a(x))[:, 0], torch.zeros(4, 5), torch.zeros(4, 5)
    weights, chosen = m.a(x[:, 0]).softmax(-1).topk(3)
    for i in range(7):
        tokens, place = torch.where(chosen == i)
        out[tokens] += weights[tokens, place, None] * F.silu(h[tokens] * m.w)
        place, tokens = torch.where(chosen.T == i)
        sums.index_add_(0, tokens, weights[tokens, place].unsqueeze(-1) * h[tokens])
    flat = torch.where(y.flatten() > 1)[0]
    return out, sums.square(), torch.zeros(5, 5).index_add(0, y.flatten()[flat], m.table(y).flatten(0, 1)[flat])


def one_place_twice(m, x, y):
    h, (rows, columns) = m.b(m.a(x)), torch.where(y > 1)
    out, once, logs = h.clone(), torch.zeros(4, 5) * m.w, torch.ones(5, 5) * m.w
    out[rows] *= 2
    once[rows] = h[rows, columns]
    logs[columns] = h[rows, columns].log()
    counts = torch.zeros(4, dtype=torch.int32).index_add(0, rows, torch.ones_like(rows).int())
    return out, once.sin(), logs.nan_to_num(), counts // 2, h.index_select(1, torch.tensor(2))


def parts_of_rows(m, x, y):
    at, out = torch.argwhere(y > 1), m.b(m.a(x)).clone()
    rows, columns = at[:, 0], at[:, 1]
    out[rows, columns, 0] = out[rows, columns, 1] * 2
    out[rows, columns, :2] = m.w[:2]
    out[rows, 0] = m.w
    out[rows, -1, 1:] = 0.5
    return out, m.table(y[rows, columns]).mean()


def along_rows(m, x, y):
    h, at = m.b(m.a(x)), torch.where(y > 1)
    rows, wide = h[at], torch.cat([h[at], m.table(y)[at]], dim=-1)
    scores = rows @ m.w + rows.norm(dim=-1) * rows.std(1)
    return wide.cumsum(1).sin().mean() + scores.cos().sum() + torch.stack([rows, rows.exp()], 1)[:, 0].mean() + torch.stack([scores, scores], -1).prod(-1).sum() \
        + rows.log_softmax(-1).gather(1, y[at].unsqueeze(1)).squeeze(1).mean() + torch.linalg.vector_norm(rows, dim=1).sum() \
        + F.cosine_similarity(rows, rows.exp()).mean() + torch.cosine_similarity(x1=rows.sin(), x2=rows, dim=-1, eps=1e-6).exp().sum()


@pytest.mark.parametrize("body", [two_lists, one_list, other_tables, written, experts, one_place_twice, parts_of_rows, along_rows])
def test_as_by_the_mask(body):
    inputs = torch.randn(4, 5, 6), torch.randint(0, 5, (4, 5))
    report = autoshard.verify(Selects(body), "d=2", inputs, plans=("split", "random:1"))
    assert report.ok, str(report)


@pytest.mark.parametrize("body", [
    lambda m, x, y: m.a(x).sum() / len(torch.where(y > 1)[0]), lambda m, x, y: (m.a(x)[:, torch.where(y[0] > 1)[0]]).sum(),
    lambda m, x, y: m.a(x).sum() * (y[:, 0] > 1).nonzero().squeeze().shape[0], lambda m, x, y: (m.a(x).sum(), torch.nonzero(y > 1))])
def test_what_needs_the_places_themselves(body):
    with pytest.raises(TraceError, match="selection whose length depends on data.*\n  at .*test_places.py:"):
        autoshard.plan(Selects(body), "d=2", (torch.randn(4, 5, 6), torch.randint(0, 5, (4, 5))))
