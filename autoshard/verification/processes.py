"""Run a plan as users do: real gloo processes, a compiled module, autograd and torch's optimizer on DTensors."""
from __future__ import annotations

import logging
import multiprocessing
import os
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from autoshard import errors
from autoshard._torch import pytree
from autoshard.base.mesh import Mesh
from autoshard.base.plan import Plan
from autoshard.decide.options import Options
from autoshard.errors import AutoshardError
from autoshard.runtime.params.update import local_update
from autoshard.verification.models.copies import cast, default_dtype, own_copy
from autoshard.verification.models.small import Source
from autoshard.verification.one_process.pieces import Joined
from autoshard.verification.one_process.program import Outcome
from autoshard.verification.optimizers import optimizer_of
from autoshard.verification.run import SEED, Ran


@dataclass(frozen=True)
class Processes:
    """One process per rank, started anew for every plan. `timeout`: seconds a plan may take."""

    source: Source
    mesh: Mesh
    options: Options
    timeout: float = 600.0
    threads: int = field(default_factory=lambda: max(1, torch.get_num_threads() // 2))

    def __call__(self, plan: Plan, dtype: torch.dtype, steps: int, training: bool) -> Ran:
        """Raises AutoshardError with the first rank's error, or when time is up."""
        with tempfile.TemporaryDirectory(prefix="autoshard-verify-") as folder:
            plan.save(Path(folder, "plan.json"))
            task = _Task(self, folder, str(dtype).removeprefix("torch."), steps, training)
            context = multiprocessing.get_context("spawn")
            ranks = [context.Process(target=_rank, args=(task, r), daemon=True) for r in range(self.mesh.size)]
            for p in ranks:
                p.start()
            try:
                self._wait(ranks, folder)
            finally:
                for p in ranks:
                    if p.is_alive():
                        p.kill()
                    p.join()
            return _ran(torch.load(Path(folder, "results.pt"), weights_only=True))

    def _wait(self, ranks: list[Any], folder: str) -> None:
        deadline = time.monotonic() + self.timeout
        while any(p.is_alive() for p in ranks):
            if any(p.exitcode not in (None, 0) for p in ranks) or time.monotonic() > deadline:
                time.sleep(0.5)  # the others may be about to say why
                break
            time.sleep(0.02)
        for rank, _p in enumerate(ranks):
            said = Path(folder, f"error{rank}")
            if said.exists():
                name, _, message = said.read_text().partition(" ")
                raise getattr(errors, name, AutoshardError)(f"rank {rank}: {message}")
        failed = [r for r, p in enumerate(ranks) if p.exitcode not in (None, 0)]
        if failed:
            raise AutoshardError(f"the process of rank {failed[0]} ended with exit code {ranks[failed[0]].exitcode} and no message")
        if any(p.is_alive() for p in ranks):
            raise AutoshardError(f"the ranks were not done after {self.timeout:.0f} s; try a smaller model, or without --processes")


@dataclass(frozen=True)
class _Task:
    """What every rank gets."""

    on: Processes
    folder: str
    dtype: str
    steps: int
    training: bool


def _rank(task: _Task, rank: int) -> None:
    torch.set_num_threads(task.on.threads)
    logging.getLogger("torch.distributed.tensor").setLevel(logging.ERROR)  # gathering results is not meant to be fast
    os.environ.pop("RANK", None)
    try:
        dist.init_process_group("gloo", init_method=f"file://{task.folder}/store", rank=rank, world_size=task.on.mesh.size)
        results = _train(task)
        if rank == 0:
            torch.save(results, Path(task.folder, "results.pt"))
        dist.barrier()
        dist.destroy_process_group()
    except BaseException as e:
        name = type(e).__name__
        known = isinstance(e, AutoshardError)
        Path(task.folder, f"error{rank}").write_text(f"{name} {e}" if known else f"AutoshardError {name}: {e}")
        os._exit(1)


def _train(task: _Task) -> dict[str, Any]:
    """Results of every step as whole tensors; gathering them takes all ranks."""
    from autoshard import api

    dtype, options = getattr(torch, task.dtype), task.on.options
    spec = task.on.source.load()
    model, (args, kwargs) = own_copy(spec.model, dtype), cast((spec.example_inputs, dict(spec.example_kwargs)), dtype)
    if options.passing.inputs == "local":
        args, kwargs = pytree.tree_map(lambda t: _own_piece(t, task.on.mesh), (args, kwargs))
    torch.manual_seed(SEED)
    with default_dtype(dtype), torch.set_grad_enabled(task.training):
        compiled = api.compile(model, str(task.on.mesh), args, kwargs, loss_fn=spec.loss_fn, training=task.training,
                               plan=Path(task.folder, "plan.json"), cache=False, inputs=options.passing.inputs, outputs=options.passing.outputs,
                               fallback=options.fallback, expert_capacity=options.expert_capacity, pad=options.pad, precision=options.precision,
                               pipeline=options.pipeline)
        constants = set(range(compiled._latest[1].n_users)) - {op.target for op in compiled._latest[1].graph.of_kind("tangent")}
        steps, optimizer = [], None
        for _ in range(task.steps):
            users = [t for t in pytree.tree_leaves(compiled(*args, **kwargs)) if isinstance(t, torch.Tensor)]
            if task.training:
                wanted = [i for i in range(len(users)) if i not in constants]
                torch.autograd.backward([users[i] for i in wanted], [torch.ones_like(users[i]) for i in wanted])
                optimizer = optimizer or _optimizer(task, compiled) if any(p.requires_grad for p in compiled.parameters()) else None
            steps.append(_results(compiled, users, compiled._binding.flatten(args, kwargs)[0]))
            if optimizer is not None:
                optimizer.step()
                optimizer.zero_grad()
    return {"steps": steps, "weights": {n: _whole(p) for n, p in compiled.named_parameters()} if task.training else {}}


def _optimizer(task: _Task, compiled: Any) -> torch.optim.Optimizer:
    made = optimizer_of(task.on.options.optimizer)([p for p in compiled.parameters() if p.requires_grad])
    return local_update(made) if compiled.plan.offload else made


def _own_piece(t: Any, mesh: Mesh) -> Any:
    """This rank's piece of dim 0 over the first mesh axis."""
    if not isinstance(t, torch.Tensor) or not t.ndim:
        return t
    return t.detach().chunk(mesh.sizes[0])[mesh.coordinates(dist.get_rank())[0]].clone().requires_grad_(t.requires_grad)


def _results(compiled: Any, users: list[torch.Tensor], inputs: list[Any]) -> dict[str, Any]:
    grads = {n: _whole(p.grad) for n, p in compiled.named_parameters() if p.grad is not None}
    tensors = [t for t in inputs if isinstance(t, torch.Tensor)]
    for i, t in enumerate(tensors):
        if t.grad is not None:
            grads[f"input:{i}"], t.grad = _whole(t.grad), None
    changed = compiled._latest[1].mutated
    buffers = {n: _whole(b) for n, b in (*compiled.named_buffers(), *compiled.named_parameters()) if n in changed}
    return {"users": [_whole(u) for u in users], "grads": grads, "buffers": buffers}


def _whole(t: torch.Tensor) -> torch.Tensor:
    t = t.detach()
    return (t.full_tensor() if hasattr(t, "full_tensor") else t).clone()


def _ran(results: dict[str, Any]) -> Ran:
    def equal(tensors: dict[str, torch.Tensor]) -> dict[str, Joined]:
        return {n: Joined(t, 0.0) for n, t in tensors.items()}

    steps = tuple(Outcome(tuple(Joined(u, 0.0) for u in s["users"]), equal(s["grads"]), equal(s["buffers"]))
                  for s in results["steps"])
    return Ran(steps, equal(results["weights"]))
