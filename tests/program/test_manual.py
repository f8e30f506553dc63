"""Functional collectives in the user's model: their placements are taken as given, and the rest is searched."""
from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import _functional_collectives as collectives
from torch.distributed._functional_collectives import all_gather_tensor, all_reduce, reduce_scatter_tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor._collective_utils import shard_dim_alltoall

import autoshard
from autoshard.errors import AutoshardError, SeedError, TraceError

X = torch.randn(64, 128, dtype=torch.float64)


class Block(nn.Module):
    """Columns, then rows, as Megatron writes it; `group` as the author names it."""

    def __init__(self, group="tp", op: str = "sum") -> None:
        super().__init__()
        self.up, self.down = nn.Linear(128, 256, bias=False), nn.Linear(256, 128, bias=False)
        self.group, self.op = group, op
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + all_reduce(self.down(torch.relu(self.up(x))), self.op, self.group)


class Sequence(Block):
    """The sum is scattered along the rows, and gathered again."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = reduce_scatter_tensor(self.down(torch.relu(self.up(x))), "sum", 0, self.group)
        return x + all_gather_tensor(torch.tanh(y), -2, self.group)


class Gathered(Block):
    """Weights that are gathered before use, as in fully sharded data parallelism."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        up, down = (collectives.wait_tensor(collectives.all_gather_single(m.weight, 0, self.group)) for m in (self.up, self.down))
        return torch.relu(x @ up.t()) @ down.t()


