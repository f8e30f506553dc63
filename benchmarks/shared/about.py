"""Where, when and on what code a benchmark ran, and its table as docs/performance.md has it."""
from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch


def about() -> dict[str, Any]:
    """What a figure means nothing without; for JSON."""
    return {"device": _device(), "torch": torch.__version__, "date": f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC", "commit": _commit()}


def line(facts: dict[str, Any], *more: str) -> str:
    """The facts as one line above a table."""
    return ", ".join((facts["device"], f"torch {facts['torch']}", facts["date"], f"commit {facts['commit']}", *more))


def markdown(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(map(str, cells))} |" for cells in lines)


def _device() -> str:
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    return f"{_processor()}, {os.cpu_count()} cores"


def _processor() -> str:
    """The CPU's name where the system tells it, else its architecture."""
    cpus = Path("/proc/cpuinfo")
    names = [row.partition(":")[2].strip() for row in cpus.read_text().splitlines() if row.startswith("model name")] if cpus.exists() else []
    return names[0] if names else platform.processor() or platform.machine()


def _commit() -> str:
    """Short hash, with "-dirty" where tracked files differ from it."""
    found = subprocess.run(["git", "describe", "--always", "--dirty", "--exclude=*"], capture_output=True, text=True, cwd=Path(__file__).parent)
    return found.stdout.strip() or "unknown"
