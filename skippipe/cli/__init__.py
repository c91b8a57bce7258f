"""The `skippipe` command. Exit codes: 0 done, 1 the plan breaks a rule, 2 bad input, 130 interrupted."""

from __future__ import annotations

import sys
from io import TextIOWrapper


def main() -> None:
    from skippipe.errors import UserError

    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal without our arrows shows question marks
    try:
        from skippipe.cli.app import app

        app(standalone_mode=True)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    except BrokenPipeError:
        raise SystemExit(1) from None
    except OSError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        raise SystemExit(130) from None
