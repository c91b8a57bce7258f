"""The `skippipe` command. Exit codes: 0 done, 1 the plan breaks a rule, 2 bad input, 130 Ctrl-C, 143 SIGTERM."""

from __future__ import annotations

from skippipe.errors import run_command


def main() -> None:
    def command() -> None:
        from skippipe.cli.app import command_line

        command_line()(standalone_mode=True)

    run_command(command)
