"""What the HTTP interface knows of the engine behind it."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Protocol

from skippipe.inference.request import FinishReason, SamplingParams


@dataclass(frozen=True)
class RequestOutput:
    """New text of an answer, and the answer's counts so far."""

    text: str
    """May be empty: a token need not end a character, and what could begin a stop string is held back."""
    num_tokens: int
    num_stages: int
    """Stages of the shortest route by which a token of the answer was computed."""
    finish_reason: FinishReason | None = None
    """STOP or LENGTH with the last output; None: there is more."""


@dataclass(frozen=True)
class StageCoverage:
    """How many of the model's stages are there, or computed something."""

    stages: int
    total: int


class RequestRefused(Exception):
    """The queue is full, or too few stages are left; the argument says which, for people."""


class EngineClient(Protocol):
    """The engine. Text is encoded and decoded on one thread, which need not be the one that generates."""

    model: str
    """The model's name, to clients."""
    created: int
    """When the model was loaded, in seconds since 1970."""
    context: int
    """Tokens of prompt and answer at most."""
    vocabulary: int
    """Number of the model's tokens: ids are below it."""

    def coverage(self) -> StageCoverage:
        """The stages that are there; none where nothing can be answered."""

    def stats(self) -> dict[str, float]:
        """Values for Prometheus by their names, which end in _total if they only grow."""

    def encode(self, text: str) -> list[int]: ...

    def decode(self, tokens: Sequence[int]) -> str: ...

    def encode_chat(self, messages: Sequence[dict[str, str]]) -> list[int]:
        """A conversation as a prompt: each message has a role and content."""

    def generate(
        self, prompt: Sequence[int], max_tokens: int, sampling: SamplingParams, stop: Sequence[str]
    ) -> AsyncGenerator[RequestOutput, None]:
        """Output by output; the last one has a finish reason. Closing the iterator cancels. Raises RequestRefused."""
