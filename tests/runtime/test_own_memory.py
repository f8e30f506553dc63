"""Which gradients are copied because they lie in memory of another one."""
import torch
from torch import nn

from autoshard.program.trace import trace
from autoshard.runtime.own_memory import apart, may_share


def test_only_what_lies_in_memory_of_another_one_is_copied():
    bucket, other = torch.arange(12.0), torch.arange(3.0)
    grads = [bucket[:4], bucket[4:], bucket[6:8], other, other.view(3, 1), torch.zeros(0), bucket[4:]]
    made = apart(grads)
    assert all(torch.equal(a, b) for a, b in zip(grads, made, strict=True))
    copied = [a.data_ptr() != b.data_ptr() for a, b in zip(grads, made, strict=True)]
    assert copied == [False, False, True, False, True, False, True]
    assert apart([other], {other.data_ptr()})[0].data_ptr() != other.data_ptr()


def test_programs_that_may_share_are_known_before_they_run():
    class Added(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x):
            return self.a(x) + self.b(x)

    x = torch.randn(8, 4)
    assert may_share(trace(Added(), (x,)).graph)
    assert not may_share(trace(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)), (x,)).graph)
