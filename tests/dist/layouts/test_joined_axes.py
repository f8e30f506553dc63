"""Mesh axes taken as one: their process group, and plans over both axes of a 2 x 2 mesh."""
from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from autoshard import _torch
from autoshard.base.plan import Plan
from autoshard.collectives import RUN
from autoshard.errors import MeshError
from autoshard.runtime.carriers import gloo_messages
from autoshard.runtime.ranks.place import axes_of_ranks, joined_group, locate
from autoshard.runtime.trace_collectives import recorded_collectives
from tests.dist.harness import on_ranks
from tests.dist.parity_cases import Case, run_cases

pytestmark = pytest.mark.dist
CASES = [Case("mlp", "dp=2,tp=2", "data parallel"), Case("mlp", "dp=2,tp=2", "fully sharded", "local")]


def gathered(group: dist.ProcessGroup) -> list[int]:
    """Ranks in the order in which a gather puts them, by messages and by gloo's own collective."""
    mine, n = torch.tensor([dist.get_rank()]), group.size()
    messages = gloo_messages.land(gloo_messages.exchange(RUN["all_gather"], mine, "", gloo_messages.Members(group))).tolist()
    assert _torch.WAIT(RUN["all_gather"].target(mine, n, group.group_name)).tolist() == messages
    return messages


def groups() -> None:
    rank = dist.get_rank()
    place = locate("a=2,b=1,c=2")
    assert place.group("a+c") == dist.group.WORLD.group_name, "the group of all processes is there already"
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    assert gathered(joined_group(mesh, (1,))) == [rank // 2 * 2, rank // 2 * 2 + 1], "one group of several"
    turned = DeviceMesh("cpu", torch.tensor([[3, 1], [2, 0]]), mesh_dim_names=("dp", "tp"))
    whole = joined_group(turned, (0, 1))
    assert gathered(whole) == [3, 1, 2, 0], "the earlier axis is major, whatever the ranks are called"
    assert axes_of_ranks(turned, [3, 1, 2, 0]) == "dp+tp" and axes_of_ranks(turned, [3, 2]) == "dp"
    assert axes_of_ranks(turned, [0, 1, 2, 3]) is axes_of_ranks(turned, [3, 1, 2]) is None
    with recorded_collectives(turned) as found:
        gathered(whole)
    assert [(c.kind, c.axis, c.nbytes) for c in found] == [("all_gather", "dp+tp", 32)] * 2
    for ranks, name in (([3, 1, 2, 0], "d"), ([[0, 1], [3, 2]], "tp")):  # of the latter, ranks 0 and 1 are in order
        with pytest.raises(MeshError, match=f"axis '{name}' of the DeviceMesh has ranks .*3, [12].*wrong order"):
            locate(DeviceMesh("cpu", torch.tensor(ranks), mesh_dim_names=("d",) if name == "d" else ("dp", "tp")))
    part = DeviceMesh("cpu", torch.tensor([[3], [1]]), mesh_dim_names=("dp", "tp"))
    if rank in (1, 3):  # the others do not know of it
        assert gathered(joined_group(part, (0, 1))) == [3, 1]


def all_of_it(folder: str) -> list:
    groups()
    return run_cases(CASES, folder, 10.0)


def test_axes_taken_as_one(tmp_path: Path) -> None:
    (results, *_) = on_ranks(4, all_of_it, str(tmp_path))
    assert all(r.passed for r in results), results
    used = [{(c.kind, c.axis) for c in Plan.load(tmp_path / f"{i}.json").collectives} for i in range(len(CASES))]
    assert ("all_reduce", "dp+tp") in used[0] and {("all_gather", "dp+tp"), ("reduce_scatter", "dp+tp")} <= used[1]
