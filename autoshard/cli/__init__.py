"""The command line: one file per command. torch is imported only by commands that need it, when they run."""
from __future__ import annotations

import errno
import os
import sys
from typing import Annotated

import typer

from autoshard.cli import calibrate as calibrate_command
from autoshard.cli import compare as compare_command
from autoshard.cli import diff as diff_command
from autoshard.cli import doctor as doctor_command
from autoshard.cli import explain as explain_command
from autoshard.cli import generate as generate_command
from autoshard.cli import memory as memory_command
from autoshard.cli import plan as plan_command
from autoshard.cli import serve_plan as serve_plan_command
from autoshard.cli import simulate as simulate_command
from autoshard.cli import solve as solve_command
from autoshard.cli import sweep as sweep_command
from autoshard.cli import verify as verify_command
from autoshard.cli.clusters import clusters_app
from autoshard.cli.request import takes_request
from autoshard.errors import AutoshardError

USER_ERROR = 2
EXAMPLES = """
[bold]Examples[/bold]

  autoshard plan gpt:tiny --mesh tp=2 --cluster cpu-gloo

  autoshard plan llama:8b --mesh dp=2,tp=4 --batch 8 --seq 4096 --dtype bf16 -o plan.json

  autoshard report plan.json
"""

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False,
                  rich_markup_mode="rich", epilog=EXAMPLES,
                  help="Find how to shard a PyTorch model over a device mesh: no GPU, no process group, no weights.")
app.command(epilog=plan_command.EXAMPLES)(takes_request(plan_command.plan))
app.command()(plan_command.report)
app.command(epilog=explain_command.EXAMPLES)(takes_request(explain_command.explain, mesh=""))
app.command(epilog=diff_command.EXAMPLES)(diff_command.diff)
app.command(epilog=compare_command.EXAMPLES)(takes_request(compare_command.compare))
app.command(epilog=memory_command.EXAMPLES)(takes_request(memory_command.memory))
app.command(epilog=sweep_command.EXAMPLES)(takes_request(sweep_command.sweep))
app.command(epilog=verify_command.EXAMPLES)(takes_request(verify_command.verify, optimizer="momentum"))
app.command(epilog=simulate_command.EXAMPLES)(simulate_command.simulate)
app.command("serve-plan", epilog=serve_plan_command.EXAMPLES)(serve_plan_command.serve_plan)
app.command(epilog=generate_command.EXAMPLES)(generate_command.generate)
app.command(epilog=solve_command.EXAMPLES)(solve_command.solve)
app.add_typer(clusters_app, name="clusters")
app.command(epilog=calibrate_command.EXAMPLES)(calibrate_command.calibrate)
app.command(epilog=doctor_command.EXAMPLES)(doctor_command.doctor)


@app.callback()
def options(
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Log every phase with its seconds, as --logs all.")] = False,
    logs: Annotated[str | None, typer.Option(envvar="AUTOSHARD_LOGS", help="Phases to log: all, or +search,trace.")] = None,
) -> None:
    if verbose or logs:
        from autoshard.base.logs import configure

        configure(logs or "all")


def main() -> None:
    """Entry point: a user's mistake is one message on standard error and exit code 2, never a traceback."""
    try:
        try:
            app(prog_name="autoshard")  # however it was started
        finally:
            sys.stdout.flush()  # here an error has a message, at the end of the process it has none
    except SystemExit as stopped:
        if isinstance(getattr(stopped.__context__, "__cause__", None), KeyboardInterrupt):  # Ctrl-C where no command took it: typer says nothing
            typer.echo("interrupted", err=True)
        raise
    except AutoshardError as error:
        _fail(str(error))
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what is left of the output
        _fail("cannot write the output: the disk is full; make room on it, or write elsewhere with -o or a pipe")
    except ModuleNotFoundError as error:
        if (error.name or "autoshard").startswith("autoshard"):
            raise
        _fail(f"the package {error.name!r} is missing; install what autoshard needs with: pip install autoshard")


def _fail(message: str) -> None:
    typer.echo(f"error: {message}", err=True)
    raise SystemExit(USER_ERROR)
