"""What all commands have in common: how their help is laid out, and options that had other names."""

from __future__ import annotations

import inspect
from itertools import pairwise
from pathlib import Path
from typing import Any

from typer.core import TyperCommand, TyperGroup

OLD_NAMES_OF_OUTPUT = ("--out", "--results")


class Group(TyperGroup):
    """Commands under one name."""

    def get_params(self, ctx: Any) -> list[Any]:
        return _flags_without_type(super().get_params(ctx))


class Command(TyperCommand):
    """A command that also takes the options that it had under other names, which its help does not show."""

    def __init__(self, *args: Any, **given: Any) -> None:
        super().__init__(*args, **given)
        self.help = _one_line_a_paragraph(self.help or "")

    def get_params(self, ctx: Any) -> list[Any]:
        return _flags_without_type(super().get_params(ctx))

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        own = {name for param in self.params for name in param.opts}
        words = [_new_name(word, own) for word in args]
        if self.name in ("eval", "score"):  # --json was followed by the file that is -o now
            for at, (word, after) in enumerate(pairwise(words)):
                if word == "--json" and after.endswith(".json") and not Path(after).is_dir():
                    words[at] = "--output"
        return super().parse_args(ctx, words)


def _flags_without_type(params: list[Any]) -> list[Any]:
    """Options for the help: of flags typer would show '<bool>', as if a value had to follow."""
    for each in params:
        if getattr(each, "is_flag", False):
            each.metavar = ""
    return params


def _one_line_a_paragraph(docstring: str) -> str:
    """The text as a terminal of any width can wrap it; what stands behind a line with \\b stays in its lines."""
    paragraphs = inspect.cleandoc(docstring).split("\n\n")
    return "\n\n".join(
        each.removeprefix("\b\n") if each.startswith("\b\n") else " ".join(each.split()) for each in paragraphs
    )


def _new_name(word: str, own: set[str]) -> str:
    name, equals, value = word.partition("=")
    if name == "--json" and equals:
        return f"--output={value}"
    return f"--output{equals}{value}" if name in OLD_NAMES_OF_OUTPUT and name not in own else word
