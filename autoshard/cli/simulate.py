"""`autoshard simulate`."""
from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from autoshard.cli.common import JsonOption, QuietOption
from autoshard.cli.progress import progress_shown
from autoshard.cli.read import parse_amounts

EXAMPLES = """
[bold]Examples[/bold]

  autoshard plan gpt:124m --mesh dp=4,tp=2 --batch 32 -o plan.json

  autoshard simulate plan.json                                     who waits for whom, what is exposed, the critical path

  autoshard simulate plan.json --trace t.json                      open t.json in https://ui.perfetto.dev

  autoshard simulate plan.json --html step.html                    streams of the ranks and links over time, in a page

  autoshard simulate plan.json --slow-rank 5=1.3 --jitter 0.05     rank 5 takes 1.3 times as long, all vary by 5 %

  autoshard simulate plan.json --mesh dp=64,tp=2 --batch 512       the same placements on 16 times as many ranks, no search

  autoshard simulate plan.json --cluster a100-dgx                  the same plan on another machine

  autoshard simulate plan.json --slow-link nvlink=0.5              half the bandwidth; --slow-link infiniband@3=0.5: of node 3 only
"""

PlanArgument = Annotated[Path, typer.Argument(metavar="PLAN", help="A plan file: `autoshard plan ... -o plan.json`.")]
TraceOption = Annotated[Path | None, typer.Option(
    metavar="FILE", help="Write a Chrome trace: t.json, or t.json.gz. Ranks that do the same at the same times are shown once.")]
HtmlOption = Annotated[Path | None, typer.Option(
    metavar="FILE", help="Write the plan's report with the simulated step as one HTML page: streams of the ranks, links over time, tables.")]
RankOption = Annotated[list[int] | None, typer.Option("--rank", help="Rank to show in the trace. May be repeated; default: one of each class.")]
SlowRankOption = Annotated[list[str] | None, typer.Option(
    metavar="RANK=FACTOR", help="A rank whose work takes FACTOR times as long: 5=1.3. May be repeated.")]
SlowLinkOption = Annotated[list[str] | None, typer.Option(
    metavar="LINK=SHARE", help="A level of links with SHARE of its bandwidth: nvlink=0.5, or infiniband@3=0.5 for the ranks of node 3. May be "
                               "repeated; `autoshard clusters show NAME` lists the links.")]
ExpertLoadOption = Annotated[list[str] | None, typer.Option(
    metavar="RANK=LOAD", help="A rank to whose experts LOAD times the rows of an even load come: 3=1.5. The rest of its group shares what is left. "
                              "May be repeated.")]
JitterOption = Annotated[float, typer.Option(
    help="Relative standard deviation of work, per rank and stretch between two collectives: 0.05 for 5 %.")]
VariedOption = Annotated[float, typer.Option(
    help="Relative standard deviation of what devices take for the same work, drawn once per rank: 0.016 for 1.6 %, as measured on V100.")]
SeedOption = Annotated[int, typer.Option(min=0, help="Of --jitter and --varied: the same seed, the same numbers.")]
ExecutedOption = Annotated[bool, typer.Option(
    "--executed", help="Reductions of small gradients share calls, as it runs. Default: each by itself, as the objective prices it.")]


SharedOption = Annotated[bool, typer.Option(
    "--shared-links", help="Collectives that run at the same time share the links they use. Default: each has all of them.")]
ClusterOption = Annotated[str | None, typer.Option(
    help="At the prices of another machine: a built-in profile or a TOML file. Default: the one that the plan was made for.")]
MeshOption = Annotated[str | None, typer.Option(
    help="The plan's placements on a mesh of other sizes: dp=128,tp=8 for a plan of dp=8,tp=8. Nothing is searched.")]
BatchOption = Annotated[int | None, typer.Option(help="With another global batch; usually beside --mesh.")]


def simulate(plan: PlanArgument, mesh: MeshOption = None, batch: BatchOption = None, trace: TraceOption = None, html: HtmlOption = None,
             rank: RankOption = None, slow_rank: SlowRankOption = None, slow_link: SlowLinkOption = None, shared_links: SharedOption = False,
             expert_load: ExpertLoadOption = None, cluster: ClusterOption = None, jitter: JitterOption = 0.0, varied: VariedOption = 0.0,
             seed: SeedOption = 0, executed: ExecutedOption = False, as_json: JsonOption = False, quiet: QuietOption = False) -> None:
    """Play the step of a PLAN event by event on all its ranks: idle time by cause, the critical path, bytes and utilisation of the
    links, sizes of transfers, MFU. The model is loaded and traced again, on no device; nothing is searched and no rank is started."""
    from autoshard.base.files import check_outputs

    check_outputs({"--trace": trace, "--html": html}, [plan, cluster])
    slow_ranks = {int(name): value for name, value in parse_amounts("--slow-rank", slow_rank or [], "5=1.3", whole=True).items()}
    loads = {int(name): value for name, value in parse_amounts("--expert-load", expert_load or [], "3=1.5", whole=True).items()}
    slow_links = parse_amounts("--slow-link", slow_link or [], "nvlink=0.5")
    with progress_shown(not quiet) as progress:
        progress("simulate", str(plan))
        from autoshard.simulation.simulate import simulate as run

        found = run(plan, mesh=mesh, batch=batch, cluster=cluster, ranks=rank or (), slow_ranks=slow_ranks, slow_links=slow_links,
                    shared_links=shared_links, expert_load=loads, jitter=jitter, varied=varied, seed=seed, executed=executed)
    if trace is not None:
        found.write_trace(trace)
    if html is not None:
        from autoshard.report.page.html import write

        write(html, found.plan, simulated=found)
        if not (as_json or quiet):
            typer.echo(f"Report saved to {html}; open it in a browser", err=True)
    if as_json:
        sys.stdout.write(json.dumps(found.to_dict(), indent=1, sort_keys=True) + "\n")
    elif not quiet:
        from autoshard.report.simulation import show

        show(found)

