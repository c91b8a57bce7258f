"""What the HTTP interface sees of those who answer."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Protocol

from skippipe.inference.request import SamplingParams


@dataclass(frozen=True)
class RequestOutput:
    """A piece of an answer."""

    text: str
    """May be empty: a token need not end a character, and what could begin a stop string is held back."""
    tokens: int
    """Of the answer so far."""
    visited: int
    """Stages that the shortest way had by which a token was made, so far."""
    ending: str | None = None
    """"stop", "length", or None: there is more."""


@dataclass(frozen=True)
class StageCoverage:
    """Of the model that is there."""

    stages: int
    total: int


class RequestRefused(Exception):
    """Too many requests wait, or too few stages are left; the argument says which, for people."""


class EngineClient(Protocol):
    """Text is turned into tokens and back on one thread, which need not be the one that answers."""

    model: str
    """What it is called."""
    created: int
    """When it was loaded, in seconds since 1970."""
    context: int
    """Tokens of prompt and answer at most."""
    vocabulary: int
    """Tokens that the model knows: ids are below it."""

    def share(self) -> StageCoverage:
        """No stages at all where nothing can be answered."""

    def figures(self) -> dict[str, float]:
        """For Prometheus: name → value; names end in _total if they only grow."""

    def tokens(self, text: str) -> list[int]: ...

    def text(self, tokens: Sequence[int]) -> str: ...

    def chat_tokens(self, messages: Sequence[dict[str, str]]) -> list[int]:
        """A conversation as a prompt: each message has a role and content."""

    def answer(
        self, prompt: Sequence[int], most: int, sampling: SamplingParams, stops: Sequence[str]
    ) -> AsyncGenerator[RequestOutput, None]:
        """Piece by piece; the last one has an ending. Closing the iterator cancels. Refused if it cannot be done."""
