"""Where the work is, on standard error."""
from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import typer


@contextmanager
def progress_shown(on: bool) -> Iterator[Any]:
    """A callable (phase, detail) that says where the work is: one live line in a terminal, a line per phase in a log."""
    from rich.console import Console
    from rich.markup import escape

    console = Console(stderr=True)
    if not on:
        yield lambda phase, detail: None
    elif console.is_terminal:
        with console.status("starting") as status:
            yield lambda phase, detail: status.update(f"{phase}  [dim]{escape(detail)}[/dim]")
    else:
        yield _PhaseLog()


NEWS = frozenset({"shapes", "stages", "sweep", "axes"})
"""Phases whose every detail is a line of its own."""


class _PhaseLog:
    """Writes each phase once, when it begins, and all news."""

    def __init__(self) -> None:
        self._last = ""

    def __call__(self, phase: str, detail: str) -> None:
        if phase in NEWS and detail:
            typer.echo(f"{phase}: {detail}", err=True)
        elif phase != self._last:
            typer.echo(f"{phase} {detail}".rstrip() + " ...", err=True)
            self._last = phase
