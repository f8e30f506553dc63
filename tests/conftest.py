"""Fixtures of all rooms, and their order."""
import sys
from pathlib import Path

import pytest

from autoshard import cli

TESTS = Path(__file__).parent
FIRST = ("pages", "dist", "pipeline")
"""Rooms with the longest tests: where several workers share the files, none is left alone with them at the end."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    place = {room: i for i, room in enumerate(FIRST)}
    items.sort(key=lambda item: place.get(item.path.relative_to(TESTS).parts[0], len(FIRST)))


@pytest.fixture
def run(monkeypatch, capsys):
    """run(*arguments) -> (exit code, stdout, stderr), in this process."""
    def call(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["autoshard", *map(str, arguments)])
        monkeypatch.setenv("COLUMNS", "200")
        monkeypatch.setenv("NO_COLOR", "1")
        code = 0
        try:
            cli.main()
        except SystemExit as exit_:
            code = exit_.code or 0
        out, err = capsys.readouterr()
        return code, out, err

    return call
