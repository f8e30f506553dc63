"""`autoshard clusters`."""
from __future__ import annotations

import json
import sys
from typing import Annotated, Any

import typer

from autoshard.cli.common import JsonOption, QuietOption

clusters_app = typer.Typer(invoke_without_command=True, rich_markup_mode="rich",
                           help="List the cluster profiles plans are priced with, or show one.",
                           epilog="[bold]Examples[/bold]\n\n  autoshard clusters\n\n  autoshard clusters show h100-dgx\n\n"
                                  "  autoshard clusters show h100-dgx --json | python -m json.tool")


@clusters_app.callback()
def clusters(context: typer.Context, as_json: JsonOption = False, quiet: QuietOption = False) -> None:
    """List the cluster profiles plans are priced with, or show one."""
    if context.invoked_subcommand is not None:
        return
    from autoshard.report.commands.clusters import listed, show_all

    if as_json:
        _write(listed())
    elif not quiet:
        show_all()


@clusters_app.command("show")
def clusters_show(
    context: typer.Context,
    name: Annotated[str, typer.Argument(help="A profile's name, or the path of a .toml file.")],
    as_json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Every number of a profile, with its source. Quiet: only say whether it can be read."""
    from autoshard.cost.cluster import load_cluster
    from autoshard.report.commands.clusters import show_one

    above, cluster = context.parent.params, load_cluster(name)
    if as_json or above["as_json"]:
        _write({**cluster.snapshot(), "sources": dict(cluster.sources)})
    elif not (quiet or above["quiet"]):
        show_one(name)


def _write(found: Any) -> None:
    sys.stdout.write(json.dumps(found, indent=1, sort_keys=True, allow_nan=False) + "\n")
