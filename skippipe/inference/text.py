"""Tokens become text as they come: no broken characters, and nothing of a stop string."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

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
