"""`autoshard sweep`."""
from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from autoshard.cli.common import JsonOption, QuietOption, end_with
from autoshard.cli.progress import progress_shown
from autoshard.cli.request import Request
from autoshard.errors import InfeasibleError, UsageError

if TYPE_CHECKING:
    from torch import nn

    from autoshard.study.sizing import Cases, Job

EXAMPLES = """
[bold]Examples[/bold]

  autoshard sweep llama:8b --devices 8,16,64 --batch 16,64 --seq 8192 --dtype bf16        a mesh is chosen for each

  autoshard sweep llama:1b --mesh dp=8 --mesh dp=4,tp=2 --batch 8,16,32 --dtype bf16      given meshes

  autoshard sweep llama:8b --devices 8 --batch 16 --cluster h100-dgx,a100-dgx,mine.toml --memory 40GiB,80GiB --dtype bf16

  autoshard sweep gpt:124m --mesh dp=4 --batch 16,32 --json | python -m json.tool

[bold]The table[/bold]

A row for every batch on every mesh, cluster and memory budget. step: predicted seconds of the cheapest plan; samples/s: rows of the batch over the
step; tokens/s: where the model reads whole numbers [rows, length]; a device: tokens, or samples, a second over devices; memory: of the fullest
rank; gap: by how much a plan could still be faster. * no other case of that cluster trains faster with at most as many devices.

A row without a plan says why below the table. `autoshard plan` with the mesh of a row shows and saves its plan.
"""
BatchOption = Annotated[str | None, typer.Option(metavar="N[,N...]", help="Global batch sizes.")]
DevicesOption = Annotated[str | None, typer.Option(metavar="N[,N...]", help="Numbers of devices; the mesh of each is chosen. Also with --mesh.")]
MeshesOption = Annotated[list[str] | None, typer.Option(help="A mesh, dp=2,tp=4. May be repeated.")]
ClustersOption = Annotated[str, typer.Option(metavar="NAME[,NAME...]", help="Cluster profiles: names of `autoshard clusters` or .toml files.")]
MemoriesOption = Annotated[str | None, typer.Option(metavar="SIZE[,SIZE...]", help="Memory a rank may use: 40GiB,80GiB. Default: what devices have.")]


def sweep(request: Request, batch: BatchOption = None, devices: DevicesOption = None, mesh: MeshesOption = None, cluster: ClustersOption = "h100-dgx",
          memory: MemoriesOption = None, as_json: JsonOption = False, quiet: QuietOption = False) -> None:
    """What MODEL would train in a second: the cheapest plan for several batches, numbers of devices, clusters and memory budgets, as one table."""
    from autoshard.study.sizing import sweep as plan_all

    batches = [None] if batch is None else _counts("--batch", batch)
    requests = [replace(request, devices=n) for n in _counts("--devices", devices)] if devices else []
    requests += [replace(request, mesh=text) for text in mesh or ()]
    if not requests:
        raise UsageError("give --devices 8,16 to have a mesh chosen for each, or --mesh dp=2,tp=4, once or more")
    cases = _cases(requests, _words("--cluster", cluster), memory)
    with progress_shown(not quiet) as progress:
        from autoshard.decide.phase_timer import PhaseTimer

        found = plan_all(_jobs([replace(requests[0], batch=size) for size in batches], progress), cases, PhaseTimer(progress))
    if as_json:
        sys.stdout.write(json.dumps(found.to_dict(), indent=1, sort_keys=True) + "\n")
    elif not quiet:
        from autoshard.report.commands.sizing import show

        show(found, request.what)
    if not found.planned:
        raise InfeasibleError("no case has a plan: " + found.points[0].why)
    end_with([p.plan.status for p in found.planned if p.plan is not None], quiet, found.interrupted)


def _cases(requests: list[Request], clusters: list[str], memory: str | None) -> Cases:
    """Raises UsageError, MeshError, ClusterError: before a model is loaded."""
    from autoshard.cost.optimizers import optimizer_row
    from autoshard.decide.options import parse_bytes
    from autoshard.study.sizing import Cases

    if not requests[0].inference:
        optimizer_row(requests[0].options.optimizer)
    for request in requests:
        request.options.check_microbatches(request.wanted, not request.inference)
    budgets = [parse_bytes(text) for text in _words("--memory", memory)] if memory else [None]
    for budget in budgets:
        replace(requests[0].options, memory_budget=budget)  # checks it
    return Cases([(r.wanted, r.options) for r in requests], clusters, budgets)


def _jobs(requests: list[Request], progress: Callable[[str, str], None]) -> list[Job]:
    """One per batch. Where all have one model, a batch between two others need not be traced."""
    from autoshard.pipeline.microbatches.batch import Batch
    from autoshard.study.sizing import Job

    jobs: list[Job] = []
    batches: list[Batch] = []
    for request in requests:
        spec, batch = request.loaded_batch(progress)
        if batches and _tensors(batch.model) == _tensors(batches[0].model):
            batch = Batch(batches[0].model, batch.args, batch.kwargs, batch.how, batches)
        batches.append(batch)
        jobs.append(Job(batch, spec.loss_fn is not None, {"reference": spec.reference, **spec.settings}))
    return jobs


def _tensors(model: nn.Module) -> list[object]:
    """What a model of this class is made of."""
    return [type(model), *((name, t.shape, t.dtype) for name, t in (*model.named_parameters(), *model.named_buffers()))]


def _words(option: str, text: str) -> list[str]:
    words = [word.strip() for word in text.split(",")]
    if not all(words) or len(set(words)) < len(words):
        raise UsageError(f"{option} {text!r}: write different values with commas between them")
    return words


def _counts(option: str, text: str) -> list[int]:
    words = _words(option, text)
    if not all(word.isdecimal() and int(word) for word in words):
        raise UsageError(f"{option} {text!r}: write positive whole numbers with commas between them: 8,16,64")
    return [int(word) for word in words]
