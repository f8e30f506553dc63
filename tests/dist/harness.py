"""Run a function on several gloo processes, and compare a compiled model with the same model on one."""
from __future__ import annotations

import copy
import multiprocessing
import os
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing import forkserver
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn

FORKS = multiprocessing.get_context("forkserver")
SERVERS = [forkserver.ForkServer() for _ in range(2)]
"""They have done the imports, which saves seconds for each rank. They hash otherwise than each other, and so do the first rank and the
rest: a program that depends on the order of a set is still found."""
for server in SERVERS:
    server.set_forkserver_preload(["autoshard.api", "autoshard.seeds.marks", "autoshard.runtime.inputs", "autoshard.verification.check", "torch._dynamo",
                                   "torch.distributed.checkpoint.state_dict", "torch.distributed.tensor"])


def on_ranks(world: int, fn: Callable[..., Any], *args: Any, timeout: float = 240.0) -> list[Any]:
    """`fn(*args)` in each of `world` processes of one process group; its results by rank. `fn` is a module-level
    function. Fails with the first traceback, or when time is up."""
    with tempfile.TemporaryDirectory() as folder:
        ranks = [started(r, _rank, r, world, folder, fn, args) for r in range(world)]
        failed = _join(ranks, time.monotonic() + timeout)
        texts = [Path(folder, f"error{r}").read_text() for r in range(world) if Path(folder, f"error{r}").exists()]
        if texts or failed:
            raise AssertionError("\n".join(texts) or f"processes ended with {failed} and no message")
        return [pickle.loads(Path(folder, f"result{r}").read_bytes()) for r in range(world)]


def started(rank: int, target: Callable[..., None], *args: Any) -> Any:
    """The process of a rank, which calls `target(*args)`."""
    process = FORKS.Process(target=target, args=args, daemon=True)
    with mock.patch.object(forkserver, "connect_to_new_process", SERVERS[min(rank, 1)].connect_to_new_process):
        process.start()
    return process


def _join(ranks: list[Any], deadline: float) -> list[Any]:
    """Exit codes if some rank failed or ran out of time; the others are ended then."""
    while any(p.is_alive() for p in ranks):
        if time.monotonic() > deadline or any(p.exitcode not in (None, 0) for p in ranks):
            time.sleep(1.0)  # let the others write their errors
            break
        time.sleep(0.02)
    codes = ["time ran out" if p.is_alive() else p.exitcode for p in ranks]
    for p in ranks:
        if p.is_alive():
            p.kill()
        p.join()
    return codes if any(codes) else []


def _rank(rank: int, world: int, folder: str, fn: Callable[..., Any], args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    os.environ.pop("RANK", None)
    try:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world)
        result = fn(*args)
        dist.barrier()
        dist.destroy_process_group()
        Path(folder, f"result{rank}").write_bytes(pickle.dumps(result))
    except BaseException:
        Path(folder, f"error{rank}").write_text(f"rank {rank}:\n{traceback.format_exc()}")
        os._exit(1)


def whole(t: torch.Tensor) -> torch.Tensor:
    return t.detach().full_tensor() if hasattr(t, "full_tensor") else t.detach()


def assert_near(name: str, got: torch.Tensor, want: torch.Tensor, tol: float, scale: float = 0.0) -> None:
    """|difference| <= tol x max(norm of the tensor, 1e-6 x norm of all gradients)."""
    assert got.shape == want.shape, f"{name}: shape {tuple(got.shape)}, wanted {tuple(want.shape)}"
    difference = (whole(got).double() - want.detach().double()).norm().item()
    limit = tol * max(want.detach().double().norm().item(), 1e-6 * scale)
    assert difference <= limit, f"{name}: off by {difference:.3e}, allowed are {limit:.3e}"


def assert_same_training(compiled: nn.Module, reference: nn.Module, batches: list[tuple[Any, ...]],
                         loss_of: Callable[[nn.Module, tuple[Any, ...]], torch.Tensor],
                         reference_loss: Callable[[nn.Module, tuple[Any, ...]], torch.Tensor] | None = None,
                         tol: float = 1e-9, weights: bool = True, lr: float = 1e-3) -> None:
    """Losses of every step, gradients of every step (of the first when not `weights`), and weights at the end."""
    one, two = (torch.optim.AdamW(m.parameters(), lr=lr) for m in (compiled, reference))
    for step, batch in enumerate(batches):
        got, want = loss_of(compiled, batch), (reference_loss or loss_of)(reference, batch)
        assert_near(f"loss of step {step}", got, want, tol)
        got.backward()
        want.backward()
        if weights or step == 0:
            same_gradients(compiled, reference, tol, step)
        for optimizer in (one, two):
            optimizer.step()
            optimizer.zero_grad()
    if weights:
        expected = dict(reference.named_parameters())
        for name, p in compiled.named_parameters():
            assert_near(f"weight {name}", p, expected[name], tol)


def same_gradients(compiled: nn.Module, reference: nn.Module, tol: float, step: int = 0) -> None:
    expected = {n: p.grad for n, p in reference.named_parameters()}
    scale = torch.stack([g.double().norm() for g in expected.values() if g is not None]).norm().item()
    for name, p in compiled.named_parameters():
        assert (p.grad is None) == (expected[name] is None), f"gradient of {name}: {p.grad} against {expected[name]}"
        if p.grad is not None:
            assert_near(f"gradient of {name} in step {step}", p.grad, expected[name], tol, scale)


def twins(build: Callable[[], tuple[nn.Module, tuple[Any, ...]]], dtype: torch.dtype) -> tuple[nn.Module, nn.Module, tuple[Any, ...]]:
    """Two equal models and a batch, equal on all ranks."""
    torch.manual_seed(0)
    model, batch = build()
    model = model.to(dtype)
    batch = tuple(t.to(dtype) if isinstance(t, torch.Tensor) and t.is_floating_point() else t for t in batch)
    return model, copy.deepcopy(model), batch
