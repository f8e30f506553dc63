"""Hooks of mkdocs: README as the first page, the API reference from signatures and docstrings, links to files outside of docs/ as plain names."""
from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
OUTSIDE = re.compile(r"\[([^\]]*)\]\(\.\./([^)]*)\)")
ORDER = ("compile", "plan", "verify", "simulate", "generator")
"""What users meet first; the other names follow by the alphabet."""


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """The text of a page as mkdocs reads it."""
    if page.file.src_uri == "index.md":
        markdown = (ROOT / "README.md").read_text().replace("](docs/", "](").replace("](CON", "](../CON").replace("](CHANGE", "](../CHANGE")
    if page.file.src_uri == "api.md":
        markdown += reference()
    return OUTSIDE.sub(r"\1 (`\2`)", markdown)


def reference() -> str:
    """A section for each public name: how it is called, and its docstring as it is written."""
    import autoshard

    names = [*ORDER, *(n for n in autoshard.__all__ if n not in ORDER)]
    return "\n".join(f"\n## autoshard.{name}\n\n```python\n{called(getattr(autoshard, name), name)}\n```\n\n```text\n"
                     f"{inspect.getdoc(getattr(autoshard, name)) or 'no docstring'}\n```\n" for name in names)


def called(value: Any, name: str) -> str:
    """The signature, an argument a line where it is long."""
    try:
        parameters = list(inspect.signature(value).parameters.values())
    except (TypeError, ValueError):  # classes made by torch's own types have none
        return f"autoshard.{name}"
    short = f"autoshard.{name}({', '.join(_starred(parameters))})"
    return short if len(short) <= 100 else f"autoshard.{name}(\n    " + ",\n    ".join(_starred(parameters)) + ")"


def _starred(parameters: list[inspect.Parameter]) -> list[str]:
    """With the bare star before what is passed by name alone."""
    written = [re.sub(r": '([^']*)'", r": \1", str(p), count=1) for p in parameters]  # annotations are kept as texts
    first = next((i for i, p in enumerate(parameters) if p.kind is p.KEYWORD_ONLY), None)
    variadic = any(p.kind is p.VAR_POSITIONAL for p in parameters)
    return written if first is None or variadic else [*written[:first], "*", *written[first:]]
