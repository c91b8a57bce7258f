"""Errors of the user's input and environment, and how a command reports them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from io import TextIOWrapper


class UserError(Exception):
    """Bad input: what is wrong, where, and what to do, in one line. The command line exits with 2."""


class Infeasible(UserError):
    """A problem that no plan solves; the message gives the nearest one that can be solved."""


def run_command(command: Callable[[], None]) -> None:
    """Run a command; errors of input and environment become one line and an exit code."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal without our arrows shows question marks
    try:
        command()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    except ModuleNotFoundError as error:
        extra = EXTRAS.get(error.name or "")
        if extra is None:
            raise
        print(f"error: this needs the package '{error.name}'; pip install 'skippipe[{extra}]'", file=sys.stderr)
        raise SystemExit(2) from None
    except BrokenPipeError:
        raise SystemExit(1) from None
    except OSError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        raise SystemExit(130) from None


EXTRAS = {
    "torch": "train",
    "transformers": "train",
    "tokenizers": "train",
    "safetensors": "train",
    "msgspec": "train",
    "zmq": "train",
    "fastapi": "serve",
    "uvicorn": "serve",
}
"""Packages that only some commands need, and the extra that brings each."""
