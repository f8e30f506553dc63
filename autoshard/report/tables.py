"""The style of every table and section in the terminal."""
from __future__ import annotations

from rich import box
from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

FILE_WIDTH = 100


def report_console() -> Console:
    """Standard output: as wide as the terminal, `FILE_WIDTH` in a file or pipe."""
    console = Console()
    return console if console.is_terminal else Console(width=FILE_WIDTH)


def table(*columns: str) -> Table:
    """Columns by title; `>` in front aligns to the right, `>` and `!` never wrap."""
    out = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, padding=(0, 1, 0, 0), header_style="bold")
    for title in columns:
        right = title.startswith(">")
        out.add_column(title.removeprefix(">").removeprefix("!"), justify="right" if right else "left",
                       no_wrap=right or title.startswith("!"), overflow="fold")
    return out


def section(title: str, body: RenderableType) -> RenderableType:
    return Group(Text(title, style="bold underline"), Padding(body, (0, 0, 1, 2), expand=False))
