"""What a compiled module does besides training: modes, checkpoints, replanning, meta models, bad calls."""
from __future__ import annotations

import copy
import tempfile
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from autoshard.decide.options import Passing
from autoshard.errors import PlanError, UsageError
from autoshard.runtime.cache import cache_folder
from autoshard.runtime.inputs import shard_batch
from autoshard.runtime.module import CompiledModule
from autoshard.runtime.ranks.place import locate
from autoshard.runtime.trace_collectives import recorded_collectives
from tests.dist.harness import assert_near, assert_same_training, on_ranks, same_gradients, whole
from tests.dist.planners import by_planner, random_planner

pytestmark = pytest.mark.dist
MESH = "dp=2"


class Net(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.one = nn.Linear(8, 16)
        self.norm = nn.BatchNorm1d(16)
        self.two = nn.Linear(16, 8, bias=False)
        self.two.weight.requires_grad_(True)
        self.dropout = dropout
        self.label = "plain attribute"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.two(F.dropout(F.relu(self.norm(self.one(x))), self.dropout, self.training))


def net(**kwargs) -> Net:
    torch.manual_seed(0)
    return Net(**kwargs).double()


def data(n: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(1)
    return torch.randn(n, 8, generator=g).double(), torch.randn(n, 8, generator=g).double()


def compiled(model: nn.Module, seed: int = 0, mesh: str = MESH, outputs: str = "replicate", **settings) -> CompiledModule:
    return CompiledModule(model, locate(mesh), by_planner(random_planner(seed, outputs), **settings))


def mse(model: nn.Module, batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
    return F.mse_loss(model(batch[0]), batch[1])


# --- every function below runs on both ranks ---

def loss_outside() -> None:
    for seed in range(3):
        model = net()
        fast = compiled(copy.deepcopy(model), seed)
        optimizer_first = dict(fast.named_parameters())
        assert_same_training(fast, model, [data()] * 3, mse)
        assert all(p is optimizer_first[n] for n, p in fast.named_parameters()), "parameters were replaced"
        for name, buffer in model.named_buffers():
            assert_near(name, whole(dict(fast.named_buffers())[name]), buffer, 1e-9)


def variants() -> None:
    model = net()
    fast = compiled(copy.deepcopy(model))
    mse(fast, data()).backward()
    mse(model, data()).backward()
    for n in (4, 8):
        for m in (fast, model):
            m.eval()
        with torch.no_grad():
            assert_near(f"eval of {n}", fast(data(n)[0]), model(data(n)[0]), 1e-9)
        for m in (fast, model):
            m.train()
            m.zero_grad()
            mse(m, data(n)).backward()
        same_gradients(fast, model, 1e-9)
    assert len(fast._steps) == 4, "training and eval, two shapes each"


def local_inputs() -> None:
    for outputs in ("local", "dtensor", "replicate"):
        for seed in range(3):
            model = net()
            fast = compiled(copy.deepcopy(model), seed, outputs=outputs, passing=Passing("local", outputs))
            x, y = data()
            mine, target = shard_batch((x, y), fast)
            assert mine.shape == (4, 8)
            out = fast(mine)
            if outputs == "dtensor":
                assert isinstance(out, DTensor) and out.shape == (8, 8)
                F.mse_loss(out.full_tensor(), y).backward()
            elif outputs == "replicate":
                F.mse_loss(out, y).backward()
            else:
                spec = fast._latest[1].user_specs[0]
                F.mse_loss(out, fast.place.slice(y, spec)).backward()
            F.mse_loss(model(x), y).backward()
            same_gradients(fast, model, 1e-9)


def loss_inside_local() -> None:
    model = net()
    fast = compiled(copy.deepcopy(model), 1, loss_fn=F.mse_loss, passing=Passing("local"))
    for _ in range(2):
        assert_same_training(fast, model, [data()] * 2, lambda m, b: m(*shard_batch(b, fast)), mse)
        fast.replan()  # for pieces again


def accumulation() -> None:
    for seed in range(3):
        model = net()
        fast = compiled(copy.deepcopy(model), seed)
        for n in (8, 4):
            with fast.no_sync():
                mse(fast, data(n)).backward()
            assert all(p.grad is None for p in fast.parameters())
            mse(model, data(n)).backward()
        mse(fast, data()).backward()
        mse(model, data()).backward()
        same_gradients(fast, model, 1e-9)
        for m in (fast, model):
            mse(m, data()).backward()
        same_gradients(fast, model, 1e-9)


def input_gradients() -> None:
    x, y = data()
    fast, model = compiled(net(), 2), net()
    grads = []
    for m in (fast, model):
        mine = x.clone().requires_grad_()
        F.mse_loss(m(mine), y).backward()
        grads.append(mine.grad)
    assert_near("gradient of the input", *grads, 1e-9)


def checkpoints(folder: str) -> None:
    one = compiled(net(), 0)
    optimizer = torch.optim.AdamW(one.parameters())
    mse(one, data()).backward()
    optimizer.step()
    dcp.save(one.state_dict(), checkpoint_id=folder)
    torch.manual_seed(7)
    other = compiled(Net().double(), 5)
    other.prepare(data()[0])
    assert any(one._stored.specs[n] != other._stored.specs[n] for n in one._stored.params), "plans should differ"
    state = other.state_dict()
    dcp.load(state, checkpoint_id=folder)
    for name, p in one.named_parameters():
        assert torch.equal(whole(p), whole(dict(other.named_parameters())[name])), name
    plain = {n: whole(t) * 2 for n, t in one.state_dict().items()}
    other.load_state_dict(plain)
    for name, p in other.named_parameters():
        assert torch.equal(whole(p), plain[name]), name


def replanning() -> None:
    model = net()
    fast = compiled(copy.deepcopy(model), 0)
    one, two = (torch.optim.AdamW(m.parameters(), lr=1e-3) for m in (fast, model))
    for step in range(4):
        if step == 2:
            before = dict(fast._stored.specs)
            object.__setattr__(fast.settings, "build", by_planner(random_planner(5)).build)
            fast.replan(one)
            assert before != fast._stored.specs, "the other planner should move something"
        for m, o in ((fast, one), (model, two)):
            o.zero_grad()
            mse(m, data()).backward()
            o.step()
    for name, p in model.named_parameters():
        assert_near(name, dict(fast.named_parameters())[name], p, 1e-9)


class Drop(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.dropout(x * self.scale, 0.5)


def dropout() -> None:
    sharded = 0
    for seed in range(6):
        fast = compiled(Drop(), seed, outputs="dtensor", passing=Passing("global", "dtensor"))
        torch.manual_seed(dist.get_rank())  # each rank's own generator must not matter
        first, second = (fast(torch.ones(8, 16)) for _ in range(2))
        drawn = next(op for op in fast._latest[1].graph.of_kind("call") if "dropout" in str(op.target))
        (p,) = fast.plan.ops[drawn.name].outputs[0]
        out = whole(first)
        assert not torch.equal(out, whole(second)), "every call draws anew"
        assert 0.2 < (out == 0).double().mean() < 0.8
        if p >= 0:
            sharded += 1
            a, b = out.chunk(2, p)
            assert not torch.equal(a, b), "shards must draw different numbers"
        other = out.clone()
        dist.broadcast(other, 0)
        assert torch.equal(out, other), "replicas must draw the same numbers"
    assert sharded, "no plan sharded the dropout: choose other seeds"
    state = torch.random.get_rng_state()
    fast(torch.ones(8, 16))
    assert torch.equal(state, torch.random.get_rng_state()), "the user's generator was advanced"


def meta_models() -> None:
    with torch.device("meta"):
        model = Net().double()
    fast = compiled(model, 1)
    optimizer = torch.optim.AdamW(fast.parameters())
    before = [p for g in optimizer.param_groups for p in g["params"]]
    out = fast(data()[0])
    assert torch.isfinite(out).all()
    weight = whole(fast.one.weight)
    assert 0.01 < weight.std() < 1 and weight.device.type == "cpu"
    F.mse_loss(out, data()[1]).backward()
    optimizer.step()
    assert all(a is b for a, b in zip(before, fast.parameters(), strict=True))
    again = compiled(Net().double(), 1)
    again.prepare(data()[0])
    other = weight.clone()
    dist.broadcast(other, 0)
    assert torch.equal(weight, other), "ranks initialised differently"


def meta_from_checkpoint(folder: str) -> None:
    source = compiled(net(), 0)
    source.prepare(data()[0])
    dcp.save(source.state_dict(), checkpoint_id=folder)
    with torch.device("meta"):
        model = Net().double()
    fast = compiled(model, 4, checkpoint=folder)
    assert_near("output", fast(data()[0]).detach(), net()(data()[0]).detach(), 1e-9)


def disagreements() -> None:
    fast = compiled(net())
    n = 8 if dist.get_rank() == 0 else 4
    with pytest.raises(Exception, match="call different programs"):
        fast(data(n)[0])

    def broken(traced, mesh, *, stored, inputs, pipeline=None):
        raise PlanError("no plan today")

    bad = CompiledModule(net(), locate(MESH), by_planner(broken))
    with pytest.raises(PlanError, match="no plan today"):
        bad(data()[0])


def replay(folder: str) -> None:
    first = compiled(net(), 0)
    first.prepare(data()[0])
    plan = first.plan

    def never(traced, mesh, *, stored, inputs, pipeline=None):
        raise AssertionError("the planner ran although a plan was given")

    again = CompiledModule(net(), locate(MESH), by_planner(never, plan=plan))
    assert_near("replayed", again(data()[0]).detach(), net()(data()[0]).detach(), 1e-9)
    with pytest.raises(PlanError, match="another program"):
        CompiledModule(net(), locate(MESH), by_planner(never, plan=plan))(data(4)[0])
    cache = cache_folder(folder)
    CompiledModule(net(), locate(MESH), by_planner(random_planner(0), cache=cache)).prepare(data()[0])
    CompiledModule(net(), locate(MESH), by_planner(never, cache=cache)).prepare(data()[0])
    dist.barrier()
    if dist.get_rank() == 0:
        (path,) = Path(folder).glob("*.json")
        path.write_text("{ not a plan")
    dist.barrier()
    CompiledModule(net(), locate(MESH), by_planner(random_planner(0), cache=cache)).prepare(data()[0])


def surface() -> None:
    fast = compiled(net(), 0)
    assert isinstance(fast.one.weight, DTensor) and fast.label == "plain attribute"
    assert [n for n, _ in fast.named_parameters()] == [n for n, _ in net().named_parameters()]
    seen = []
    fast.register_forward_hook(lambda m, args, out: seen.append(out.shape))
    fast(data()[0])
    assert seen == [(8, 8)]
    with pytest.raises(UsageError, match="cannot be called"):
        fast.one(data()[0])
    with pytest.raises(UsageError, match="Register it on the compiled model"):
        fast.one.register_forward_hook(print)
    assert copy.deepcopy(fast).plan.key == fast.plan.key


def ranks_differ() -> None:
    torch.manual_seed(dist.get_rank())
    fast = compiled(Net().double(), 0)
    out = fast(data()[0]).detach()
    other = out.clone()
    dist.broadcast(other, 0)
    assert torch.equal(out, other), "ranks that initialised differently must agree after compile"


def intercepted() -> None:
    from autoshard.verification.reprice import collectives_in
    for seed in range(3):
        fast = compiled(net(), seed, mesh="dp=2")
        fast.prepare(data()[0])
        with recorded_collectives(fast.place.device_mesh) as found:
            mse(fast, data()).backward()
        step = fast._latest[1]
        lowered = collectives_in(step.lowered)
        assert [(c.kind, c.axis, c.nbytes) for c in found] == [(c.kind, c.axis, c.nbytes) for c in lowered] and found
        outside = [(c.kind, c.axis, c.nbytes, c.bucket) for c in lowered if not c.inner]  # random plans do not list those inside ops
        assert [(c.kind, c.axis, c.nbytes, c.bucket) for c in step.lowered.schedule.calls] == outside


def all_features(folder: str) -> list[str]:
    failed = []
    plain = (loss_outside, variants, local_inputs, loss_inside_local, accumulation, input_gradients, replanning, dropout,
             meta_models, disagreements, surface, ranks_differ, intercepted)
    for i, fn in enumerate(plain):
        run(fn, failed)
    for i, fn in enumerate((checkpoints, meta_from_checkpoint, replay)):
        run(fn, failed, f"{folder}/{i}")
    return failed


def run(fn, failed: list[str], *args) -> None:
    import traceback
    try:
        fn(*args)
    except Exception:
        failed.append(f"{fn.__name__}:\n{traceback.format_exc()}")


def test_features() -> None:
    with tempfile.TemporaryDirectory() as folder:
        for failed in on_ranks(2, all_features, folder):
            assert not failed, "\n".join(failed)
