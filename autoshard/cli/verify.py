"""`autoshard verify`."""
from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer

from autoshard.cli.common import JsonOption, QuietOption
from autoshard.cli.progress import progress_shown
from autoshard.cli.request import Request
from autoshard.errors import PlanError, UsageError

MISMATCH = 1
EXAMPLES = """
[bold]Examples[/bold]

  autoshard verify gpt:tiny --mesh dp=2,tp=2

  autoshard verify gpt:tiny --mesh tp=4 --plan plan.json --batch 8 --seq 32       a plan of yours

  autoshard verify llama:8b --mesh dp=2,tp=4 --plans split,random:7 --steps 3     runs llama:tiny, and says so

  autoshard verify mypackage.model:factory --mesh tp=2 --processes

Exit code: 0 all numbers agree, 1 a mismatch, 2 nothing could be compared.
"""

PlanOption = Annotated[Path | None, typer.Option(help="Verify this plan, made for the same model, mesh, batch and seq.")]
PlansOption = Annotated[str | None, typer.Option(
    help="Kinds of plans to make and run, with commas: searched, split, data_parallel, fully_sharded, tensor_parallel, random:SEED.")]
StepsOption = Annotated[int, typer.Option(min=1, help="Training steps, each with an update by --optimizer.")]
ProcessesOption = Annotated[bool, typer.Option("--processes", help="Real gloo processes, instead of all ranks in this one.")]
ToleranceOption = Annotated[float | None, typer.Option(help="Largest error of a tensor, as a part of its norm.")]


def verify(request: Request, plan: PlanOption = None, plans: PlansOption = None, steps: StepsOption = 1,
           processes: ProcessesOption = False, tolerance: ToleranceOption = None, as_json: JsonOption = False,
           quiet: QuietOption = False) -> None:
    """Run plans of MODEL with real numbers and compare with the model on one device: outputs, loss, every gradient, buffers
    and updated weights. On a mismatch the first wrong op is named. A model too big for this machine is scaled down."""
    request.check()
    if plan is not None and plans is not None:
        raise UsageError("--plan and --plans were both given; give one of them")
    if request.offload != "none":
        raise UsageError("--offload: numbers are the same wherever state lies; leave it out, or give a plan that offloads with --plan, "
                         "and --processes")
    with progress_shown(not quiet) as progress, tempfile.TemporaryDirectory() as folder:
        report, ran_as = _verified(request, plan, plans, steps, processes, tolerance, folder, progress)
    if as_json:
        sys.stdout.write(json.dumps(report.as_data(), indent=1) + "\n")
    elif not quiet:
        from autoshard.report.commands.verify import show

        show(report, ran_as)
    if not report.ok:
        raise typer.Exit(MISMATCH)


def _verified(request: Request, path: Path | None, plans: str | None, steps: int, processes: bool, tolerance: float | None,
              folder: str, progress: Any) -> tuple[Any, str]:
    progress("load", request.what)
    from dataclasses import replace

    from autoshard.verification.check import DEFAULT_PLANS, verify
    from autoshard.verification.models.small import Source, fitting
    from autoshard.verification.plans import check_names
    from autoshard.verification.processes import Processes

    mesh, plan = request.given_mesh, None
    names = DEFAULT_PLANS if plans is None else check_names(p.strip() for p in plans.split(",") if p.strip())
    source = Source(request.model, None if request.hf is None else str(request.hf), request.batch, request.seq, request.dtype,
                    request.inference)
    if path is not None:
        plan, source = _given(path, source)
    source, notes = fitting(source, mesh.size, folder, whole=plan is not None)
    spec = source.load()
    options = request.options.filled(plan, "precision", "expert_capacity", "pad", "pipeline")
    elsewhere = Processes(source, mesh, options) if processes else None
    report = verify(spec.model, mesh, spec.example_inputs, spec.example_kwargs, loss_fn=spec.loss_fn, plan=plan, plans=names,
                    steps=steps, training=not request.inference, optimizer=request.optimizer, tolerance=tolerance,
                    memory_budget=options.memory_budget, inputs=request.inputs, outputs=request.outputs,
                    fallback=options.fallback, expert_capacity=options.expert_capacity, pad=options.pad, seeds=options.seeds,
                    refine_axes=options.refine_axes, cluster=options.cluster, time_limit=options.time_limit, search=options.search,
                    precision=options.precision, pipeline=options.pipeline, elsewhere=elsewhere, progress=progress)
    where = f"as {mesh.size} gloo processes" if processes else f"all {mesh.size} ranks in one process"
    return replace(report, notes=(*report.notes, *notes)), where


def _given(path: Path, source: Any) -> tuple[Any, Any]:
    """The plan, and the model as it was planned where the user does not say otherwise."""
    from dataclasses import replace

    from autoshard.base.plan import Plan

    plan = Plan.load(path)
    known = {k: plan.model.get(k) for k in ("batch", "seq", "dtype") if getattr(source, k) is None}
    for name, value in known.items():
        if not isinstance(value, (type(None), str if name == "dtype" else int)):
            raise PlanError(f"{path} says {name} {value!r:.60}, which is none; plan the model again")
    return plan, replace(source, **known)
