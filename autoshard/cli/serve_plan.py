"""`autoshard serve-plan`."""
from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from autoshard.cli.common import INTERRUPTED, ClusterOption, HtmlOption, JsonOption, MemoryOption, QuietOption, end_with
from autoshard.cli.progress import progress_shown
from autoshard.cli.read import parse_seeds
from autoshard.errors import AutoshardError

if TYPE_CHECKING:
    from autoshard.serve.sweep import Point, Serving
    from autoshard.serve.workload import Slo

EXAMPLES = """
[bold]Examples[/bold]

  autoshard serve-plan llama:8b --mesh tp=8 --prompt 1024 --new 512 --context 4096 --dtype bf16

  autoshard serve-plan llama:8b --mesh dp=2,tp=4 --batches 1,16,64,256 --dtype bf16 --slo tpot=20ms,ttft=500ms

  autoshard serve-plan --hf config.json --mesh tp=4 --batches 8 --json

  autoshard serve-plan llama:8b --mesh tp=8 --batches 64 --dtype bf16 --save-dir plans      prompt and token as plan files

  autoshard serve-plan llama:1b --mesh tp=8 --prompt 1024 --new 512 --dtype bf16 --html serving.html      table, figures and the plan in a browser

  autoshard serve-plan package.module:factory --mesh tp=2      factory(batch=, context=) returns (model with caches as buffers, inputs)
"""

ModelArgument = Annotated[str | None, typer.Argument(help="name:size from models/ (llama:8b), or package.module:factory; left out with --hf.")]
MeshOption = Annotated[str, typer.Option(help="Mesh axes with sizes, major first: tp=8; dp=2,tp=4.")]
PromptOption = Annotated[int, typer.Option(help="Tokens of a prompt.")]
NewOption = Annotated[int, typer.Option(help="New tokens of a request.")]
ContextOption = Annotated[int | None, typer.Option(help="Tokens that the caches hold. Default: prompt and new tokens.")]
BatchesOption = Annotated[str, typer.Option(help="Numbers of sequences to plan for.")]
SloOption = Annotated[str | None, typer.Option(help="Service level: tpot=20ms (time per output token), ttft=500ms (time to the first token), or "
                                                    "both. The batch with the most tokens per second that meets it is picked.")]
SaveOption = Annotated[Path | None, typer.Option(metavar="FOLDER", help="Save the plans of the picked batch: prompt.json and token.json.")]


def serve_plan(
    mesh: MeshOption, model: ModelArgument = None, prompt: PromptOption = 1024, new: NewOption = 512, context: ContextOption = None,
    batches: BatchesOption = "1,4,16,64,256", slo: SloOption = None,
    cluster: ClusterOption = "h100-dgx",
    memory: MemoryOption = None,
    dtype: Annotated[str | None, typer.Option(help="Cast the model: bf16, fp16, fp32 or fp64.")] = None,
    hf: Annotated[Path | None, typer.Option(help="A Hugging Face config JSON instead of MODEL (needs autoshard\\[hf]).")] = None,
    seed: Annotated[list[str] | None, typer.Option(help="Fix a sharding, as in `autoshard plan`; caches too: 'keys_*=-,tp,-,-'.")] = None,
    time_limit: Annotated[float, typer.Option(help="Seconds of wall clock for each search; there are two to five per batch.")] = 60.0,
    save_dir: SaveOption = None, html: HtmlOption = None, as_json: JsonOption = False, quiet: QuietOption = False,
) -> None:
    """Latency and throughput of a decoder on a mesh: for every batch, the prompt and the single token are planned together over one layout of
    weights and caches, and the plan says when the first token comes, how long a token takes, and how many a second there are."""
    from autoshard.serve.workload import Slo

    levels = Slo.parse(slo) if slo else Slo()
    _check_paths(save_dir, html, (hf, cluster))
    given = {"cluster": cluster, "memory_budget": memory, "time_limit": time_limit}
    try:
        found = _swept(model, hf, dtype, mesh, (prompt, new, context), batches, given, seed or [], quiet)
    except KeyboardInterrupt as stopped:  # also `Interrupted`, which says more
        typer.echo(f"{stopped}" or "interrupted; there is no result yet", err=True)
        raise typer.Exit(INTERRUPTED) from None
    picked, problem = _pick(found, levels)
    if picked is not None and picked.phases is not None and save_dir is not None:
        picked.phases.prompt.save(save_dir / "prompt.json")
        picked.phases.token.save(save_dir / "token.json")
    if html is not None and found.planned:
        _write_page(html, found, picked, quiet)
    if as_json:
        sys.stdout.write(json.dumps({**found.to_dict(), "picked": picked and picked.batch}, indent=1, sort_keys=True) + "\n")
    elif not quiet:
        from autoshard.report.serving import show

        show(found, picked)
    if problem is not None:
        raise problem
    end_with([plan.status for p in found.planned if p.phases for plan in (p.phases.prompt, p.phases.token)], quiet)


def _check_paths(folder: Path | None, html: Path | None, read: Iterable[str | Path | None]) -> None:
    """Before the work. Raises UsageError."""
    from autoshard.base.files import check_folder, check_outputs

    if folder is not None:
        check_folder(folder)
    check_outputs({"--html": html}, read)


def _write_page(path: Path, found: Serving, picked: Point | None, quiet: bool) -> None:
    """The sweep, and the plan of a single token of the picked batch."""
    from autoshard.report.page.html import write
    from autoshard.report.serving import for_page, shown_point

    point = shown_point(found, picked)
    if point.phases is not None:
        write(path, point.phases.token, serving=for_page(found, point))
        if not quiet:
            typer.echo(f"Report saved to {path}; open it in a browser", err=True)


def _swept(model: str | None, hf: Path | None, dtype: str | None, mesh: str, tokens: tuple[int, int, int | None], batches: str,
           given: dict[str, Any], seed: list[str], quiet: bool) -> Serving:
    """Arguments are read before the work."""
    from autoshard.base.mesh import mesh_of
    from autoshard.cost.cluster import load_cluster
    from autoshard.decide.options import Options
    from autoshard.decide.phase_timer import PhaseTimer
    from autoshard.serve.load import load_decoders
    from autoshard.serve.sweep import sweep
    from autoshard.serve.workload import Workload, parse_batches

    prompt, new, context = tokens
    workload = Workload(prompt, new, prompt + new if context is None else context)
    options, on, counts = Options.of(given, seeds=parse_seeds(seed), optimizer="none"), mesh_of(mesh), parse_batches(batches)
    load_cluster(options.cluster).links_for(on)  # a mesh that it cannot have
    with progress_shown(not quiet) as progress:
        progress("load", model or str(hf or ""))
        make, name = load_decoders(model, hf=hf, dtype=dtype)
        return sweep(make, on, options, workload, counts, model=name, clock=PhaseTimer(progress))


def _pick(found: Serving, levels: Slo) -> tuple[Point | None, AutoshardError | None]:
    """The batch that meets the levels, or what to say where none does, below the table."""
    try:
        return found.pick(levels), None
    except AutoshardError as e:
        return None, e
