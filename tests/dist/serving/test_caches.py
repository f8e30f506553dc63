"""Prefill and decode steps over split caches on two processes: the numbers of one process, the memory that was planned, and checkpoints
into other placements."""
from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import autoshard
from autoshard.runtime.module import CompiledModule
from tests.dist.harness import assert_near, on_ranks
from tests.dist.live_bytes import LiveBytes
from tests.support.decoding import Decoder

pytestmark = pytest.mark.dist

BATCH, LENGTH, PROMPT = 4, 64, 3
SPLITS = {"batch": "tp,...", "heads": "-,tp,-,-", "sequence": "-,-,tp,-"}


def build() -> Decoder:
    torch.manual_seed(0)
    return Decoder(batch=BATCH, length=LENGTH, kv_heads=2, layers=1).double().eval()


def calls(steps: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """A prompt, then one token after the other."""
    g = torch.Generator().manual_seed(1)
    prompt = torch.randint(251, (BATCH, PROMPT), generator=g), torch.arange(PROMPT)
    return [prompt, *((torch.randint(251, (BATCH, 1), generator=g), torch.tensor([PROMPT + i])) for i in range(steps))]


def compiled(how: str) -> CompiledModule:
    """Planned for the decode step first."""
    seeds = {f"attention.*.{name}": SPLITS[how] for name in ("keys", "values")}
    return autoshard.compile(build(), "tp=2", calls(1)[1], training=False, seeds=seeds, cluster="cpu-gloo", cache=False)


def caches(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: b.to_local() for name, b in model.named_buffers() if name.endswith(("keys", "values"))}


@torch.no_grad()
def decoded(how: str, folder: str) -> tuple[float, int, float]:
    """Compare every call; (bytes of caches here, measured peak, planned peak)."""
    model, alone = compiled(how), build()
    places = {name: t.data_ptr() for name, t in caches(model).items()}
    for i, call in enumerate(calls(5)):
        assert_near(f"{how}: logits of call {i}", model(*call), alone(*call), 1e-9)
        assert {name: t.data_ptr() for name, t in caches(model).items()} == places, f"{how}: call {i} moved a cache"
    for name, b in alone.named_buffers():
        assert_near(f"{how}: {name}", model.get_buffer(name), b, 1e-9)
    call = calls(6)[-1]
    alone(*call)
    with LiveBytes() as seen:
        seen.track(list(model.parameters()), list(model.buffers()), call)
        model(*call)
    step = next(s for s in model._steps.values() if s.calls > 5)
    dcp.save(model.state_dict(), checkpoint_id=f"{folder}/{how}")
    return sum(t.nbytes for t in caches(model).values()), seen.peak, step.plan.memory["total"]


@torch.no_grad()
def goes_on(how: str, folder: str) -> None:
    """A checkpoint of caches that lay otherwise."""
    model, alone = compiled(how), build()
    for call in calls(6):
        alone(*call)
    state = model.state_dict()
    dcp.load(state, checkpoint_id=f"{folder}/{'heads' if how == 'batch' else 'batch'}")
    model.load_state_dict(state)
    call = torch.randint(251, (BATCH, 1)), torch.tensor([PROMPT + 6])
    assert_near(f"{how}: after loading", model(*call), copy.deepcopy(alone)(*call), 1e-9)


class Functional(nn.Module):
    """Attention over keys that come in and go out."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor, position: torch.Tensor, keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        keys = keys.index_copy(1, position, self.project(x))
        return nn.functional.scaled_dot_product_attention(x, keys, keys), keys


@torch.no_grad()
def as_arguments() -> None:
    """A cache that is an argument stays a DTensor, split as it came, from call to call."""
    torch.manual_seed(0)
    alone, mesh = Functional().double(), init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    xs, want = torch.randn(3, 4, 1, 16, dtype=torch.float64), torch.zeros(4, 8, 16, dtype=torch.float64)
    mine = distribute_tensor(want.clone(), mesh, [Shard(0)])
    model = autoshard.compile(alone, mesh, (xs[0], torch.tensor([0]), mine), training=False, outputs=("replicate", "dtensor"), cluster="cpu-gloo",
                              cache=False)
    for at, x in enumerate(xs):
        (out, want), (found, mine) = alone(x, torch.tensor([at]), want), model(x, torch.tensor([at]), mine)
        assert mine.placements == (Shard(0),) and mine.to_local().shape == (2, 8, 16)
        assert_near("attention", found, out, 1e-9)
        assert_near("keys", mine, want, 1e-9)


def everything(folder: str) -> list[tuple[float, int, float]]:
    as_arguments()
    found = [decoded(how, folder) for how in SPLITS]
    for how in ("batch", "sequence"):
        goes_on(how, folder)
    return found


def test_decoding_over_split_caches(tmp_path):
    whole = sum(b.nbytes for name, b in build().named_buffers() if name.endswith(("keys", "values")))
    for found in on_ranks(2, everything, str(tmp_path), timeout=900.0):
        for how, (nbytes, peak, planned) in zip(SPLITS, found, strict=True):
            assert nbytes == whole / 2, how
            assert peak == planned, f"{how}: measured {peak}, planned {planned}"
