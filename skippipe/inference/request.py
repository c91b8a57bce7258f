"""How the next token is to be chosen; `choosing` does it.

What is asked, and what has been said to it so far.

Tokens become text as they come: no broken characters, and nothing of a stop string.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from skippipe.errors import UserError


@dataclass(frozen=True)
class SamplingParams:
    temperature: float = 1.0
    """Logits are divided by it; 0: always the likeliest token."""
    top_k: int = 0
    """Only from so many of the likeliest tokens; 0: from all."""
    top_p: float = 1.0
    """Then only from the fewest likely ones that together have this share."""
    seed: int = 0
    """With the place of a token it says what chance says, so that any node gives the same answer."""

    def __post_init__(self) -> None:
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise UserError(f"temperature {self.temperature}: 0 (always the likeliest token) or a number above it")
        if self.top_k < 0:
            raise UserError(f"top-k {self.top_k}: a number of tokens, or 0 for all of them")
        if not 0 < self.top_p <= 1:
            raise UserError(f"top-p {self.top_p}: a share above 0, 1 at most")


FinishReason = Literal["end", "stop", "length"]
"""The model ended its text; a stop string came; there were as many tokens as asked for, or as the model looks at."""


@dataclass(frozen=True)
class GenerationRequest:
    prompt: tuple[int, ...]
    max_tokens: int
    """To be said, at most."""
    sampling: SamplingParams = SamplingParams()
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


class OutputPiece(NamedTuple):
    """Of a reply, as it is made."""

    request: int
    """In the order in which they were asked."""
    token: int
    text: str
    """New text; empty while a character or a stop string may be under way."""
    ending: FinishReason | None


@dataclass(eq=False)
class Generation:
    number: int
    request: GenerationRequest
    longest: int
    ends: frozenset[int]
    """Tokens that end a text."""
    stream: TextStream
    slot: int = -1
    """Where its keys and values lie, in every stage."""
    tokens: list[int] = field(default_factory=list)
    """The prompt and what was said."""
    text: str = ""
    ending: FinishReason | None = None

    @classmethod
    def to(
        cls, request: GenerationRequest, number: int, context: int, ends: frozenset[int], tokenizer: Any
    ) -> Generation:
        stream = TextStream(tokenizer, request.prompt, request.stop)
        return cls(number, request, request.longest(context), ends, stream, tokens=list(request.prompt))

    @property
    def said(self) -> list[int]:
        return self.tokens[len(self.request.prompt) :]

    @property
    def left(self) -> int:
        """Tokens that may still come."""
        return self.longest - len(self.tokens)

    def take(self, token: int) -> OutputPiece:
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
        return OutputPiece(self.number, token, text, self.ending)


BROKEN = "\N{REPLACEMENT CHARACTER}"
LONGEST = 4  # bytes of a character, so tokens, at most, that make one


class TextStream:
    """What to say after each token."""

    def __init__(self, tokenizer: Any, prompt: Sequence[int], stop: Sequence[str] = ()) -> None:
        self._tokenizer = tokenizer
        self._stop = [text for text in stop if text]
        self._tokens = self._before(prompt)
        self._old = len(self._tokens)
        self._said = len(self._decoded(self._tokens))
        """Characters of these tokens that were said before."""
        self._held = ""
        self.stopped = False
        """A stop string has come."""

    def push(self, token: int) -> str:
        assert not self.stopped
        self._tokens.append(token)
        self._held += self._solid()
        found = min((at for at in map(self._held.find, self._stop) if at >= 0), default=None)
        self.stopped = found is not None
        count = self._safe() if found is None else found
        said, self._held = self._held[:count], self._held[count:]
        return said

    def rest(self) -> str:
        """At the end: what might have become a stop string. A character that lacks bytes is not said."""
        rest, self._held = "" if self.stopped else self._held, ""
        return rest

    def _solid(self) -> str:
        """Text that later tokens do not change, as far as it is new."""
        text = self._decoded(self._tokens)
        if text.endswith(BROKEN):
            if len(self._tokens) - self._old < LONGEST:
                return ""
            for _ in range(LONGEST - 1):  # bytes that make no sense; only the last few may still become a character
                text = text.removesuffix(BROKEN)
            new, self._said = text[self._said :], max(self._said, len(text))
            return new
        new = text[self._said :]
        if new:
            del self._tokens[: self._old]
            self._old = len(self._tokens)
            self._said = len(self._decoded(self._tokens))
        return new

    def _before(self, prompt: Sequence[int]) -> list[int]:
        """The end of the prompt: some tokenizers drop a space before the first of the tokens that they are given.

        From the beginning of a character, for bytes that belong to none can spoil those that follow them.
        """
        ends = [list(prompt[-count:]) for count in range(LONGEST, 2 * LONGEST)]
        return next((end for end in ends if not self._decoded(end).startswith(BROKEN)), ends[0])

    def _decoded(self, tokens: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return text

    def _safe(self) -> int:
        """Up to where the held text can no longer become a stop string."""
        text = self._held
        for begin in range(max(0, len(text) - max(map(len, self._stop), default=0)), len(text)):
            if any(stop.startswith(text[begin:]) for stop in self._stop):
                return begin
        return len(text)
