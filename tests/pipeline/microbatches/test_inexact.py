"""What keeps micro-batches from computing what the batch computes is named."""
from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.nn import functional as F

from autoshard import Pipeline
from autoshard.errors import UsageError
from autoshard.pipeline.microbatches.batch import traced
from models import resnet
from tests.pipeline.small_nets import Net, assert_same, both, classes, features


def contrast(x: torch.Tensor) -> torch.Tensor:
    return x + (x @ x.t()).softmax(-1) @ x


def normed(x: torch.Tensor) -> torch.Tensor:
    return x / x.std(0)


def largest(x: torch.Tensor) -> torch.Tensor:
    return x / x.amax(0)


def numbered(x: torch.Tensor) -> torch.Tensor:
    return x * torch.arange(x.shape[0], dtype=x.dtype)[:, None]


def picked(x: torch.Tensor) -> torch.Tensor:
    """Its own numbers of every sample: as many models pick the last token of each."""
    return x.unflatten(1, (4, 2))[torch.arange(x.shape[0])[:, None], torch.arange(4)].flatten(1)


def last_tokens(x: torch.Tensor) -> torch.Tensor:
    """Of every sample what its own data says, in a dim before the one of the samples, and by several numbers a sample."""
    h, rows = x.unflatten(1, (4, 2)), torch.arange(x.shape[0])
    last = h[..., 0].argmax(1)
    both = h[rows[:, None], torch.stack([last, last * 0], 1)]
    return torch.cat([h[rows, last], h.transpose(0, 1)[last, rows], both.flatten(1)], 1)


def own_margins(x: torch.Tensor) -> torch.Tensor:
    """Written where the data of a sample says, as the margin of a face's class is."""
    at = torch.arange(x.shape[0]), x.detach().argmin(1)
    return x.index_put(at, x[at].cos()).index_put(at, x.new_ones(()), accumulate=True)


@pytest.mark.parametrize("middle", [picked, last_tokens, own_margins])
def test_samples_may_be_picked_by_their_numbers(middle: Callable) -> None:
    for count in (2, 6):
        assert_same(Net(middle), (features(), classes()), F.cross_entropy, count)


def crossed(x: torch.Tensor) -> torch.Tensor:
    """Of every sample what the data of all others say."""
    return x * x[torch.arange(x.shape[0])[:, None], x.argmax(1)[None]].sum(1, keepdim=True)


def ranked(x: torch.Tensor) -> torch.Tensor:
    """Writes the numbers themselves."""
    rows = torch.arange(x.shape[0])
    return x.index_put((rows, x.detach().argmin(1)), rows.to(x))


def by_size(x: torch.Tensor) -> torch.Tensor:
    return x * (1.0 / x.shape[0])


def balanced(x: torch.Tensor) -> torch.Tensor:
    return x * x.mean(0)


def by_square(x: torch.Tensor) -> torch.Tensor:
    return x * x.new_ones(x.shape[0], x.shape[0]).sum()


def by_constant(x: torch.Tensor) -> torch.Tensor:
    return x / torch.tensor(len(x))


def written(x: torch.Tensor) -> torch.Tensor:
    return x.index_fill(0, torch.tensor([0]), 0.5)


def halves(x: torch.Tensor) -> torch.Tensor:
    return x.view(2, -1, 8).cumsum(1).view(-1, 8)


INEXACT = {contrast: "mixes samples", normed: "mixes samples", largest: "largest or smallest", numbered: "numbers of the samples",
           crossed: "numbers of the samples", ranked: "numbers of the samples",
           by_size: "its argument", balanced: "not linear in a sum over samples", by_constant: "a constant that is 12 for the batch and 4 for a micro-batch",
           by_square: "its result is (12, 12) for the batch and (4, 4) for a micro-batch", written: "by their numbers", halves: "no part of it"}


@pytest.mark.parametrize("middle", INEXACT, ids=lambda f: f.__name__)
def test_what_mixes_samples_is_named(middle: Callable) -> None:
    with pytest.raises(UsageError) as refused:
        both(Net(middle), (features(), classes()), F.cross_entropy, 3)
    text = str(refused.value)
    assert text.startswith("3 micro-batches compute something else than the batch: ") and "test_inexact.py:" in text
    assert INEXACT[middle] in text and 'inexact="accept"' in text


def test_batch_norm_is_named_and_may_be_accepted() -> None:
    model, batch = resnet.build(batch=4)
    with pytest.raises(UsageError, match=r"batch_norm.* in stem.norm at .*resnet.py:\d+: it needs numbers of the whole batch"):
        traced(model, batch, {}, Pipeline(2), loss_fn=resnet.loss)
    graph = traced(model, batch, {}, Pipeline(2, inexact="accept"), loss_fn=resnet.loss).graph
    assert graph.microbatches == 2 and any("buffer 'stem.norm.running_mean'" in note for note in graph.notes)
    model.eval()
    assert not traced(model, batch, {}, Pipeline(2), loss_fn=resnet.loss).graph.notes, "frozen statistics mix nothing"
