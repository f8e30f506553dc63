"""Ranks that differ, go another way or die: a message on the others in bounded time, before any collective of the model."""
from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import autoshard
from autoshard.errors import AutoshardError, LoweringError
from autoshard.runtime.module import CompiledModule
from autoshard.runtime.ranks import heartbeat
from autoshard.runtime.ranks.agree import share
from autoshard.runtime.ranks.place import locate
from tests.dist.harness import on_ranks, started
from tests.dist.planners import by_planner, random_planner
from tests.dist.ports import free_ports

pytestmark = pytest.mark.dist
MESH, SOON, LOST = "dp=2", 50.0, 3.0


def net(width: int = 8) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, width), nn.ReLU(), nn.Linear(width, 8))


def compiled(model: nn.Module, **settings) -> CompiledModule:
    return CompiledModule(model, locate(MESH), by_planner(random_planner(1), **settings))


# --- on both ranks ---

def differing_calls() -> None:
    mine = dist.get_rank()
    x = torch.ones(4, 8)
    wide, short = compiled(net(8 + 8 * mine)), compiled(net())
    for model, args, message in (
            (wide, (x,), r"parameters: 0.weight \(8, 8\) torch.float32 against 0.weight \(16, 8\)"),
            (short, (x[:4 - 2 * mine],), r"inputs: \(4, 8\) float32 against \(2, 8\) float32"),
            (compiled(net()), (x.to(torch.float64 if mine else torch.float32),), "inputs: .* float32 against .* float64"),
            (compiled(net().train(bool(mine))), (x,), "mode: evaluation mode, gradients on against training"),
            (compiled(net(), key=f"time_limit={mine}"), (x,), "options: time_limit=0 against time_limit=1"),
            (compiled(net(), loss_fn=(nn.functional.mse_loss, nn.functional.l1_loss)[mine]), (x, x), "loss_fn mse_loss against")):
        start = time.monotonic()
        with pytest.raises(LoweringError, match=message):
            model(*args)
        assert time.monotonic() - start < SOON
    assert short(x).shape == (4, 8), "ranks that agree again go on"


def fewer_rows_while_others_compare() -> None:
    """One rank's last batch is shorter, at a call where the rest, who have this variant, compare their inputs."""
    mine, x = dist.get_rank(), torch.ones(4, 8)
    for shorter in (0, 1):
        model = compiled(net())
        model(x)
        start = time.monotonic()
        sizes = [2 if rank == shorter else 4 for rank in (0, 1)]
        with pytest.raises(LoweringError, match=rf"inputs \({sizes[0]}, 8\) float32 against .* inputs \({sizes[1]}, 8\) float32"):
            model(x[:sizes[mine]])
        assert time.monotonic() - start < SOON
        assert model(x).shape == (4, 8), "ranks that agree again go on"


def other_modules_while_others_compare() -> None:
    """The same, where inputs are equal: a parameter is frozen, or an attribute changed, on one rank."""
    mine, x = dist.get_rank(), torch.ones(4, 8)
    for change, message in ((lambda m: m[0].bias.requires_grad_(False), "gradients on with inputs .* against .*, trainable parameters all but 0.bias with"),
                            (lambda m: m[2].eval(), "against training mode but for 1 of 5 modules"),
                            (lambda m: setattr(m[3], "p", 0.1), "on both, so attributes, modes or numbers of modules")):
        model = compiled(nn.Sequential(*net(), nn.Dropout(0.0)))
        model(x)
        if mine:
            change(model)
        with pytest.raises(LoweringError, match=message):
            model(x)


SCALE = {"by": 1.0}


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = net()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) * SCALE["by"]


def other_numbers_outside() -> None:
    """Ranks change in one call to different variants, which all of them have, by a number in a global."""
    mine, x = dist.get_rank(), torch.ones(4, 8)
    model = compiled(Scaled())
    for SCALE["by"] in (1.0, 2.0, 3.0, 1.0):
        model(x)
    SCALE["by"] = 2.0 + mine
    with pytest.raises(LoweringError, match=r"variant: 0 against 1, .*SCALE\['by'\] = 2.0 against .*SCALE\['by'\] = 3.0"):
        model(x)


def another_way() -> None:
    """Rank 1 runs a variant it has, and waits in its collective, while rank 0 prepares another: rank 0 finds out."""
    model = compiled(net())
    model(torch.ones(4, 8))
    model.place.pulse.told[0] += 1
    dist.barrier()
    if dist.get_rank() == 1:  # stands for a call of the same variant, in whose collective it would hang
        time.sleep(4.0)
        return
    start = time.monotonic()
    model.place.pulse.told[0] -= 1
    with pytest.raises(AutoshardError, match=r"rank 1 does not prepare call 2 .* inputs \(4, 8\) float32.* inputs \(2, 8\)"):
        model(torch.ones(2, 8))
    assert time.monotonic() - start < SOON


