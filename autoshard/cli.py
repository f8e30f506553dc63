"""The command line: one short function per command. torch is imported only by commands that need it."""
from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Optional

import typer

from autoshard.errors import AutoshardError, UsageError

USER_ERROR = 2
EXAMPLES = """
[bold]Examples[/bold]

  autoshard plan gpt:tiny --mesh tp=2 --cluster cpu-gloo

  autoshard plan llama:8b --mesh dp=2,tp=4 --batch 8 --seq 4096 --dtype bf16 -o plan.json

  autoshard report plan.json
"""
PLAN_EXAMPLES = """
[bold]Examples[/bold]

  autoshard plan gpt:tiny --mesh tp=2 --cluster cpu-gloo

  autoshard plan llama:8b --mesh dp=2,tp=4 --batch 8 --seq 4096 --dtype bf16 --memory 70GiB -o plan.json

  autoshard plan mypackage.model:factory --mesh dp=8        factory() returns (model, example_inputs)

  autoshard plan --hf config.json --mesh dp=4 --inference   a Hugging Face config

  autoshard plan gpt:124m --mesh dp=2,tp=2 --seed 'h.*.attn.c_attn.weight=tp,-' --seed 'input:0=dp,?'

  autoshard plan llama:tiny --mesh tp=2 --json | python -m json.tool
"""

SOLVE_EXAMPLES = """
[bold]Examples[/bold]

  autoshard solve problem.json.gz --time-limit 30 -o answer.json

  autoshard solve problem.json --json
"""
STARTED = time.monotonic()  # so that a time limit counts the imports too

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False,
                  rich_markup_mode="rich", epilog=EXAMPLES,
                  help="Find how to shard a PyTorch model over a device mesh: no GPU, no process group, no weights.")
clusters_app = typer.Typer(invoke_without_command=True, rich_markup_mode="rich",
                           help="List the cluster profiles plans are priced with, or show one.",
                           epilog="[bold]Examples[/bold]\n\n  autoshard clusters\n\n  autoshard clusters show h100-dgx")
app.add_typer(clusters_app, name="clusters")

JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON, and nothing else, to standard output.")]


@app.command(epilog=PLAN_EXAMPLES)
def plan(
    mesh: Annotated[str, typer.Option(help="Mesh axes with sizes, major first: dp=2,tp=4.")],
    model: Annotated[Optional[str], typer.Argument(
        help="name:size from models/ (llama:8b), or package.module:factory; left out with --hf.")] = None,
    cluster: Annotated[str, typer.Option(help="Cluster profile: a name of `autoshard clusters` or a .toml file.")] = "h100-dgx",
    memory: Annotated[Optional[str], typer.Option(help="Memory a rank may use: 70GiB, 80e9. Default: what the device has.")] = None,
    batch: Annotated[Optional[int], typer.Option(help="Global batch size of the example inputs.")] = None,
    seq: Annotated[Optional[int], typer.Option(help="Sequence length of the example inputs.")] = None,
    dtype: Annotated[Optional[str], typer.Option(help="Cast the model: bf16, fp16, fp32 or fp64.")] = None,
    optimizer: Annotated[str, typer.Option(help="adamw, adam, sgd, momentum or none: its state and update are priced.")] = "adamw",
    precision: Annotated[Optional[str], typer.Option(
        help="Mixed precision: bf16 (weights and gradients in fp32), or param=bf16,master=fp32,reduce=fp32.")] = None,
    hf: Annotated[Optional[Path], typer.Option(help="A Hugging Face config JSON instead of MODEL (needs autoshard\\[hf]).")] = None,
    inference: Annotated[bool, typer.Option("--inference", help="Forward pass only.")] = False,
    seed: Annotated[Optional[list[str]], typer.Option(
        help="Fix a sharding: 'GLOB=AXIS,...', per tensor dim an axis, - for whole, ? for open. May be repeated.")] = None,
    time_limit: Annotated[float, typer.Option(help="Seconds the search may take; the best plan so far is returned.")] = 60.0,
    search: Annotated[str, typer.Option(help="Search backend; auto picks one.")] = "auto",
    output: Annotated[Optional[Path], typer.Option("--output", "-o", help="Save the plan as JSON.")] = None,
    as_json: JsonOption = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress and no report.")] = False,
) -> None:
    """Search the cheapest plan for MODEL on a mesh, and print what was chosen and why it costs what it costs."""
    from autoshard.plan import check_writable

    if output is not None:
        check_writable(output)
    settings = {"cluster": cluster, "memory_budget": memory, "optimizer": optimizer, "seeds": parse_seeds(seed or []),
                "precision": parse_precision(precision), "time_limit": time_limit, "search": search}
    with progress_shown(not quiet) as progress:
        progress("load", model or str(hf or ""))
        found = _plan(model, {"batch": batch, "seq": seq, "dtype": dtype, "hf": hf}, mesh, inference, settings, progress)
    if output is not None:
        found.save(output)
    if as_json or not quiet:
        _print_plan(found, as_json)
    if output is not None and not (as_json or quiet):
        typer.echo(f"Plan saved to {output}; show it again with: autoshard report {output}", err=True)


@app.command()
def report(
    path: Annotated[Path, typer.Argument(metavar="PLAN", help="A plan file, as `autoshard plan -o` writes it.")],
    as_json: JsonOption = False,
) -> None:
    """Show a saved plan again."""
    from autoshard.plan import Plan

    _print_plan(Plan.load(path), as_json)


