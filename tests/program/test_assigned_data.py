"""`t.data = value`: torch does it without an op, so a trace did not see it and went on with the old data. Memory that buffers come to share."""
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import autoshard
from autoshard.errors import TraceError
from autoshard.program.trace import trace


class Body(nn.Module):
    """Two layers, the second one frozen, and a buffer."""

    def __init__(self, body):
        super().__init__()
        self.body, self.l, self.k = body, nn.Linear(4, 4), nn.Linear(4, 4).requires_grad_(False)
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("last", torch.zeros(4))
        self.steps = torch.ones(4)

    def forward(self, x):
        return self.body(self, x)


def average(m, x):
    y = m.l(x)
    m.mean.data = 0.5 * m.mean + y.detach().mean(0)
    return y * m.mean


def written_later(m, x):
    """The buffer has the memory of the value; a view from before keeps the old one."""
    y, old = m.l(x), m.mean[:2]
    value = 2 * y.detach()[0]
    m.mean.data = value
    value.add_(1)
    m.mean.mul_(3)
    return y * m.mean, old + 1


def rounded(m, x):
    """Forward gives whole numbers, backward is that of the layer."""
    y = m.l(x)
    y.data = y.data.round()
    return m.k(y).tanh()


def transposed(m, x):
    y = m.l(x)
    y.data = y.data.t()
    return y.reshape(-1) * 2


def momentum(m, x):
    for one, other in zip(m.l.parameters(), m.k.parameters(), strict=True):
        other.data = 0.9 * other.data + 0.1 * one.data
    return m.l(x) * m.k(x)


def unit_weight(m, x):
    m.l.weight.data = F.normalize(m.l.weight.data)
    return m.l(x)


def doubled_input(m, x):
    x.data = x.data * 2
    return m.l(x)


def other_shape(m, x):
    m.mean.data = torch.ones(3)
    return m.l(x)


def of_constant(m, x):
    m.mean.data = m.steps
    return m.l(x) * m.mean


def rotated(m, x):
    """What was the mean is the last one; nothing is written in place, so that one memory for both is as good as two."""
    y = m.l(x) * m.mean + m.last
    m.last = m.mean
    m.mean = y.detach().mean(0)
    return y


def shared_buffers(m, x):
    m.mean.add_(1)
    y = m.l(x) * m.last
    m.last = m.mean
    return y


def shared_data(m, x):
    m.mean.add_(1)
    y = m.l(x) * m.last
    m.last.data = m.mean
    return y


def shared_weight(m, x):
    y = m.l(x) * m.last
    m.last = m.l.weight.detach()[0]
    return y


@pytest.mark.parametrize("body", [average, written_later, rounded, transposed, rotated])
def test_the_new_data_counts(body):
    torch.manual_seed(0)
    report = autoshard.verify(Body(body), "d=2", (torch.randn(4, 4),), plans=("random:0",), steps=3)
    assert report.ok, str(report)


@pytest.mark.parametrize("body, says", [
    (momentum, r"(?s)writes into its parameter 'k.weight'.*'k.bias'"), (unit_weight, "writes into its parameter 'l.weight'"),
    (doubled_input, "writes into its input"), (other_shape, r"shape \(4,\).*shape \(3,\).* at .*test_assigned_data.py:\d+.*name of its own"),
    (shared_buffers, "buffer 'last' share the memory of 'mean'.*clone"), (shared_data, "buffer 'last' share the memory of 'mean'"),
    (shared_weight, "buffer 'last' share the memory of 'l.weight'"),
    (of_constant, r"memory of a constant.*test_assigned_data.py:\d+.*copy_")])
def test_what_cannot_be_assigned_is_said(body, says):
    with pytest.raises(TraceError, match=says):
        trace(Body(body), (torch.randn(4, 4),))
