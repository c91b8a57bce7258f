"""A request to generate text: how tokens are sampled, what has been generated so far, and tokens as text."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple

from skippipe.errors import UserError

BROKEN = "\N{REPLACEMENT CHARACTER}"
MAX_CHARACTER_TOKENS = 4  # as many as a character has bytes
MAX_LOGPROBS = 20  # of the likeliest tokens, beside the chosen one

TokenLogprobs = tuple[tuple[int, float], ...]
"""A token that was chosen and, after it, the likeliest at its position, each with its log-probability by the model."""


@dataclass(frozen=True)
class SamplingParams:
    """How the next token of a sequence is chosen."""

    temperature: float = 1.0
    """Divisor of the logits; 0: always the likeliest token."""
    top_k: int = 0
    """Number of the likeliest tokens that are sampled from; 0: all."""
    top_p: float = 1.0
    """Probability that the fewest likely tokens which are sampled from have together."""
    seed: int = 0
    """With a token's position it determines the noise, so that any node samples the same tokens."""
    min_p: float = 0.0
    """Tokens less likely than this share of the likeliest one's probability are not sampled."""
    repetition_penalty: float = 1.0
    """Divisor of the positive logits, factor of the negative ones, of every token that prompt or output has."""
    presence_penalty: float = 0.0
    """Subtracted from the logit of every token that the output has."""
    frequency_penalty: float = 0.0
    """Subtracted from a token's logit as often as the output has it."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """Tokens, and what is added to their logits."""
    logprobs: int | None = None
    """How many of the likeliest tokens are reported with their log-probabilities, beside the chosen one; None: not even
    that one."""

    def __post_init__(self) -> None:
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise UserError(f"temperature {self.temperature}: 0 (always the likeliest token) or a number above it")
        if self.top_k < 0:
            raise UserError(f"top-k {self.top_k}: a number of tokens, or 0 for all of them")
        if not 0 < self.top_p <= 1:
            raise UserError(f"top-p {self.top_p}: a share above 0, 1 at most")
        if not 0 <= self.min_p <= 1:
            raise UserError(f"min-p {self.min_p}: a share from 0 to 1")
        if not (math.isfinite(self.repetition_penalty) and self.repetition_penalty > 0):
            raise UserError(f"repetition penalty {self.repetition_penalty}: a number above 0; 1 changes nothing")
        added = self.presence_penalty, self.frequency_penalty, *(bias for _, bias in self.logit_bias)
        if not all(map(math.isfinite, added)):
            raise UserError("a presence penalty, frequency penalty or logit bias that is not finite")
        if self.logprobs is not None and not 0 <= self.logprobs <= MAX_LOGPROBS:
            raise UserError(f"{self.logprobs} log-probabilities: 0 to {MAX_LOGPROBS}")

    @property
    def changes_logits(self) -> bool:
        """Are logits changed by a bias or a penalty?"""
        return bool(self.logit_bias or self.repetition_penalty != 1 or self.presence_penalty or self.frequency_penalty)


class FinishReason(Enum):
    """Why a sequence has no further tokens."""

    STOP = "stop"
    """The model ended its text, or a stop string came."""
    LENGTH = "length"
    """The text has as many tokens as were asked for, or as the model's context has."""
    CANCELLED = "cancelled"
    UNAVAILABLE = "unavailable"
    """Too few stages were there for too long."""
    FAILED = "failed"
    """No node could compute it."""
    TOO_COMPLEX = "too_complex"
    """What constrains it became too complex to be followed."""


@dataclass(frozen=True)
class GenerationRequest:
    prompt: tuple[int, ...]
    max_tokens: int
    """Tokens to generate, at most."""
    sampling: SamplingParams = SamplingParams()
    stop: tuple[str, ...] = ()
    """Strings that end the text and are not part of it."""

    def __post_init__(self) -> None:
        if not self.prompt:
            raise UserError("a prompt has one token or more: that which begins a text, if there is nothing else")
        if self.max_tokens < 1:
            raise UserError(f"{self.max_tokens} tokens: at least one is generated")

    def max_length(self, context: int) -> int:
        """Tokens of prompt and output in the end, at most."""
        if len(self.prompt) >= context:
            raise UserError(
                f"a prompt of {len(self.prompt):,} tokens: the model looks at {context:,} and must have some left to "
                "write; shorten it"
            )
        return min(len(self.prompt) + self.max_tokens, context)


