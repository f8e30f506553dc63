"""Options that several commands have."""
from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import typer

from autoshard.errors import UsageError

INTERRUPTED = 130
"""Exit code after Ctrl-C, as shells have it (128 + SIGINT): with the best plan so far, or with a sentence where there is none."""

JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON, and nothing else, to standard output.")]
QuietOption = Annotated[bool, typer.Option("--quiet", "-q", help="No progress and no report; files are written, and --json is printed.")]
OutputOption = Annotated[Path | None, typer.Option("--output", "-o", help="Save the result as JSON.")]
HtmlOption = Annotated[Path | None, typer.Option("--html", metavar="FILE", help="Write a report to open in a browser: one file, no network.")]


def refuse_stages(mesh: str, axis: str, command: str) -> None:
    """Raises UsageError for a mesh with a pipeline, in a command that is about one search."""
    from autoshard.base.mesh import parse_mesh

    found = parse_mesh(mesh)
    if axis in found.names and found.sizes[found.index(axis)] > 1:
        rest = ",".join(f"{name}={size}" for name, size in zip(found.names, found.sizes, strict=True) if name != axis)
        raise UsageError(f"{command} asks about one search, and the stages of a pipeline ({axis} in the mesh) are searched one by one; "
                         + (f"ask about the mesh of a stage, --mesh {rest}" if rest else f"leave {axis} out of the mesh"))


def end_with(statuses: Iterable[str], quiet: bool) -> None:
    """The exit code says whether Ctrl-C ended one of the searches, by the statuses of their plans."""
    from autoshard.base.plan import INTERRUPTED as BY_THE_USER

    if BY_THE_USER in statuses:
        if not quiet:
            typer.echo("interrupted: what is shown is about the best plan found so far", err=True)
        raise typer.Exit(INTERRUPTED)
