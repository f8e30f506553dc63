"""Options that several commands have."""
from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import typer

INTERRUPTED = 130
"""Exit code after Ctrl-C, as shells have it (128 + SIGINT): with the best plan so far, or with a sentence where there is none."""

JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON, and nothing else, to standard output.")]
QuietOption = Annotated[bool, typer.Option("--quiet", "-q", help="No progress and no report; files are written, and --json is printed.")]
QuietAloneOption = Annotated[bool, typer.Option("--quiet", "-q", help="No progress and no report; errors and files are written.")]
"""Of commands that have no --json."""
OutputOption = Annotated[Path | None, typer.Option("--output", "-o", help="Save the result as JSON.")]
HtmlOption = Annotated[Path | None, typer.Option("--html", metavar="FILE", help="Write a report to open in a browser: one file, no network.")]
ClusterOption = Annotated[str, typer.Option(help="Cluster profile: a name of `autoshard clusters` or a .toml file; :VARIANT behind it.")]
MemoryOption = Annotated[str | None, typer.Option(help="Memory a rank may use: 70GiB, 80e9. Default: what the device has.")]


def end_with(statuses: Iterable[str], quiet: bool, cut: bool = False) -> None:
    """The exit code says whether Ctrl-C ended one of the searches, by the statuses of their plans, or what has several of them (`cut`)."""
    from autoshard.base.plan import INTERRUPTED as BY_THE_USER

    if BY_THE_USER in statuses or cut:
        if not quiet:
            typer.echo("interrupted: what is shown is " + ("what was planned by then" if cut else "about the best plan found so far"), err=True)
        raise typer.Exit(INTERRUPTED)