class TokenOutput(NamedTuple):
    """A token that was generated, and the text that became certain with it."""

    request: int
    """Number of the request, in the order in which they were added."""
    token: int
    text: str
    """New text; empty while a character or a stop string may be incomplete."""
    finish_reason: FinishReason | None


@dataclass(eq=False)
class Generation:
    """A request and its output so far."""

    number: int
    request: GenerationRequest
    max_length: int
    end_tokens: frozenset[int]
    """Tokens that end a text."""
    detokenizer: Detokenizer
    slot: int = -1
    """Its slot in the KV cache of every stage."""
    text: str = ""
    finish_reason: FinishReason | None = None

    def __post_init__(self) -> None:
        self.tokens = list(self.request.prompt)
        """Prompt and output so far."""

    @property
    def output_tokens(self) -> list[int]:
        return self.tokens[len(self.request.prompt) :]

    @property
    def remaining(self) -> int:
        """Tokens that may still be generated."""
        return self.max_length - len(self.tokens)

    def append(self, token: int) -> TokenOutput:
        assert self.finish_reason is None
        self.tokens.append(token)
        text = "" if token in self.end_tokens else self.detokenizer.push(token)
        if token in self.end_tokens or self.detokenizer.stopped:
            self.finish_reason = FinishReason.STOP
        elif not self.remaining:
            self.finish_reason = FinishReason.LENGTH
        if self.finish_reason:
            text += self.detokenizer.flush()
        self.text += text
        return TokenOutput(self.number, token, text, self.finish_reason)


class Detokenizer:
    """Tokens as text, incrementally: no broken characters, and nothing of a stop string."""

    def __init__(self, tokenizer: Any, prompt: Sequence[int], stop: Sequence[str] = ()) -> None:
        self._tokenizer = tokenizer
        self._stop = [text for text in stop if text]
        self._tokens = self._prompt_end(prompt)
        self._old = len(self._tokens)
        self._emitted = len(self._decode(self._tokens))
        """Characters of these tokens that were returned before."""
        self._held = ""
        """Text that may become a stop string."""
        self.stopped = False
        """A stop string has come."""

    def push(self, token: int) -> str:
        """The text that has become certain with this token."""
        assert not self.stopped
        self._tokens.append(token)
        self._held += self._complete_text()
        found = min((at for at in map(self._held.find, self._stop) if at >= 0), default=None)
        self.stopped = found is not None
        count = self._safe_length() if found is None else found
        text, self._held = self._held[:count], self._held[count:]
        return text

    def flush(self) -> str:
        """The end of the text, which might have become a stop string. An incomplete character is dropped."""
        rest, self._held = "" if self.stopped else self._held, ""
        return rest

    def _complete_text(self) -> str:
        """The new text that later tokens do not change."""
        text = self._decode(self._tokens)
        if text.endswith(BROKEN):
            if len(self._tokens) - self._old < MAX_CHARACTER_TOKENS:
                return ""
            for _ in range(MAX_CHARACTER_TOKENS - 1):  # bytes without sense; only the last few may become a character
                text = text.removesuffix(BROKEN)
            new, self._emitted = text[self._emitted :], max(self._emitted, len(text))
            return new
        new = text[self._emitted :]
        if new:
            del self._tokens[: self._old]
            self._old = len(self._tokens)
            self._emitted = len(self._decode(self._tokens))
        return new

    def _prompt_end(self, prompt: Sequence[int]) -> list[int]:
        """The end of the prompt: some tokenizers drop a space before the first of the tokens that they are given.

        From the beginning of a character, for bytes that belong to none can spoil those that follow them.
        """
        ends = [list(prompt[-count:]) for count in range(MAX_CHARACTER_TOKENS, 2 * MAX_CHARACTER_TOKENS)]
        return next((end for end in ends if not self._decode(end).startswith(BROKEN)), ends[0])

    def _decode(self, tokens: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return text

    def _safe_length(self) -> int:
        """Characters of the held text that can no longer become part of a stop string."""
        text = self._held
        for begin in range(max(0, len(text) - max(map(len, self._stop), default=0)), len(text)):
            if any(stop.startswith(text[begin:]) for stop in self._stop):
                return begin
        return len(text)
