import pytest
import torch
from torch import nn

from autoshard.decide.pipeline_options import Pipeline
from autoshard.pipeline.microbatches.batch import Batch
from autoshard.pipeline.microbatches.resize import Between, Unlike
from tests.pipeline.cut_models import MODELS, SEQ


def batch_of(name, rows, **sizes):
    torch.manual_seed(0)
    with torch.device("meta"):
        model, inputs = MODELS[name].build(batch=rows, **({"seq": SEQ} if name in ("gpt", "llama", "bert", "moe", "t5") else {}), **sizes)
    return Batch(model, tuple(inputs), {}, {"loss_fn": MODELS[name].loss, "training": True})


@pytest.mark.parametrize("name", ["gpt", "llama", "bert", "vit", "t5"])
def test_two_sizes_of_a_batch_give_every_other(name):
    """Also the batch as one micro-batch, which is outside of the two."""
    batch = batch_of(name, 24)
    a, b, third, few = (batch.cut(Pipeline(microbatches=n)).graph for n in (2, 3, 4, 12))
    for graph, count in ((third, 4), (few, 12)):
        assert Between.of(24 // count, 12, 8).graph(a, b, count).hash == graph.hash
    one = batch.as_one(Pipeline(microbatches=2))
    assert Between.of(24, 12, 8).graph(a, b, 1).hash == one.hash
    assert Between.of(6, 24, 12).graph(one, a, 4).hash == third.hash


def test_programs_that_differ_by_more_than_numbers_are_refused():
    class Branches(nn.Module):
        def __init__(self):
            super().__init__()
            self.lin = nn.Linear(4, 4)

        def forward(self, x):
            y = self.lin(x)
            return (y.relu() if len(x) > 4 else y.tanh()).sum()

    batch = Batch(Branches(), (torch.randn(12, 4),), {}, {"training": True})
    a, b = (batch.cut(Pipeline(microbatches=n, inexact="accept")).graph for n in (2, 3))
    with pytest.raises(Unlike, match="of one size of a batch is"):
        Between.of(3, 6, 4).graph(a, b, 4)
