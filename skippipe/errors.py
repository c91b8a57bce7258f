"""Errors of the user's input and environment, packages that are missing among them, and how a command reports them."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from io import TextIOWrapper
from typing import Any

INTERRUPTED, TERMINATED = 128 + signal.SIGINT, 128 + signal.SIGTERM  # exit statuses, as shells have them


class UserError(Exception):
    """Bad input: what is wrong, where, and what to do, in one line. The command line exits with 2."""


class Infeasible(UserError):
    """A problem that no plan solves; the message gives the nearest one that can be solved."""


def first_line(error: Exception) -> str:
    """What an error of another library says, in one line; if it says nothing, its kind."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    count = 2 if lines and lines[0].endswith(":") else 1  # 'Validation error for field …:', and then what is wrong
    return " ".join(lines[:count]) or type(error).__name__


def install_command(extra: str) -> str:
    """How an extra is installed: pip takes the first for what is installed already, the second where nothing is."""
    return f"pip install 'skippipe[{extra}]', or '.[{extra}]' in a checkout"


def require(package: str, extra: str, purpose: str) -> Any:
    """The imported package; UserError with how to install it if it is missing."""
    try:
        return import_module(package)
    except ImportError as error:
        if error.name not in (package, None):  # it is there, but something below it is broken
            raise UserError(f"{purpose} needs the package '{package}', which cannot be imported: {error}") from None
        raise UserError(f"{purpose} needs the package '{package}': install it with {install_command(extra)}") from None


def run_command(command: Callable[[], None]) -> None:
    """Run a command; errors of input and environment become one line and an exit code."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal without our arrows shows question marks
    with _sigterm_interrupts():
        _run(command)


@contextmanager
def _sigterm_interrupts() -> Iterator[None]:
    """SIGTERM does what Ctrl-C does at that moment; the exit status tells them apart."""
    terminated = False

    def terminate(number: int, frame: Any) -> None:
        nonlocal terminated
        terminated = True
        handler = signal.getsignal(signal.SIGINT)
        if not callable(handler):  # a shell has its background jobs ignore Ctrl-C
            raise KeyboardInterrupt
        handler(number, frame)

    if threading.current_thread() is not threading.main_thread():  # only that one may set handlers
        yield
        return
    before = signal.signal(signal.SIGTERM, terminate)
    try:
        yield
    except SystemExit as end:
        if terminated and end.code == INTERRUPTED:
            raise SystemExit(TERMINATED) from None
        raise
    finally:
        signal.signal(signal.SIGTERM, before)


def _run(command: Callable[[], None]) -> None:
    try:
        command()
    except ModuleNotFoundError as error:
        extra = EXTRAS.get(error.name or "")
        if extra is None:
            raise
        print(f"error: this needs the package '{error.name}'; {install_command(extra)}", file=sys.stderr)
        raise SystemExit(2) from None
    except BrokenPipeError:
        raise SystemExit(1) from None
    except (UserError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        raise SystemExit(INTERRUPTED) from None


EXTRAS = {
    **dict.fromkeys(("torch", "transformers", "tokenizers", "safetensors", "msgspec", "zmq"), "train"),
    **dict.fromkeys(("fastapi", "uvicorn"), "serve"),
}
"""Packages that only some commands need, and the extra that brings each."""