@app.command(epilog=SOLVE_EXAMPLES)
def solve(
    problem: Annotated[Path, typer.Argument(help="A contest problem: .json or .json.gz.")],
    time_limit: Annotated[float, typer.Option(help="Seconds, reading and writing included.")] = 60.0,
    threads: Annotated[int, typer.Option(help="Threads the search may use.")] = 2,
    seed: Annotated[int, typer.Option(help="Seed of the randomised searches.")] = 0,
    output: Annotated[Optional[Path], typer.Option("--output", "-o", help="Save the answer as JSON.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Solve a bare search problem (format of the ASPLOS 2025 contest on intra-operator parallelism); Ctrl-C keeps the best so far."""
    from autoshard.search.command import solve_command

    raise typer.Exit(solve_command(str(problem), time_limit, threads, seed, None if output is None else str(output),
                                   as_json, start=STARTED))


@clusters_app.callback()
def clusters(context: typer.Context) -> None:
    """List the cluster profiles plans are priced with, or show one."""
    if context.invoked_subcommand is None:
        from autoshard.report.clusters import show_all

        show_all()


@clusters_app.command("show")
def clusters_show(
    name: Annotated[str, typer.Argument(help="A profile's name, or the path of a .toml file.")],
) -> None:
    """Every number of a profile, with its source."""
    from autoshard.report.clusters import show_one

    show_one(name)


def _plan(model: str | None, model_options: dict[str, Any], mesh: str, inference: bool,
          settings: dict[str, Any], progress: Any) -> Any:
    """Load the model on the meta device and plan it."""
    from autoshard.cost.cluster import load_cluster
    from autoshard.mesh import parse_mesh
    from autoshard.options import parse_bytes

    load_cluster(settings["cluster"]).links_for(parse_mesh(mesh))  # what a typo costs should not be a model
    parse_bytes(settings["memory_budget"])
    from autoshard import api
    from autoshard.model_ref import load_model

    spec = load_model(model, **model_options)
    if inference:
        spec = spec.for_inference
        spec.model.eval()
    info = {"reference": spec.reference, **spec.settings}
    return api.plan(spec.model, mesh, spec.example_inputs, spec.example_kwargs, loss_fn=spec.loss_fn,
                    training=not inference, progress=progress, model_info=info, **settings)


def _print_plan(plan: Any, as_json: bool) -> None:
    if as_json:
        from autoshard.report.what import to_json

        sys.stdout.write(to_json(plan))
        return
    from autoshard.report.text import show

    show(plan)


def parse_seeds(texts: list[str]) -> dict[str, tuple[Any, ...]]:
    """`["wq.weight=tp,-", "x=dp*tp,?"]` -> `{"wq.weight": ("tp", None), "x": (("dp", "tp"), "?")}`. Raises UsageError."""
    seeds: dict[str, tuple[Any, ...]] = {}
    for text in texts:
        key, _, dims = text.rpartition("=")
        if not key or not dims:
            raise UsageError(f"cannot read seed {text!r}; write for example 'layers.*.wq.weight=tp,-'")
        if key in seeds:
            raise UsageError(f"seed {key!r} is given twice; keep one of them")
        seeds[key] = tuple(_seed_dim(d.strip()) for d in dims.strip("[]").split(","))
    return seeds


def _seed_dim(text: str) -> Any:
    if text in ("-", ""):
        return None
    return tuple(text.strip("()").split("*")) if "*" in text else text


def parse_precision(text: str | None) -> Any:
    """`"bf16"` or `"param=bf16,master=fp32,reduce=fp32"` -> Precision. Raises UsageError."""
    if text is None:
        return None
    from autoshard.precision import Precision

    pairs = [part.partition("=") for part in text.split(",")] if "=" in text else [("param", "=", text)]
    roles = {role.strip(): name.strip() for role, _, name in pairs}
    unknown = sorted(set(roles) - {"param", "master", "reduce"})
    if unknown:
        raise UsageError(f"precision has no part {unknown[0]!r}; write for example param=bf16,master=fp32,reduce=fp32")
    return Precision(**roles)


@contextmanager
def progress_shown(on: bool) -> Iterator[Any]:
    """A callable (phase, detail) that says on standard error where the work is: one live line in a
    terminal, a line per phase in a log."""
    from rich.console import Console
    from rich.markup import escape

    console = Console(stderr=True)
    if not on:
        yield lambda phase, detail: None
    elif console.is_terminal:
        with console.status("starting") as status:
            yield lambda phase, detail: status.update(f"{phase}  [dim]{escape(detail)}[/dim]")
    else:
        yield _PhaseLog()


class _PhaseLog:
    """Writes each phase once, when it begins."""

    def __init__(self) -> None:
        self._last = ""

    def __call__(self, phase: str, detail: str) -> None:
        if phase != self._last:
            typer.echo(f"{phase} {detail}".rstrip() + " ...", err=True)
            self._last = phase


def main() -> None:
    """Entry point: a user's mistake is one message on standard error and exit code 2, never a traceback."""
    try:
        app()
    except AutoshardError as error:
        _fail(str(error))
    except ModuleNotFoundError as error:
        if (error.name or "autoshard").startswith("autoshard"):
            raise
        _fail(f"the package {error.name!r} is missing; install what autoshard needs with: pip install autoshard")


def _fail(message: str) -> None:
    typer.echo(f"error: {message}", err=True)
    raise SystemExit(USER_ERROR)
