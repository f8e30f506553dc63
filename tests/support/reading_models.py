"""Models that read data, for tests. Not in a test file: pytest compiles the asserts of those to other code (tests/program/test_rewritten_asserts.py)."""
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint


class Body(nn.Module):
    def __init__(self, body):
        super().__init__()
        self.linear, self.body, self.bound = nn.Linear(8, 8), body, 3.0
        self.register_buffer("stride", torch.tensor(2), persistent=False)
        self.register_buffer("kept", torch.tensor([0.5, 1.0]))
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x):
        return self.body(self, x)


def raises(m, x):
    if x.max() >= m.bound:
        raise ValueError(f"values must be below {m.bound}")
    return m.linear(x)


def raises_by_item(m, x):
    if x.abs().max().item() >= m.bound or not torch.isfinite(x).all():
        raise ValueError("too large")
    return m.linear(x)


def counts_ids(m, x):
    return m.linear(x) * torch.bincount((x * 2).long().flatten(), minlength=8) + (x * 3).long().flatten().bincount(x.double().flatten(), 16).sum().float()


def asserts(m, x):
    h = m.linear(x)
    assert x.dim() == 2 and x.amax().item() < m.bound, "too large"
    return h


def asserts_both(m, x):
    assert x.isnan().sum() == 0 and x.max() < m.bound
    return m.linear(x)


def asks_torch(m, x):
    torch._check(x.max().item() < 3)
    return m.linear(x)


def asks_torch_of_all(m, x):
    torch._check_tensor_all(x < m.bound, lambda: "too large")
    return m.linear(x)


def asserts_async(m, x):
    torch._assert_async((x < m.bound).all(), "too large")
    return m.linear(x)


def as_bool(m, x):
    if bool((x >= 3).any()):
        raise ValueError
    return m.linear(x)


def in_checkpoint(m, x):
    return checkpoint(raises, m, x, use_reentrant=False)


def clamps(m, x):
    h = m.linear(x)
    if h.max() > 2:
        low = -m.bound + 2
        h = torch.clamp(h, min=low, max=1.0)
    return h * 2


def clamps_unless(m, x):
    h = m.linear(x)
    if not (h <= 2).all():
        h = h.clamp(-1, 1) + 1
    return h.sin()


def clamps_in_checkpoint(m, x):
    return checkpoint(clamps, m, x, use_reentrant=False)


def fills(m, x):
    h, mask = m.linear(x), x[:, 0] > 0.5
    if mask.any():
        h[mask] = m.kept[0].to(h.dtype)
    return h


def reads_a_buffer(m, x):
    return m.linear(x)[:, ::int(m.stride)] if m.kept.max() >= 1 else x


def counts(m, x):
    m.calls = m.calls + 1
    return m.linear(x) if m.calls.item() > 3 else x


def counts_in_place(m, x):
    m.calls.add_(1)
    return m.linear(x) if m.calls > 3 else x


class Fake:
    def clamp(self, x):
        return x


def other_branch(m, x):
    h = m.linear(x)
    if h.max() > 2:
        h = h * 2
    return h


def other_clamp(m, x):
    h, mine = m.linear(x), Fake()
    if h.max() > 2:
        h = mine.clamp(h)
    return h


def has_an_else(m, x):
    h = m.linear(x)
    if h.max() > 2:
        h = h.clamp(0, 1)
    else:
        h = h.clamp(1, 2)
    return h


def only_both(m, x):
    if x.max() > 1 and x.min() < 0:
        raise ValueError
    return m.linear(x)


def of_another_shape(m, x):
    h = m.linear(x)
    if h.max() > 2:
        h = torch.clamp(h, min=m.linear(x)[None])
    return h


def does_more(m, x):
    if x.max() > 1:
        m.bound = 2.0
        raise ValueError
    return m.linear(x)


class ChecksGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        if g.isnan().any():
            raise ValueError
        return g


def checks_gradient(m, x):
    return ChecksGradient.apply(m.linear(x))


def writes_by_mask(m, x):
    h, mask = m.linear(x), x[:, 0] > 0.5
    h[mask] = m.linear.bias * 2
    h[h > 1] = m.linear.weight[0, 0]
    h[x[:, 1] > 0.9] = m.linear.weight[:1]
    return h


def fills_a_dict(m, x):
    h, mask, d = m.linear(x), x > 0.5, {}
    if mask.any():
        d[mask] = h
    return h * 2 if d else h


def fills_by_numbers(m, x):
    h, mask = m.linear(x), (x[0] > 2).long()
    if mask.any():
        h[mask] = m.kept[0]
    return h
