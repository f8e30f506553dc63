"""`autoshard doctor`."""
from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from autoshard.cli.common import JsonOption, QuietOption
from autoshard.cli.progress import progress_shown

if TYPE_CHECKING:
    from autoshard.calibrate.doctor import Finding

FAILED = 1
"""Exit code where something does not work."""
EXAMPLES = """
[bold]Examples[/bold]

  autoshard doctor

  torchrun --nproc-per-node 2 -m autoshard doctor --cluster my.toml

  autoshard doctor --no-self-test --json
"""


def doctor(
    cluster: Annotated[str | None, typer.Option(
        help="Profile to hold against this machine. Default: that of the devices here.")] = None,
    self_test: Annotated[bool, typer.Option("--self-test/--no-self-test", help="Train a step and compare it, time some ops and collectives.")] = True,
    seconds: Annotated[float, typer.Option(help="About how long to time them.")] = 10.0,
    timeout: Annotated[float, typer.Option(help="Seconds to wait for a peer before giving up.")] = 60.0,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Look at versions, devices and links, hold a cluster profile against them, and test that a small model computes the same. Exit code 1 where
    something does not work."""
    first = int(os.environ.get("RANK", "0")) == 0
    with progress_shown(first and not quiet and not as_json) as progress:
        from autoshard.calibrate.doctor import doctor as examined

        found, leads = examined(cluster, self_test=self_test, seconds=seconds, timeout=timeout, progress=progress)
    if leads:
        _print(found, as_json, quiet)
    if any(f.state == "failed" for f in found):
        raise typer.Exit(FAILED)


def _print(found: tuple[Finding, ...], as_json: bool, quiet: bool) -> None:
    if as_json:
        ok = all(f.state != "failed" for f in found)
        sys.stdout.write(json.dumps({"ok": ok, "findings": [asdict(f) for f in found]}, indent=1) + "\n")
    elif not quiet:
        from autoshard.report.commands.doctor import show

        show(found)
