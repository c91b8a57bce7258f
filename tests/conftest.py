"""What several tests of commands share."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from skippipe.cli import main
from tests.helpers.commands import Command, CommandResult


@pytest.fixture
def skippipe(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """The command, in this process."""

    def run(*words: str | Path) -> CommandResult:
        monkeypatch.setattr(sys, "argv", ["skippipe", *map(str, words)])
        code = 0
        try:
            main()
        except SystemExit as end:
            code = int(end.code or 0)
        return CommandResult(code, *capsys.readouterr())

    return run
