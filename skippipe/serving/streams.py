"""A request on its way to an answer."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen."""

    temperature: float = 1.0
    """0: always the most likely one."""
    top_k: int = 0
    """Of so many most likely ones; 0: of all."""
    top_p: float = 1.0
    """Of as few as have this probability together."""
    seed: int = 0
    """With the place of a token it says what chance says, so that any node gives the same answer."""


@dataclass(frozen=True)
class Request:
    prompt: tuple[int, ...]
    most: int
    """Tokens to answer with."""
    ends: frozenset[int] = frozenset()
    """Tokens that end the answer."""
    sampling: Sampling = Sampling()


class Ending(Enum):
    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    NO_WAY = "no way"
    """Too few stages were left for too long."""


@dataclass
class Stream:
    number: int
    request: Request
    tokens: list[int] = field(default_factory=list)
    """Prompt and answer so far."""
    fed: int = 0
    """Tokens that the stages of its lane have seen."""
    lane: int | None = None
    slot: int = -1
    """Its place in the caches of the lane's nodes."""
    visited: int = 0
    """Stages that the shortest lane had by which a token was made; 0: none yet."""
    waits_since_ns: int = 0
    ending: Ending | None = None

    def __post_init__(self) -> None:
        self.tokens = [*self.request.prompt, *self.tokens]

    @property
    def answer(self) -> list[int]:
        return self.tokens[len(self.request.prompt) :]

    def add(self, token: int, visited: int) -> None:
        """A token was made by so many stages."""
        self.tokens.append(token)
        self.visited = min(self.visited, visited) if self.visited else visited
        if token in self.request.ends:
            self.ending = Ending.STOP
        elif len(self.answer) >= self.request.most:
            self.ending = Ending.LENGTH
