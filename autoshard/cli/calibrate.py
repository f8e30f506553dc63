"""`autoshard calibrate`."""
from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from autoshard.cli.common import QuietAloneOption
from autoshard.cli.progress import progress_shown
from autoshard.errors import UsageError

FloatProducts = Literal["highest", "high", "medium"]

if TYPE_CHECKING:
    from autoshard.calibrate.run import Calibration

EXAMPLES = """
[bold]Examples[/bold]

  torchrun --nproc-per-node 2 -m autoshard calibrate -o mycluster.toml

  python -m autoshard calibrate -o mycpu.toml                       one process: compute only

  torchrun --nproc-per-node 4 -m autoshard calibrate -o my.toml --mesh dp=2,tp=2

  autoshard plan gpt:tiny --mesh tp=2 --cluster mycluster.toml      then plan with it
"""


def calibrate(
    output: Annotated[Path, typer.Option("--output", "-o", help="The profile to write, a .toml file.")],
    mesh: Annotated[str | None, typer.Option(help="Mesh axes to measure: dp=2,tp=2. Default: nodes, and ranks in a node.")] = None,
    seconds: Annotated[float, typer.Option(help="About how long to measure.")] = 45.0,
    timeout: Annotated[float, typer.Option(help="Seconds to wait for a peer before giving up.")] = 60.0,
    float32_matmul: Annotated[FloatProducts | None, typer.Option(
        help="Measure under torch.set_float32_matmul_precision(this), for training that sets it too. Default: as torch has it.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Page with the plots. Default: beside the profile, .html.")] = None,
    quiet: QuietAloneOption = False,
) -> None:
    """Measure collectives and ops on this machine, and write the cluster profile that repeats them. Start it with torchrun."""
    check_output(output, plot)
    first = int(os.environ.get("RANK", "0")) == 0
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")  # what c10d logs on a timeout is in our message; read when torch loads
    with progress_shown(first and not quiet) as progress:
        import torch

        from autoshard.calibrate.run import calibrate as measured

        if float32_matmul is not None:
            torch.set_float32_matmul_precision(float32_matmul)
        found, leads = measured(output.stem, mesh, seconds=seconds, timeout=timeout, progress=progress)
    if leads:
        _write(found, output, plot or output.with_suffix(".html"), quiet)


def check_output(output: Path, plot: Path | None = None) -> None:
    """A minute of measuring should not end at a mistyped path. Raises UsageError."""
    if output.suffix != ".toml":
        raise UsageError(f"a profile is a .toml file, got {output}; write for example -o {output.with_suffix('.toml')}")
    if not output.parent.is_dir():
        raise UsageError(f"there is no folder {output.parent} to write {output.name} into")
    if plot is not None and plot.resolve() == output.resolve():
        raise UsageError(f"--plot {plot} would be written over the profile; give another file, {output.with_suffix('.html')}")


def _write(found: Calibration, output: Path, plot: Path, quiet: bool) -> None:
    from autoshard.calibrate.page import page
    from autoshard.calibrate.report import show
    from autoshard.calibrate.toml import profile_text

    output.write_text(profile_text(found.cluster, found.source))
    page(found, plot)
    if not quiet:
        show(found)
        typer.echo(f"Profile written to {output}, plots to {plot}; plan with it: --cluster {output}", err=True)
