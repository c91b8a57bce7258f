"""What is asked, and what has been said to it so far."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from skippipe.errors import UserError
from skippipe.inference.sampling import Sampling
from skippipe.inference.text import TextStream

Ending = Literal["end", "stop", "length"]
"""The model ended its text; a stop string came; there were as many tokens as asked for, or as the model looks at."""


@dataclass(frozen=True)
class Request:
    prompt: tuple[int, ...]
    max_tokens: int
    """To be said, at most."""
    sampling: Sampling = Sampling()  # noqa: RUF009 (frozen)
    stop: tuple[str, ...] = ()
    """Strings that end the text; they are not part of it."""

    def __post_init__(self) -> None:
        if not self.prompt:
            raise UserError("a prompt has one token or more: that which begins a text, if there is nothing else")
        if self.max_tokens < 1:
            raise UserError(f"{self.max_tokens} tokens: at least one is said")

    def longest(self, context: int) -> int:
        """Tokens in the end, those of the prompt included."""
        if len(self.prompt) >= context:
            raise UserError(
                f"a prompt of {len(self.prompt):,} tokens: the model looks at {context:,} and must have some left to "
                "write; shorten it"
            )
        return min(len(self.prompt) + self.max_tokens, context)


class Piece(NamedTuple):
    """Of a reply, as it is made."""

    request: int
    """In the order in which they were asked."""
    token: int
    text: str
    """New text; empty while a character or a stop string may be under way."""
    ending: Ending | None


@dataclass(eq=False)
class Reply:
    number: int
    request: Request
    longest: int
    ends: frozenset[int]
    """Tokens that end a text."""
    stream: TextStream
    slot: int = -1
    """Where its keys and values lie, in every stage."""
    tokens: list[int] = field(default_factory=list)
    """The prompt and what was said."""
    text: str = ""
    ending: Ending | None = None

    @classmethod
    def to(cls, request: Request, number: int, context: int, ends: frozenset[int], tokenizer: Any) -> Reply:
        stream = TextStream(tokenizer, request.prompt, request.stop)
        return cls(number, request, request.longest(context), ends, stream, tokens=list(request.prompt))

    @property
    def said(self) -> list[int]:
        return self.tokens[len(self.request.prompt) :]

    @property
    def left(self) -> int:
        """Tokens that may still come."""
        return self.longest - len(self.tokens)

    def take(self, token: int) -> Piece:
        assert self.ending is None
        self.tokens.append(token)
        text = "" if token in self.ends else self.stream.push(token)
        if token in self.ends:
            self.ending = "end"
        elif self.stream.stopped:
            self.ending = "stop"
        elif not self.left:
            self.ending = "length"
        if self.ending:
            text += self.stream.rest()
        self.text += text
        return Piece(self.number, token, text, self.ending)
