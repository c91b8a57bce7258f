"""What all commands have in common: how their help is laid out, and what to try where something is missing."""

from __future__ import annotations

import inspect
from typing import Any

from typer.core import TyperCommand, TyperGroup

from skippipe.errors import UserError

FINE_TUNING = (
    "fine-tuning is training that begins with weights: 'skippipe job -o job.toml' writes a job, the field "
    "model.weights names the model, and 'skippipe train job.toml' trains it"
)
ELSEWHERE = {"fine-tune": FINE_TUNING, "finetune": FINE_TUNING}
"""Names that are looked for and are no commands → how it is done."""
MISSING = {
    "heal --data": "name a text to learn from; --data classics, Jane Austen's novels, comes with SkipPipe",
    "eval --text": "name a text to measure on; --text classics-val comes with SkipPipe",
    "score --text": "name a text to make questions of; --text classics-val comes with SkipPipe",
}
"""Options that have to be given → what to try."""


class Group(TyperGroup):
    """Commands under one name."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args and args[0] in ELSEWHERE and args[0] not in self.commands:
            raise UserError(f"No such command '{args[0]}': {ELSEWHERE[args[0]]}")
        return super().resolve_command(ctx, args)

    def get_params(self, ctx: Any) -> list[Any]:
        return _flags_without_type(super().get_params(ctx))


class Command(TyperCommand):
    """A command whose help has a line for each paragraph of its docstring, to be wrapped by the terminal."""

    def __init__(self, *args: Any, **given: Any) -> None:
        super().__init__(*args, **given)
        self.help = _one_line_a_paragraph(self.help or "")

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except Exception as error:  # typer's, whose class is elsewhere in every release
            option = max(getattr(getattr(error, "param", None), "opts", None) or [""], key=len)
            if type(error).__name__ == "MissingParameter" and (advice := MISSING.get(f"{self.name} {option}")):
                raise UserError(f"{option}: missing; {advice}") from None
            raise

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
