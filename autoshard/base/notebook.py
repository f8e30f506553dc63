"""Results as HTML for notebooks: a table of text, in which nothing can be markup."""
from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape


def facts(title: str, rows: Iterable[tuple[str, object]], below: Iterable[str] = ()) -> str:
    """Two columns, names and values; rows without a value are left out."""
    return grid(title, (), ((name, value) for name, value in rows if value not in ("", None)), below)


def grid(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]], below: Iterable[str] = ()) -> str:
    """A table under a title, with lines below it."""
    head = f"<tr>{_cells('th', columns)}</tr>" if columns else ""
    body = "".join(f"<tr>{_cells('td', row)}</tr>" for row in rows)
    lines = "".join(f"<div>{escape(line)}</div>" for line in below)
    return f"<div><b>{escape(title)}</b><table>{head}{body}</table>{lines}</div>"


def _cells(tag: str, values: Iterable[object]) -> str:
    return "".join(f'<{tag} style="text-align:left">{escape(str(value))}</{tag}>' for value in values)
