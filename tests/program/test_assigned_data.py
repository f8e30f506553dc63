"""`t.data = value`: torch does it without an op, so a trace did not see it and went on with the old data. Memory that buffers come to share."""
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import autoshard
from autoshard.base.precision import Precision
from autoshard.errors import TraceError, UsageError
from autoshard.program.trace import trace
from autoshard.runtime.params.assigned_data import take_assigned_data


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


def in_bounds(m, x):
    """Trained weights, before and after they are read; the frozen one becomes a copy."""
    with torch.no_grad():
        m.l.weight.clamp_(-0.2, 0.2)
        m.k.weight.copy_(m.l.weight)
    y = m.l(x) * m.k(x.detach())
    m.l.bias.data = m.l.bias.data / 2
    return y


def are_parameters(m, x):
    """Code may ask; an operator in place sets the attribute to what it was."""
    with torch.no_grad():
        m.l.weight *= 0.5
        m.k.bias += 1
    return m.k(m.l(x)) * (2 if isinstance(m.l.weight, nn.Parameter) else 3)


def set_anew(m, x):
    """Other memory without an assignment."""
    with torch.no_grad():
        m.l.weight.set_(m.l.weight * 0.5)
    m.mean.set_(m.mean + 1)
    return m.l(x) * m.mean


def unread(m, x):
    """Trained, and nobody reads what it was."""
    m.l.weight.data = m.k.weight.data * 0.5
    return m.k(m.l(x))


def synced(m, x):
    """Equal numbers in memory of their own, as those of a target network; an optimizer, a loop and a checkpoint write there."""
    m.k.weight.data, m.k.bias.data = m.l.weight.data.clone(), x[0].detach().clone()
    m.mean.data, m.last.data = 2 * m.l.bias.detach(), 2 * m.l.bias.detach()
    return m.l(x) * m.k(x)


def written_again(m, x):
    def part(x):
        m.k.weight.data.mul_(0.9)
        return m.k(m.l(x))
    return checkpoint(part, x, use_reentrant=False)


def renewed(m, x):
    m.k.weight = nn.Parameter(m.k.weight + m.l.weight.detach(), requires_grad=False)
    return m.l(x) * m.k(x)


def handed_on(m, x):
    """The weight that another one becomes is trained."""
    m.k.weight.data = m.l.weight.data
    return m.l(x) * m.k(x)


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


@pytest.mark.parametrize("body", [average, written_later, rounded, transposed, rotated, momentum, unit_weight, in_bounds, are_parameters, set_anew,
                                  unread, synced])
def test_the_new_data_counts(body):
    torch.manual_seed(0)
    report = autoshard.verify(Body(body), "d=2", (torch.randn(4, 4),), plans=("random:0", "fully_sharded"), steps=3)
    assert report.ok, str(report)


def test_what_is_written_has_memory_of_its_own():
    torch.manual_seed(0)
    x, model = torch.randn(4, 4), Body(synced)
    compiled = autoshard.compile(Body(synced), "d=1")
    compiled.load_state_dict(model.state_dict())
    for m in (compiled, model):
        given = x.clone()
        optimizer = torch.optim.SGD([p for p in m.parameters() if p.requires_grad], 0.1)
        m(given).sum().backward()
        optimizer.step()
        given.zero_()
        m.mean.zero_()
    for name, t in model.state_dict().items():
        torch.testing.assert_close(compiled.state_dict()[name], t, msg=name)


def test_assignments_are_seen_where_tensors_take_dtensors():
    take_assigned_data()  # for the whole process, as a compiled model does
    torch.manual_seed(0)
    report = autoshard.verify(Body(average), "d=2", (torch.randn(4, 4),), plans=("random:0",), steps=3)
    assert report.ok, str(report)
    with pytest.raises(TraceError, match=r"memory of a constant.*test_assigned_data.py:\d+.*copy_"):
        trace(Body(of_constant), (torch.randn(4, 4),))


def test_written_weights_are_padded():
    torch.manual_seed(0)
    model = Body(unit_weight)
    model.l = nn.Linear(4, 23)
    assert (report := autoshard.verify(model, "d=2", (torch.randn(4, 4),), plans=("fully_sharded", "random:1"), steps=2)).ok, str(report)


def test_written_weights_are_not_written_twice_by_a_checkpoint():
    x = torch.randn(4, 4, requires_grad=True)
    with pytest.raises(UsageError, match=r"writes into its parameter k.weight.*torch.utils.checkpoint around its call would write it twice"):
        checkpoint(autoshard.compile(Body(momentum), "d=1"), x, use_reentrant=False)


def test_written_weights_need_their_own_precision_and_no_micro_batches():
    x = torch.randn(4, 4)
    with pytest.raises(TraceError, match=r"(?s)'k.weight', of which it has a copy in torch.bfloat16.*'k.bias'"):
        trace(Body(momentum), (x,), precision=Precision("bf16"))
    for mesh, count in (("d=2", 2), ("pp=2,d=1", 1)):
        with pytest.raises(UsageError, match=r"writes into its parameter '?k.weight.* outside of the model"):
            autoshard.plan(Body(momentum), mesh, (x, x), loss_fn=F.mse_loss, pipeline=autoshard.Pipeline(microbatches=count, inexact="accept"))


@pytest.mark.parametrize("body, says", [
    (written_again, "backward writes into the parameter 'k.weight'.*outside of the checkpoint"),
    (renewed, "another parameter in the place of its parameter 'k.weight'.*copy_"),
    (handed_on, "parameter 'k.weight' share the memory of 'l.weight'.*clone"),
    (doubled_input, "writes into its input"), (other_shape, r"shape \(4,\).*shape \(3,\).* at .*test_assigned_data.py:\d+.*name of its own"),
    (shared_buffers, "buffer 'last' share the memory of 'mean'.*clone"), (shared_data, "buffer 'last' share the memory of 'mean'"),
    (shared_weight, "buffer 'last' share the memory of 'l.weight'"),
    (of_constant, r"memory of a constant.*test_assigned_data.py:\d+.*copy_")])
def test_what_cannot_be_assigned_is_said(body, says):
    with pytest.raises(TraceError, match=says):
        trace(Body(body), (torch.randn(4, 4),))
