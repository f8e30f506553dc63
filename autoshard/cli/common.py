"""Options that several commands have."""
from __future__ import annotations

from pathlib import Path
from typing import Annotated, Optional

import typer

JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON, and nothing else, to standard output.")]
QuietOption = Annotated[bool, typer.Option("--quiet", "-q", help="No progress and no report; files are written, and --json is printed.")]
OutputOption = Annotated[Optional[Path], typer.Option("--output", "-o", help="Save the result as JSON.")]
HtmlOption = Annotated[Optional[Path], typer.Option("--html", metavar="FILE", help="Write a report to open in a browser: one file, no network.")]
