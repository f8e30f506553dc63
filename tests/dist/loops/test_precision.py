"""Precision policies, autocast and the usual training tools, on two processes against one with the same policy."""
from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.nn import functional as F

import autoshard
from autoshard.base.precision import Precision
from tests.dist.harness import assert_near, on_ranks, whole

pytestmark = pytest.mark.dist
BF16 = 2e-2
"""A few roundings of bfloat16 (2^-8 each) on sums that two ranks order differently."""
LR = 0.5
"""Large, so that an update is well above the rounding of a float32 weight."""
SLOW = str(Path(__file__).parents[1] / "slow-device.toml")
"""Devices so slow that splitting the work always pays."""
BATCH = 2048
"""Large enough that data parallelism pays even with gloo's latency."""
DATA_PARALLEL = {"input:0": [Shard(0)], "*": [Replicate()]}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.norm, self.two = nn.Linear(64, 512), nn.LayerNorm(512), nn.Linear(512, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.two(F.gelu(self.norm(self.one(x))))


def net() -> Net:
    torch.manual_seed(0)
    return Net()


def data(seed: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    return torch.randn(BATCH, 64, generator=g), torch.randn(BATCH, 64, generator=g)


def loss(out: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(out.float(), target)


def sharded(**options) -> nn.Module:
    """Data parallel, so that every gradient is reduced over the ranks."""
    return autoshard.compile(net(), "dp=2", seeds=DATA_PARALLEL, cluster=SLOW, cache=False, **options)


def alone(**options) -> nn.Module:
    """The same policy on a mesh of one rank, this one."""
    mine = init_device_mesh("cpu", (2, 1), mesh_dim_names=("rest", "one"))["one"]
    return autoshard.compile(net(), mine, cluster=SLOW, cache=False, **options)


def compare(fast: nn.Module, slow: nn.Module, step, exact_step=None) -> None:
    """Sharded against one process: within rounding, or as near as one process is to float32 where sums cancel.
    Updated weights differ by what their gradients may, and by the rounding of the update."""
    exact = net()
    (exact_step or step)(exact)
    assert_near("loss", step(fast), step(slow), BF16)
    limits: dict[str, float] = {}
    wanted, true = dict(slow.named_parameters()), dict(exact.named_parameters())
    for name, p in fast.named_parameters():
        assert p.dtype == p.grad.dtype == torch.float32, f"{name}: {p.dtype}, gradient {p.grad.dtype}"
        got, want = whole(p.grad), whole(wanted[name].grad)
        limit = max(BF16 * want.norm().item(), 2 * (want - true[name].grad).norm().item())
        assert (got - want).norm().item() <= limit, f"gradient of {name}: off by {(got - want).norm():.3e}, allowed are {limit:.3e}"
        limits[name] = LR * limit + 1e-6 * want.norm().item()
    before = {name: whole(p).clone() for name, p in fast.named_parameters()}
    for model in (fast, slow):
        torch.optim.SGD(model.parameters(), lr=LR).step()
    for name, p in fast.named_parameters():
        got, want = whole(p), whole(wanted[name])
        assert not torch.equal(got, before[name]), f"{name} was not updated"
        limit = limits[name] + 1e-7 * want.norm().item()
        assert (got - want).norm().item() <= limit, f"updated {name}: off by {(got - want).norm():.3e}, allowed are {limit:.3e}"


def backward(model: nn.Module) -> torch.Tensor:
    x, y = data()
    value = loss(model(x), y)
    value.backward()
    return value


# --- on both ranks ---

def policies() -> None:
    for reduce, dtype in (("fp32", "float32"), ("bf16", "bfloat16")):
        policy = Precision(param="bf16", master="fp32", reduce=reduce)
        fast, slow = sharded(precision=policy), alone(precision=policy)
        compare(fast, slow, backward)
        reductions = [c for c in fast.plan.collectives if c.phase == "backward" and c.kind in ("all_reduce", "reduce_scatter")]
        assert reductions, "no gradient is a sum over the ranks"  # of the norm, at least: weights' may be made split and gathered
        assert {c.dtype for c in reductions} == {dtype}, f"reduce={reduce}: {reductions}"


def autocast() -> None:
    def step(model: nn.Module) -> torch.Tensor:
        x, y = data()
        with torch.autocast("cpu", torch.bfloat16):
            out = model(x)
        assert out.dtype == torch.bfloat16, "the last linear layer runs in bfloat16"
        value = loss(out, y)
        value.backward()
        return value

    compare(sharded(), alone(), step, backward)
    compare(sharded(), net(), step, backward)


def accumulation_and_clipping() -> None:
    policy = Precision(param="bf16", reduce="bf16")
    fast, slow = sharded(precision=policy), alone(precision=policy)

    def twice(model: nn.Module) -> torch.Tensor:
        x, y = data(2)
        if model is fast:
            with fast.no_sync():
                loss(model(x), y).backward()
            assert all(p.grad is None for p in model.parameters())
        else:
            loss(model(x), y).backward()
        return backward(model)

    compare(fast, slow, twice)
    norms = [whole(nn.utils.clip_grad_norm_(m.parameters(), 0.1)) for m in (fast, slow)]
    assert_near("norm", *norms, BF16)
    clipped = torch.stack([whole(p.grad).norm() for p in fast.parameters()]).norm()
    assert_near("norm after clipping", clipped, torch.tensor(0.1), 1e-3)


def counted_in_c10d() -> None:
    """The plan's collectives, small gradients in buckets, against torch's own record of what process groups ran."""
    from torch.profiler import ProfilerActivity, profile
    for seeds in (DATA_PARALLEL, {"one.weight": [Shard(0)], "two.weight": [Shard(1)]},
                  {"input:0": [Shard(0)], "*": [Shard(0)]}):
        with patch("autoshard.runtime.ranks.place.share_memory", return_value=None):  # c10d does not see what shared memory carries
            fast = autoshard.compile(net(), "dp=2", data()[:1], seeds=seeds, cluster="cpu-gloo", cache=False)
        dist.barrier()
        with profile(activities=[ProfilerActivity.CPU]) as seen:
            loss(fast(data()[0]), data()[1]).backward()
        got = Counter(C10D.get(e.name, e.name) for e in seen.events() if e.name.startswith("c10d::"))
        issues = fast._latest[1].issues
        assert Counter(c.kind for call in issues for c in call.planned()) == Counter(c.kind for c in fast.plan.collectives)
        want = Counter(c.kind for c in issues)
        sent = got.pop("c10d::send", 0)  # a call made as messages is one message each way between two ranks
        assert got.pop("c10d::recv_", 0) == sent and not got - want and got.total() + sent == want.total() and want, (
            f"{seeds}: c10d ran {dict(got)} and {sent} messages, planned are {dict(want)}")


C10D = {"c10d::allreduce_": "all_reduce", "c10d::allgather_into_tensor_coalesced_": "all_gather",
        "c10d::reduce_scatter_tensor_coalesced_": "reduce_scatter", "c10d::alltoall_base_": "all_to_all"}
"""Torch's operators one level below functional collectives, where calls enter a process group."""


def everything() -> list[str]:
    import traceback
    failed = []
    for fn in (policies, autocast, accumulation_and_clipping, counted_in_c10d):
        try:
            fn()
        except Exception:
            failed.append(f"{fn.__name__}:\n{traceback.format_exc()}")
    return failed


def test_on_two_processes() -> None:
    for failed in on_ranks(2, everything):
        assert not failed, "\n".join(failed)


# --- under torchrun ---

def train(out: str) -> None:
    """Compiled lazily, optimizer first, process group started by compile from the environment."""
    fast = autoshard.compile(net(), "dp=2", cluster="cpu-gloo", cache=False)
    optimizer = torch.optim.AdamW(fast.parameters(), lr=1e-2)
    losses = []
    for i in range(3):
        optimizer.zero_grad()
        x, y = data(i)
        value = loss(fast(x), y)
        value.backward()
        optimizer.step()
        losses.append(value.item())
    Path(out, f"{dist.get_rank()}.json").write_text(json.dumps(losses))
    dist.barrier()
    dist.destroy_process_group()


def test_lazily_under_torchrun(tmp_path: Path) -> None:
    root = Path(__file__).resolve().parents[3]
    subprocess.run([sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", __file__, str(tmp_path)],
                   check=True, timeout=300, cwd=root, env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(root)})
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for i, got in enumerate(zip(*(json.loads((tmp_path / f"{r}.json").read_text()) for r in range(2)), strict=True)):
        optimizer.zero_grad()
        x, y = data(i)
        value = loss(model(x), y)
        value.backward()
        optimizer.step()
        assert got == pytest.approx((value.item(),) * 2, rel=1e-5)


if __name__ == "__main__":
    train(sys.argv[1])
