"""Fixtures of all rooms."""
import sys

import pytest

from autoshard import cli


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
