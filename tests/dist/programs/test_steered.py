"""Steered plans on real processes: plans by hand, the classic product of three, and seeds that DTensors are."""
from __future__ import annotations

import warnings
from collections import Counter

import pytest
import torch
from torch import nn
from torch.distributed._functional_collectives import all_gather_tensor, all_reduce, reduce_scatter_tensor
from torch.distributed.device_mesh import init_device_mesh

import autoshard
from autoshard.base.mesh import parse_mesh
from autoshard.decide.options import Options
from autoshard.program.trace import trace
from autoshard.program.tracing.user_collectives import alone
from autoshard.study.compare import comparison, save
from models import gpt, mlp
from tests.dist.harness import assert_same_training, on_ranks, twins, whole

pytestmark = pytest.mark.dist
MODELS = {"mlp": mlp, "gpt": gpt}


def train_under(files: dict[str, str], mesh: str) -> dict[str, set]:
    """Three AdamW steps of every model under every plan file, against one device; the collectives really planned."""
    seen = {}
    for file, name in files.items():
        module = MODELS[name]
        model, reference, batch = twins(module.build, torch.float64)
        compiled = autoshard.compile(model, mesh, loss_fn=module.loss, plan=file, cluster="cpu-gloo", cache=False)
        try:
            assert_same_training(compiled, reference, [batch] * 3, lambda m, b: m(*b), lambda m, b: module.loss(m(*b[:-1]), b[-1]))
        except AssertionError as e:
            e.add_note(f"plan {file}")
            raise
        seen[file] = {c.kind for c in compiled.plan.collectives}
        assert "by hand" in compiled.plan.status, "the plan file was replayed"
    return seen


def test_data_fully_sharded_and_tensor_parallel_have_parity(tmp_path):
    files = {}
    for name, module in MODELS.items():
        model, batch = module.build()
        program = trace(model.to(torch.float64), tuple(t.double() if t.is_floating_point() else t for t in batch),
                        loss_fn=module.loss, training=True)
        (tmp_path / name).mkdir()
        save(comparison(program, parse_mesh("d=2"), Options(cluster="cpu-gloo", time_limit=5), has_loss=True), tmp_path / name)
        files |= {str(tmp_path / name / f"{plan}.json"): name for plan in ("ddp", "zero-1", "zero-2", "fsdp", "megatron-tp", "tp-sequence-parallel")}
    seen, _ = on_ranks(2, train_under, files, "d=2")
    for file, kinds in seen.items():
        assert kinds, file
        assert "all_gather" in kinds or not file.endswith("fsdp.json")


class Product(nn.Module):
    """Z = (X W) V."""

    def __init__(self) -> None:
        super().__init__()
        self.w, self.v = nn.Parameter(torch.randn(32, 64)), nn.Parameter(torch.randn(64, 16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x @ self.w) @ self.v


PRODUCT_SEEDS = {"input:0": "rows,-", "w": "-,columns", "v": "columns,-", "output:0": "rows,-"}


def multiply() -> tuple[list[tuple[str, str]], bool, tuple[int, ...]]:
    torch.manual_seed(0)
    model, x = Product().double(), torch.randn(8, 32, dtype=torch.float64)
    wanted = model(x).detach()
    compiled = autoshard.compile(model.eval(), "rows=2,columns=2", seeds=PRODUCT_SEEDS, outputs="dtensor", cluster="cpu-gloo", cache=False)
    with torch.no_grad():
        z = compiled(x)
    return ([(c.kind, c.axis) for c in compiled.plan.collectives], torch.allclose(z.full_tensor(), wanted),
            tuple(compiled.get_parameter("w").to_local().shape))


def test_the_product_of_three_has_one_all_reduce_over_the_columns():
    for collectives, right, local in on_ranks(4, multiply):
        assert collectives == [("all_reduce", "columns")]
        assert right and local == (32, 32)


def held_and_marked() -> tuple[tuple[int, ...], tuple[int, ...], bool]:
    """A DTensor parameter keeps its layout; an annotated activation is split and the numbers are those of one device."""
    from torch.distributed.tensor import Shard, distribute_tensor

    class Marked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.down(autoshard.annotate(torch.relu(self.up(x)), "d,-")).square().mean()

    torch.manual_seed(0)
    model, x = Marked().double(), torch.randn(8, 16, dtype=torch.float64)
    loss = model(x)
    loss.backward()
    wanted = model.down.weight.grad.clone()
    model.zero_grad()
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("d",))
    model.up.weight = nn.Parameter(distribute_tensor(model.up.weight.detach(), mesh, [Shard(1)]))
    compiled = autoshard.compile(model, mesh, cluster="cpu-gloo", cache=False)
    got = compiled(x)
    got.backward()
    relu = next(p for n, p in compiled.plan.ops.items() if n.startswith("annotate"))
    gradient = compiled.get_parameter("down.weight").grad.full_tensor()
    return compiled.plan.placements["up.weight"], relu.outputs[0], torch.allclose(got, loss) and torch.allclose(gradient, wanted)


def test_dtensor_parameters_are_seeds_and_marks_hold():
    for stored, marked, right in on_ranks(2, held_and_marked):
        assert stored == (1,) and marked == (0,) and right


class ByHand(nn.Module):
    """Columns and rows over `mesh`, the sums of two blocks reduced by the model itself: into whole values, and into pieces."""

    def __init__(self, hidden: int, mesh) -> None:
        super().__init__()
        make = lambda a, b: nn.Parameter(torch.randn(a, b, dtype=torch.float64) / 8)  # noqa: E731
        self.up, self.down, self.wide, self.narrow = make(16, hidden), make(hidden, 16), make(16, hidden), make(hidden, 16)
        self.mesh = mesh

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + all_reduce(torch.relu(x @ self.up) @ self.down, "sum", self.mesh)
        y = reduce_scatter_tensor(torch.relu(x @ self.wide) @ self.narrow, "sum", 0, self.mesh)
        return all_gather_tensor(torch.tanh(y), 0, self.mesh)


def by_hand() -> tuple[bool, bool, list[str]]:
    """The model compiled from whole weights against one device, and against itself run by hand on this rank's part of them."""
    mesh, rank = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",)), torch.distributed.get_rank()
    torch.manual_seed(0)
    model, x = ByHand(32, mesh), torch.randn(8, 16, dtype=torch.float64)
    mine = ByHand(16, mesh)
    for name, p in mine.named_parameters():
        p.data = model.get_parameter(name).detach().chunk(2, 1 if name in ("up", "wide") else 0)[rank].clone()
    with torch.no_grad(), warnings.catch_warnings(action="ignore", category=FutureWarning):
        run_by_hand = whole(mine(x))
    with alone():
        wanted = model(x)
        wanted.square().sum().backward()
    gradients = {n: p.grad.clone() for n, p in model.named_parameters()}
    model.zero_grad()
    compiled = autoshard.compile(model, mesh, cluster="cpu-gloo", cache=False)
    out = compiled(x)
    out.square().sum().backward()
    same = torch.allclose(out, wanted) and all(torch.allclose(p.grad.full_tensor(), gradients[n]) for n, p in compiled.named_parameters())
    forward = [c.kind for c in compiled.plan.collectives if c.phase == "forward"]
    return same, torch.allclose(out, run_by_hand), forward


def test_a_model_parallel_by_hand_has_its_own_collectives_and_parity():
    for same, as_by_hand, forward in on_ranks(2, by_hand):
        assert same and as_by_hand
        assert Counter(forward) >= Counter(("all_reduce", "reduce_scatter", "all_gather"))
