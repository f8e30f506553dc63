"""Outputs by role, and what lies as what."""
import pytest
import torch
from torch import nn

from autoshard.base.roles import Output, Role
from autoshard.program.trace import trace

TEXTS = ["user:0", "user:11", "grad:h.0.wq.weight", "grad:input:0", "mutation:norm.running_mean"]


@pytest.mark.parametrize("text", TEXTS)
def test_an_output_is_its_text_and_back(text):
    assert str(Output.parse(text)) == f"{Output.parse(text)}" == text


def test_users_see_results_as_outputs():
    assert [Output.parse(t).shown for t in TEXTS] == ["output:0", "output:11", *TEXTS[2:]]


def test_an_unknown_role_is_refused():
    with pytest.raises(ValueError, match="cotangent"):
        Output.parse("cotangent:0")


def test_gradients_mutations_and_tangents_lie_as_what_they_belong_to():
    x = torch.randn(4, 8, requires_grad=True)
    graph = trace(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)), (x,), training=True).graph
    assert graph.ties == {
        **{f"grad:{op.target}": op.name for op in graph.of_kind("param")}, "grad:input:0": "input:0", "tangent:0": "user:0",
        **{f"mutation:{op.target}": op.name for op in graph.of_kind("buffer")}}
    assert [op.target for op in graph.outputs(Role.USER).values()] == [Output(Role.USER, 0)]


def test_a_buffer_that_is_only_written_ties_nothing():
    class Counts(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("seen", torch.zeros(3))

        def forward(self, x):
            self.seen = x.sum(0)
            return x * 2

    graph = trace(Counts(), (torch.randn(5, 3),), training=False).graph
    assert set(graph.outputs(Role.MUTATION)) == {"seen"} and not graph.ties
