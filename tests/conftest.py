"""What several tests of commands share."""

from __future__ import annotations

import gc
import os
import sys
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import settings

# Before torch is imported, here or in a process of a test: on some processors oneDNN takes forty times as long for a
# product of such small matrices as torch itself.
os.environ.setdefault("TORCH_MKLDNN_MATMUL_MIN_DIM", "1024")

from skippipe.cli import main
from tests.helpers.processes import Command, CommandResult

# The same cases every time, or one run in a hundred would fail for what others had not drawn; benchmarks/fuzz.py draws.
# How long a case takes depends on the machine.
settings.register_profile("untimed", derandomize=True, deadline=None, max_examples=40)
settings.load_profile("untimed")

PROCESS_FILES = (
    "test_recovery.py",
    "test_run.py",
    "test_serve.py",
    "test_profile.py",
    "test_launch.py",
    "test_mixed_codecs.py",
    "test_fork_server.py",
)
"""They fork processes from one that has imported torch (`FORKED`). One worker has them all: every other one would need
such a process of its own, and that takes as long as a dozen tests."""
LONG_FILES = (*PROCESS_FILES, "test_exact.py")
"""Half a minute or more: begun first, so that no worker is left with one."""


def pytest_configure() -> None:
    gc.disable()  # until all is imported: there is nothing to be found in that


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.path.name not in LONG_FILES)


@pytest.hookimpl(tryfirst=True, optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> object | None:
    """With `--dist loadfile`, a worker gets a file at a time, or all that fork processes."""
    if config.getoption("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    scheduling: Any = LoadFileScheduling(config, log)
    scheduling._split_scope = _scope
    return cast(object, scheduling)


def _scope(nodeid: str) -> str:
    file = nodeid.split("::", 1)[0]
    return "processes" if Path(file).name in PROCESS_FILES else file


def pytest_make_parametrize_id(val: object, argname: str) -> str | None:
    """Bytes are named by their argument: a compressed file holds the second it was made in, and workers must agree."""
    return argname if isinstance(val, bytes) else None


@pytest.fixture
def skippipe(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """The command, in this process."""

    def run(*words: str | Path) -> CommandResult:
        monkeypatch.setattr(sys, "argv", ["skippipe", *map(str, words)])
        code, before = 0, dict(os.environ)
        try:
            main()
        except SystemExit as end:
            code = int(end.code or 0)
        finally:  # commands set what is not set, and that is not for the tests that follow
            os.environ.clear()
            os.environ.update(before)
        return CommandResult(code, *capsys.readouterr())

    return run
