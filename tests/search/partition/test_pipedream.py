"""PipeDream's optimizer on its own profiles at 1.25 GB/s: the figures are what its program prints."""
import itertools

import numpy as np
import pytest
from pipedream import seconds_alone, stage_costs

from autoshard.search.partition.bottleneck import least_bottleneck

WITHOUT_TRANSFERS = [
    ("vgg16", 4, 3.8541, "3-1"), ("vgg16", 8, 7.2039, None), ("vgg16", 16, 14.4360, None),
    ("alexnet", 4, 3.7256, "2-1-1"), ("alexnet", 8, 7.3426, "3-1-1-1-1-1"), ("alexnet", 16, 12.0858, None),
    ("gnmt", 4, 3.4566, "1-1-1-1"), ("gnmt", 8, 4.6982, None), ("gnmt", 16, 5.2214, None),
    ("resnet50", 4, 3.9770, "1-1-1-1"), ("resnet50", 8, 7.8872, "2-1-1-1-1-1-1"),
]
WITH_TRANSFERS = [
    ("vgg16", 4, 3.8137, "3-1"), ("vgg16", 8, 6.6692, "7-1"), ("vgg16", 16, 12.2737, "13-2-1"),
    ("alexnet", 4, 2.6284, "3-1"), ("alexnet", 8, 5.6506, "7-1"), ("alexnet", 16, 5.6506, None),
    ("gnmt", 4, 3.4566, None), ("gnmt", 8, 4.6366, None), ("gnmt", 16, 5.2214, None),
    ("resnet50", 4, 2.9174, "2-2"), ("resnet50", 8, 5.3938, "4-3-1"),
]


@pytest.mark.parametrize("transfers, model, machines, speedup, devices",
                         [(False, *row) for row in WITHOUT_TRANSFERS] + [(True, *row) for row in WITH_TRANSFERS])
def test_speed_ups_of_its_program(transfers, model, machines, speedup, devices):
    """Where several configurations are equally fast (None), what the stages of ours cost is compared alone."""
    cost = stage_costs(model, machines, transfers)
    found = least_bottleneck(cost)
    assert round(seconds_alone(model) / found.seconds, 4) == pytest.approx(speedup, abs=1.01e-4)
    assert devices in (None, "-".join(map(str, found.devices)))
    assert max(cost[first, last, n - 1] for first, last, n in found.stages) == found.seconds
    assert sum(found.devices) == machines
    assert [last for _, last, _ in found.stages] == [first for first, _, _ in found.stages[1:]] + [cost.shape[1] - 1]


def test_seven_and_one_is_the_published_configuration_of_vgg16():
    """On 8 machines, with the last stage on the classifier: its weights are 90 % of all and cross no network."""
    assert [n for _, _, n in least_bottleneck(stage_costs("vgg16", 8, True)).stages] == [7, 1]


@pytest.mark.parametrize("transfers", [False, True])
@pytest.mark.parametrize(("model", "machines"), sorted({row[:2] for row in WITHOUT_TRANSFERS}))
def test_the_papers_recursion_beside_the_programs(model, machines, transfers):
    """The paper's stage takes the larger of compute and synchronisation, where its program adds them: never slower, and on one machine per stage
    the same."""
    added, larger = (stage_costs(model, machines, transfers, kind) for kind in (False, True))
    assert least_bottleneck(larger).seconds <= least_bottleneck(added).seconds
    alone = np.isfinite(added[:, :, 0])
    assert np.array_equal(added[:, :, 0][alone], larger[:, :, 0][alone])


@pytest.mark.parametrize("seed", range(30))
def test_least_bottleneck_equals_trying_all(seed):
    """States of a random order with branches, random costs."""
    rng = np.random.default_rng(seed)
    states, devices = int(rng.integers(2, 7)), int(rng.integers(1, 5))
    cost = np.where(np.triu(rng.random((states, states)) < 0.8, 1)[:, :, None], rng.random((states, states, devices)), np.inf)
    best = np.inf
    for number in range(1, min(states - 1, devices) + 1):
        for inner in itertools.combinations(range(1, states - 1), number - 1):
            path = (0, *inner, states - 1)
            for given in itertools.product(range(1, devices + 1), repeat=number):
                if sum(given) == devices:
                    best = min(best, max(cost[k, j, n - 1] for k, j, n in zip(path, path[1:], given)))
    assert least_bottleneck(cost).seconds == best