class OfKinds(nn.Module):
    """Goes through a set of texts, whose order differs between these processes, as models of transformers do for kinds of layers."""

    kinds = frozenset("abcdefgh")

    def __init__(self, weighted: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weighted, self.heads = weighted, nn.ModuleDict({kind: nn.Linear(8, 8) for kind in sorted(self.kinds)})
        for i, kind in enumerate(sorted(self.kinds)):
            self.register_buffer(f"speed_{kind}", torch.arange(8.0) + i)

    def forward(self, x: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        made = {kind: torch.cos(at[:, None] * self.get_buffer(f"speed_{kind}")) for kind in self.kinds}
        if self.weighted:
            made = {kind: head * self.heads[kind].bias for kind, head in made.items()}
        for kind, head in self.heads.items():
            x = head(x) * made[kind]
        return x


def sets_of_texts() -> None:
    x, at = torch.randn(4, 8, generator=torch.Generator().manual_seed(0)), torch.arange(4.0)
    torch.testing.assert_close(compiled(OfKinds(False))(x, at), OfKinds(False)(x, at))
    with pytest.raises(LoweringError, match=r"graph of the model: .* goes through a set of texts, the order differs between processes"):
        compiled(OfKinds(True))(x, at)


def disagreements() -> None:
    sets_of_texts()
    differing_calls()
    fewer_rows_while_others_compare()
    other_modules_while_others_compare()
    other_numbers_outside()
    another_way()


def test_disagreements_are_named() -> None:
    on_ranks(2, disagreements)


# --- a killed rank ---

def waits_for_the_dead(rank: int, folder: str, port: int) -> None:
    heartbeat.LOST = LOST
    if Path(folder).name == "far":
        heartbeat.here = lambda: ""  # as from a machine where the process cannot be seen
    dist.init_process_group("gloo", init_method=f"tcp://localhost:{port}", rank=rank, world_size=2)
    place = locate(MESH)
    share(place, "same", lambda: "both are there")
    place.pulse.told[0] = 1
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    start = time.monotonic()
    try:
        share(place, "same", lambda: "never")
    except AutoshardError as e:
        Path(folder, "said").write_text(f"{time.monotonic() - start:.1f} {e}")
    os._exit(0)


def start_ranks(target, n: int, folder: Path) -> None:
    """Until all have ended, killed ones too."""
    port, = free_ports(1)
    ranks = [started(r, target, r, str(folder), port) for r in range(n)]
    for p in ranks:
        p.join(200)
        assert p.exitcode is not None, "a rank hangs"


@pytest.mark.parametrize(("where", "said"), [("near", "the process of rank 1 has ended"), ("far", "rank 1 has not been heard of")])
def test_a_killed_rank_is_missed(tmp_path: Path, where: str, said: str) -> None:
    (folder := tmp_path / where).mkdir()
    start_ranks(waits_for_the_dead, 2, folder)
    seconds, _, message = (folder / "said").read_text().partition(" ")
    assert said in message
    assert float(seconds) < LOST + SOON


# --- a rank killed before `compile` ---

def compiles_alone(rank: int, folder: str, port: int) -> None:
    dist.init_process_group("gloo", init_method=f"tcp://localhost:{port}", rank=rank, world_size=4)
    if rank in (1, 3):
        os.kill(os.getpid(), signal.SIGKILL)
    for mesh in ("dp=4", "dp=2,tp=2"):
        start = time.monotonic()
        try:
            autoshard.compile(net(), mesh, (torch.ones(4, 8),), cluster="cpu-gloo", join_timeout=LOST)
        except AutoshardError as e:
            Path(folder, f"{mesh} {rank}").write_text(f"{time.monotonic() - start:.1f} {e}")
    dist.distributed_c10d._get_default_store().set(f"done{rank}", "")
    if rank == 0:  # it keeps the store
        dist.distributed_c10d._get_default_store().wait(["done2"])
    os._exit(0)


def test_ranks_that_never_call_compile_are_named(tmp_path: Path) -> None:
    """Both where process groups are made and where ranks only meet in the store."""
    start_ranks(compiles_alone, 4, tmp_path)
    for mesh in ("dp=4", "dp=2,tp=2"):
        for rank in (0, 2):
            seconds, _, message = (tmp_path / f"{mesh} {rank}").read_text().partition(" ")
            assert "ranks 1, 3 did not call autoshard.compile" in message and "join_timeout" in message
            assert float(seconds) < LOST + SOON
