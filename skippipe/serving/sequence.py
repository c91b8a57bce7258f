"""A request to the gateway, and its answer as far as it has been generated."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from skippipe.inference.request import FinishReason, SamplingParams, TokenLogprobs
from skippipe.serving.routing import ServingRoute


class TokenConstraint(Protocol):
    """Which tokens may follow in an answer of a given form; it follows the answer token by token."""

    def allowed(self) -> bytes:
        """Bit i is set if token i may come next."""

    def accepts(self, token: int) -> bool: ...

    def append(self, token: int) -> FinishReason | None:
        """The answer has another token; STOP if it is complete with it, TOO_COMPLEX if it cannot be followed."""


@dataclass(frozen=True)
class SequenceRequest:
    prompt: tuple[int, ...]
    max_tokens: int
    """Tokens to answer with, at most."""
    end_tokens: frozenset[int] = frozenset()
    """Tokens that end the answer."""
    sampling: SamplingParams = SamplingParams()  # noqa: RUF009 (frozen)
    constraint: Callable[[], TokenConstraint] | None = None
    """Makes what constrains the answer's tokens; None: any token may come."""

    @property
    def max_length(self) -> int:
        """Tokens of prompt and answer in the end."""
        return len(self.prompt) + self.max_tokens


@dataclass
class SequenceState:
    """A request on its way to an answer."""

    number: int
    request: SequenceRequest
    tokens: list[int] = field(default_factory=list)
    """Prompt and answer so far."""
    num_computed_tokens: int = 0
    """Tokens that are in the KV caches of its route."""
    route: int | None = None
    slot: int = -1
    """Its slot in the KV caches of the route's nodes."""
    num_stages: int = 0
    """Stages of the shortest route by which a token was computed; 0: none yet."""
    missing: set[int] = field(default_factory=set)
    """Stages without which a token was computed."""
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    """Log-probabilities of every token of the answer, if they were asked for."""
    waiting_since_ns: int = 0
    queue_ns: int | None = None
    """How long it waited for its first route; None: it still does."""
    failed_steps: int = 0
    """Steps that have failed since its last token."""
    finish_reason: FinishReason | None = None

    def __post_init__(self) -> None:
        self.tokens = [*self.request.prompt, *self.tokens]
        self.constraint = self.request.constraint() if self.request.constraint else None

    @property
    def output_tokens(self) -> list[int]:
        return self.tokens[len(self.request.prompt) :]

    def append(self, token: int, route: ServingRoute, logprobs: TokenLogprobs = ()) -> None:
        """Adds a token that was computed by this route."""
        self.tokens.append(token)
        self.num_stages = min(self.num_stages or len(route.path), len(route.path))
        self.missing.update(route.missing)
        if logprobs:
            self.logprobs.append(logprobs)
        if self.constraint is not None:
            self.finish_reason = self.constraint.append(token)
        if self.finish_reason is not None:
            return
        if token in self.request.end_tokens:
            self.finish_reason = FinishReason.STOP
        elif len(self.output_tokens) >= self.request.max_tokens:
            self.finish_reason = FinishReason.LENGTH
