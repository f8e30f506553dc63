"""`autoshard clusters`."""
from __future__ import annotations

from typing import Annotated

import typer

from autoshard.cli.common import QuietAloneOption

clusters_app = typer.Typer(invoke_without_command=True, rich_markup_mode="rich",
                           help="List the cluster profiles plans are priced with, or show one.",
                           epilog="[bold]Examples[/bold]\n\n  autoshard clusters\n\n  autoshard clusters show h100-dgx")


@clusters_app.callback()
def clusters(context: typer.Context, quiet: QuietAloneOption = False) -> None:
    """List the cluster profiles plans are priced with, or show one."""
    if context.invoked_subcommand is None and not quiet:
        from autoshard.report.clusters import show_all

        show_all()


@clusters_app.command("show")
def clusters_show(
    context: typer.Context,
    name: Annotated[str, typer.Argument(help="A profile's name, or the path of a .toml file.")],
    quiet: QuietAloneOption = False,
) -> None:
    """Every number of a profile, with its source. Quiet: only say whether it can be read."""
    from autoshard.cost.cluster import load_cluster
    from autoshard.report.clusters import show_one

    if quiet or context.parent.params["quiet"]:
        load_cluster(name)
    else:
        show_one(name)
