"""A request on its way to an answer."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from skippipe.inference.sampling import Sampling


@dataclass(frozen=True)
class Request:
    prompt: tuple[int, ...]
    most: int
    """Tokens to answer with."""
    ends: frozenset[int] = frozenset()
    """Tokens that end the answer."""
    sampling: Sampling = Sampling()  # noqa: RUF009 (frozen)

    @property
    def longest(self) -> int:
        """Tokens in the end."""
        return len(self.prompt) + self.most


class Ending(Enum):
    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    NO_WAY = "no way"
    """Too few stages were left for too long."""
    SPOILED = "spoiled"
    """No node could compute it."""


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
    spoiled: int = 0
    """Steps with it that could not be done."""
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
