"""Plans on CPUs follow what carries their collectives."""
import pytest
import torch
from torch import nn

import autoshard


@pytest.mark.parametrize(("cluster", "split"), [("cpu-gloo", False), ("cpu-gloo:shared", True)])
def test_a_token_of_a_small_mlp_is_split_only_through_shared_memory(cluster, split):
    model = nn.Sequential(nn.Linear(256, 704, bias=False), nn.SiLU(), nn.Linear(704, 256, bias=False))
    plan = autoshard.plan(model, "tp=2", (torch.empty(4, 256, device="meta"),), training=False, cluster=cluster)
    assert (plan.placements["0.weight"] == (0,), plan.placements["2.weight"] == (1,)) == (split, split)
