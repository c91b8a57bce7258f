"""What all commands have in common: how their help is laid out."""

from __future__ import annotations

import inspect
from typing import Any

from typer.core import TyperCommand, TyperGroup


class Group(TyperGroup):
    """Commands under one name."""

    def get_params(self, ctx: Any) -> list[Any]:
        return _flags_without_type(super().get_params(ctx))


class Command(TyperCommand):
    """A command whose help has a line for each paragraph of its docstring, to be wrapped by the terminal."""

    def __init__(self, *args: Any, **given: Any) -> None:
        super().__init__(*args, **given)
        self.help = _one_line_a_paragraph(self.help or "")

    def get_params(self, ctx: Any) -> list[Any]:
        return _flags_without_type(super().get_params(ctx))


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