class Copied(torch.autograd.Function):
    """Megatron's f: the identity, and a sum over the group backward."""

    @staticmethod
    def forward(ctx, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> torch.Tensor:
        return collectives.all_reduce(gradient, "sum", "tp")


class Reduced(torch.autograd.Function):
    """Megatron's g: a sum over the group, and the identity backward."""

    @staticmethod
    def forward(ctx, x: torch.Tensor) -> torch.Tensor:
        return collectives.all_reduce(x, "sum", "tp")

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


class Megatron(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + Reduced.apply(self.down(torch.relu(self.up(Copied.apply(x)))))


class Turned(Block):
    """Rows become columns and columns rows again, around something that needs whole rows and something that needs whole columns."""

    def __init__(self, mesh: tuple = ("tp",)) -> None:
        super().__init__()
        self.mesh = (*mesh, 0)[:2]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = torch.softmax(self.up(x), dim=1)
        columns = torch.cumsum(shard_dim_alltoall(rows, 0, 1, *self.mesh), dim=0)
        return self.down(torch.softmax(shard_dim_alltoall(columns, 1, 0, *self.mesh), dim=1))


class Sent(Block):
    """What rank 0 has is sent to all: on one device there is one value anyhow."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(collectives.broadcast(x, 0, self.group))))


class Softmax(Block):
    """Over classes that are split over ranks: the largest logit of all ranks, and the sum over them."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits = self.up(x)
        largest = collectives.all_reduce(logits.detach().amax(-1, keepdim=True), "max", self.group)
        powers = torch.exp(logits - largest)
        return (powers / collectives.all_reduce(powers.sum(-1, keepdim=True), "sum", self.group)).square().sum(-1)


def plan(model: nn.Module, mesh: str = "tp=2", x: torch.Tensor = X, **options):
    return autoshard.plan(model, mesh, (x,), cluster="h100-dgx", time_limit=120, **options)


def moved(found, phase: str) -> Counter:
    return Counter((c.kind, c.axis) for c in found.collectives if c.phase == phase and not c.hideable)


def test_an_all_reduce_gives_rows_and_one_sum():
    found = plan(Block())
    assert found.placements["down.weight"] == (1,), "the contracted dim is split, for only then there is a sum to reduce"
    (one,) = [c for c in found.collectives if c.phase == "forward"]
    assert (one.kind, one.axis) == ("all_reduce", "tp") and "test_manual.py:" in one.source
    assert "1 collective of the model taken as given" in found.notes


def test_sums_are_scattered_and_pieces_gathered():
    found = plan(Sequence())
    assert moved(found, "forward") == {("reduce_scatter", "tp"): 1, ("all_gather", "tp"): 1}
    tanh = next(p for n, p in found.ops.items() if n.startswith("tanh"))
    assert tanh.outputs == ((0,),)


def test_rows_become_columns_by_all_to_all():
    found = plan(Turned(), training=False)
    assert moved(found, "forward")["all_to_all", "tp"] >= 1, "of values as small as these gathering is cheaper one way"
    cumsum = next(p for n, p in found.ops.items() if n.startswith("cumsum"))
    assert cumsum.inputs == ((1,),) and cumsum.outputs == ((1,),), "columns are split while rows are summed up"
    assert found.ops["_softmax_1"].outputs == ((0,),), "rows are split while columns are"


def test_what_is_broadcast_is_whole_on_every_rank():
    found = plan(Sent(), seeds={"input:0": "tp,-"}, training=False)
    assert [c.kind for c in found.collectives][0] == "all_gather", "the input is split, what is sent is whole"
    marks = [p for n, p in found.ops.items() if n.startswith("annotate")]
    assert {p.outputs for p in marks} == {((-1,),)}
    assert "1 collective of the model taken as given" in found.notes


def test_gathered_weights_are_stored_in_pieces_and_so_are_their_gradients():
    found = plan(Gathered("dp"), "dp=2")
    assert found.placements == {"up.weight": (0,), "down.weight": (0,)}
    assert [c.kind for c in found.collectives if c.hideable and c.phase == "forward"] == ["all_gather"] * 2, "as of any weight"
    marks = [p for n, p in found.ops.items() if n.startswith("annotate")]
    assert Counter(p.outputs for p in marks) == {((0,),): 4, ((-1,),): 2}, "each way in and out, and two gradients"


def test_other_axes_and_everything_else_are_searched():
    found = plan(Block(), "dp=2,tp=2", seeds={"*.weight": "dp,?"})
    assert found.placements["down.weight"][0] == found.placements["up.weight"][0] == 0
    assert found.ops["mm_1"].outputs[0][1] == -2, "a sum over tp"
    (one,) = [c for c in found.collectives if c.phase == "forward" and c.kind == "all_reduce"]
    assert "tp" in one.axis, "over tp, and what the search wants over dp may join it"


@pytest.mark.parametrize("model", [Block(), Sequence(), Gathered(), Megatron(), Softmax(), Turned(), Sent()], ids=lambda m: type(m).__name__)
@pytest.mark.parametrize("mesh", ["tp=2", "dp=2,tp=2"])
def test_numbers_are_those_of_one_device(model, mesh):
    found = autoshard.verify(model, mesh, (X,), plans=("searched", "random:1"))
    assert found.ok, str(found)


@pytest.fixture
def two_by_two() -> Iterator[None]:
    """Process groups of a 2 x 2 mesh, as rank 3 has them."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=3, world_size=4)
    yield
    dist.destroy_process_group()


def test_every_way_to_name_the_group(two_by_two):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    ways = ("tp", mesh["tp"], (mesh, 1), mesh.get_group("tp"), mesh.get_group("tp").group_name, [2, 3])
    plans = [plan(Block(group), "dp=2,tp=2") for group in ways]
    assert {p.placements["down.weight"] for p in plans} == {plans[0].placements["down.weight"]}
    assert {p.placements["down.weight"][1] for p in plans} == {1}
    assert plan(Block(mesh.get_group("dp")), "dp=2,tp=2").placements["down.weight"][0] == 1
    assert plan(Block(dist.group.WORLD), "dp=2,tp=2").placements["down.weight"] == (1, 1), "all axes"


# -- what cannot be taken -----------------------------------------------------------------------------

class Local(Block):
    """With this rank's part of the weights: shapes as on two ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(64, 256, bias=False).double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return all_gather_tensor(self.up(x[:, :64]), 1, "tp") @ torch.ones(512, 1, dtype=torch.float64)


class Counted(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.up(x).sum() / all_reduce((x > 0).sum(), "sum", "tp")


class Exchanged(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.up(collectives.all_to_all_single(x, None, None, "tp"))


class Passed(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.up(collectives.permute_tensor(x, [1, 0], "tp"))


class Whole(Block):
    """Reduces what is no sum of parts."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.up(all_reduce(torch.relu(x), "sum", "tp"))


@pytest.mark.parametrize(("model", "mesh", "kind", "words"), [
    (Block("tpp"), "dp=2,tp=2", SeedError, ("'tpp', which is no axis of the mesh dp=2,tp=2", "did you mean tp?", "test_manual.py:", "all_reduce(")),
    (Block([0, 2]), "a=8", SeedError, ("a group of 2 ranks that are 2 apart", "no axis of the mesh a=8", "DeviceMesh of one axis")),
    (Block([0, 1, 3]), "a=4", TraceError, ("the ranks [0, 1, 3], which are no axis of a mesh", "test_manual.py:")),
    (Block(7), "a=4", TraceError, ("7 is no group", "test_manual.py:")),
    (Block(op="avg"), "tp=2", TraceError, ("reduces by 'avg'", "write an average as a sum and a division", "test_manual.py:")),
    (Sequence(), "tp=3", SeedError, ("splits dim 0 of a tensor of shape (64, 128) unevenly on mesh tp=3", "with whole weights")),
    (Counted(), "tp=2", SeedError, ("reduces numbers of dtype int64", "make them floating point", "test_manual.py:")),
    (Local(), "tp=2", TraceError, ("shapes are read as those of one device", "build it with whole weights", "test_manual.py:")),
    (Exchanged(), "tp=2", TraceError, ("calls all_to_all_single", "does not say which dim", "shard_dim_alltoall(x,", "all_reduce, all_gather_tensor,", "test_manual.py:")),
    (Passed(), "tp=2", TraceError, ("calls permute_tensor", "from rank to rank", "test_manual.py:")),
    (Whole(), "tp=2", SeedError, ("reduces a sum of parts, and relu_0", "test_manual.py:", "take the collective out")),
], ids=lambda v: type(v).__name__ if isinstance(v, nn.Module) else None)
def test_what_cannot_be_taken_is_named_with_its_line(model, mesh, kind, words):
    with pytest.raises(kind) as e:
        plan(model, mesh)
    for word in words:
        assert word in str(e.value)


def test_two_gathers_that_disagree_name_both_lines():
    class Both(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            rows = all_gather_tensor(self.up.weight, 0, "tp")
            columns = all_gather_tensor(self.up.weight, 1, "tp")
            return x @ (rows + columns).t()

    with pytest.raises(SeedError) as e:
        plan(Both())
    assert "rows = all_gather" in str(e.value) and "columns = all_gather" in str(e.value) and "up.weight and disagree" in str(e.value)


def test_a_collective_in_place_is_refused_with_its_line(two_by_two):
    class InPlace(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.down(torch.relu(self.up(x)))
            dist.all_reduce(y)
            return y

    with pytest.raises(AutoshardError, match=r"(?s)a collective in place.*test_manual.py:\d+.*all_gather_tensor, reduce_scatter_tensor and broadcast.*annotate or seeds"):
        plan(InPlace(), "dp=2,tp=2")


def test_torch_has_its_collectives_back():
    with pytest.raises(TraceError):
        plan(Exchanged())
    assert all_reduce.__code__.co_filename == collectives.__file__
