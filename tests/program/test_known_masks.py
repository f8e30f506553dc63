"""Indexing by masks whose values are known: the places of a mask that a model makes or keeps are no data."""
import pytest
import torch
from torch import nn

import autoshard
from autoshard.errors import TraceError

KEPT = torch.tensor([True, False, True, True, False, False, True, False])


class Indexes(nn.Module):
    def __init__(self, body, buffer: bool = True) -> None:
        super().__init__()
        self.linear, self.body = nn.Linear(8, 4), body
        if buffer:
            self.register_buffer("mask", KEPT)
        else:
            self.mask = KEPT

    def forward(self, x: torch.Tensor):
        return self.body(self, x)


def reads(m, x):
    return x[:, m.mask] * m.linear(x), m.linear(x).t()[torch.tensor([True, False, True, True]), 1:]


def writes(m, x):
    whole = x.new_zeros(8, len(x))
    whole[m.mask] = m.linear(x).t()
    return whole, whole.index_put((m.mask,), 2 * m.linear(x).t())


def without_the_diagonal(m, x):
    similar = m.linear(x) @ m.linear(x).t()
    n = len(x)
    return similar[~torch.eye(n, dtype=torch.bool)].view(n, n - 1).logsumexp(1)


def selects(m, x):
    similar, upper = m.linear(x) @ m.linear(x).t(), torch.triu(torch.ones(len(x), len(x)), 1).bool()
    upper[0] = False
    rows, columns = upper.nonzero(as_tuple=True)
    return similar.masked_select(upper), similar[rows, columns], torch.nonzero(upper), torch.where(upper)[0]


@pytest.mark.parametrize("body, buffer", [(reads, True), (reads, False), (writes, True), (writes, False), (without_the_diagonal, True), (selects, True)])
def test_known_masks(body, buffer):
    report = autoshard.verify(Indexes(body, buffer), "d=2", (torch.randn(6, 8),), plans=("split", "random:1"))
    assert report.ok, str(report)


def test_masks_of_another_size_are_other_masks():
    model = Indexes(without_the_diagonal)
    compiled = autoshard.compile(model, "d=1", cache=False)
    for n in (6, 8, 7, 5):
        x = torch.randn(n, 8)
        torch.testing.assert_close(compiled(x), model(x))


def test_a_mask_of_data_is_refused():
    with pytest.raises(TraceError, match="boolean mask"):
        autoshard.plan(Indexes(lambda m, x: m.linear(x)[x[:, 0] > 0]), "d=2", (torch.randn(6, 8),))
