"""The `skippipe` command. Exit codes: 0 done, 1 the plan breaks a rule, 2 bad input, 130 interrupted."""

from __future__ import annotations

import sys
from collections.abc import Callable
from io import TextIOWrapper

EXTRAS = {
    "torch": "train",
    "transformers": "train",
    "tokenizers": "train",
    "safetensors": "train",
    "zmq": "train",
    "fastapi": "serve",
    "uvicorn": "serve",
}
"""Packages that only some commands need, and the extra that brings each."""


def main() -> None:
    def command() -> None:
        from skippipe.cli.app import app

        app(standalone_mode=True)

    politely(command)


def politely(command: Callable[[], None]) -> None:
    """Run it; what goes wrong through no fault of the program becomes one line and an exit code."""
    from skippipe.errors import UserError

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
