"""Which buffers a program carries from call to call, and which of its ops write rows of them in place."""
import pytest
import torch
from torch import nn

from autoshard.program.trace import trace
from autoshard.rules.states import free, states, written_in_place


class Holds(nn.Module):
    """A buffer [4, 10, 8] that `step` reads and writes."""

    def __init__(self, step):
        super().__init__()
        self.step, self.weight = step, nn.Parameter(torch.randn(8))
        self.register_buffer("held", torch.zeros(4, 10, 8))

    def forward(self, x, at):
        return self.step(self.held, x, at) * self.weight


def graph_of(step, training=False):
    return trace(Holds(step), (torch.randn(4, 2, 8), torch.tensor([3, 4])), training=training).graph


def copies(held, x, at):
    return held.index_copy_(1, at, x).sum(1)


def puts(held, x, at):
    held[:, at] = x
    return held.sum(1)


def scatters(held, x, at):
    return held.scatter_(1, at[None, :, None].expand_as(x), x).sum(1)


def slices(held, x, at):
    held[:, 5:7] = x
    return held.sum(1)


def selects(held, x, at):
    held[:, -1] = x[:, 0]
    return held.sum(1)


def writes_twice(held, x, at):
    held[:, 5:7] = x
    return held.index_copy_(1, at, x).sum(1)


def reads_before(held, x, at):
    before = held[:, 2:].sum(1)
    return held.index_copy_(1, at, x).sum(1) + before


def reads_old_after(held, x, at):
    old = held.clone()
    held.index_copy_(1, at, x)
    return held.sum(1) + torch.tanh(old[:, 1:] + held[:, 1:]).sum(1)


def replaces(held, x, at):
    held.copy_(torch.tanh(held + x.sum(1, keepdim=True)))
    return held.sum(1)


@pytest.mark.parametrize(("step", "in_place"), [
    (copies, 1), (puts, 1), (scatters, 1), (slices, 1), (selects, 1), (writes_twice, 2), (reads_before, 1), (reads_old_after, 0), (replaces, 0)])
def test_a_buffer_that_is_read_and_written_is_a_state(step, in_place):
    graph = graph_of(step)
    assert states(graph) == {"buffer:held"} and free(graph) == {"buffer:held", "mutation:held"}
    assert len(written_in_place(graph)) == in_place


def test_training_keeps_its_buffers():
    graph = graph_of(copies, training=True)
    assert graph.training and not states(graph) and not written_in_place(graph)


def test_a_buffer_that_is_only_read_is_no_state():
    assert not states(graph_of(lambda held, x, at: held.sum(1) + x.sum(1)))


def test_statistics_of_batch_norms_are_no_state():
    graph = trace(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)).train(), (torch.randn(4, 8),), training=False).graph
    assert "mutation:1.running_mean" in graph.by_name and states(graph) <= {"buffer:1.num_batches_tracked"}
