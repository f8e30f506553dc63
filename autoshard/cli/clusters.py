"""`autoshard clusters`."""
from __future__ import annotations

from typing import Annotated

import typer

clusters_app = typer.Typer(invoke_without_command=True, rich_markup_mode="rich",
                           help="List the cluster profiles plans are priced with, or show one.",
                           epilog="[bold]Examples[/bold]\n\n  autoshard clusters\n\n  autoshard clusters show h100-dgx")


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
