"""What clients are told, in OpenAI's words: whole answers, and pieces of them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from skippipe.inference.request import SamplingParams
from skippipe.serving.engine_client import RequestOutput, StageCoverage

END_OF_STREAM = b"data: [DONE]\n\n"


@dataclass
class Choice:
    """One of the answers to a request, as far as it has come."""

    index: int
    prompt: tuple[int, ...]
    most: int
    """Tokens to answer with."""
    sampling: SamplingParams
    echo: str = ""
    """What stands before the answer."""
    pieces: list[str] = field(default_factory=list)
    tokens: int = 0
    """Of the answer."""
    visited: int = 0
    """Stages that the shortest way had by which a token of it was made."""
    ending: str | None = None
    told: bool = False
    """Does the client know that it is over?"""

    def add(self, said: RequestOutput) -> int:
        """How many tokens are new."""
        new = said.tokens - self.tokens
        self.pieces.append(said.text)
        self.tokens, self.visited, self.ending = said.tokens, said.visited, said.ending
        return new


@dataclass(frozen=True)
class ResponseBuilder:
    """All answers to one request."""

    id: str
    created: int
    model: str
    fingerprint: str
    chat: bool
    n: int
    """Answers to each prompt."""
    choices: Sequence[Choice]
    stages: int
    """Of the whole model."""

    @property
    def least(self) -> StageCoverage:
        """Of the model that a token was made by; to be asked when all answers are complete."""
        return StageCoverage(min(choice.visited for choice in self.choices), self.stages)

    def whole(self) -> dict[str, Any]:
        return {
            **self._head("chat.completion" if self.chat else "text_completion"),
            "choices": [self._choice(choice) for choice in self.choices],
            "usage": self._usage(),
            "skippipe": share_json(self.least),
        }

    def chunks(self, choice: Choice, said: RequestOutput, with_usage: bool) -> Iterator[dict[str, Any]]:
        """For a piece that `choice` has just been given. A stream without its usage ends with the last of them."""
        first = len(choice.pieces) == 1
        if self.chat and first:
            yield self._chunk(choice, {"role": "assistant", "content": ""}, None, with_usage)
        text = choice.echo + said.text if first else said.text
        if text:
            yield self._chunk(choice, {"content": text} if self.chat else text, None, with_usage)
        if said.ending is not None:
            last = self._chunk(choice, {} if self.chat else "", said.ending, with_usage)
            choice.told = True
            if not with_usage and all(each.told for each in self.choices):
                last["skippipe"] = share_json(self.least)
            yield last

    def usage_chunk(self) -> dict[str, Any]:
        return {**self._chunk_head(), "choices": [], "usage": self._usage(), "skippipe": share_json(self.least)}

    def _head(self, what: str) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": what,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.fingerprint,
        }

    def _chunk_head(self) -> dict[str, Any]:
        return self._head("chat.completion.chunk" if self.chat else "text_completion")

    def _choice(self, choice: Choice) -> dict[str, Any]:
        text = choice.echo + "".join(choice.pieces)
        message = {"role": "assistant", "content": text, "refusal": None}
        said = {"message": message} if self.chat else {"text": text}
        return {"index": choice.index, **said, "logprobs": None, "finish_reason": choice.ending}

    def _chunk(self, choice: Choice, new: Any, ending: str | None, with_usage: bool) -> dict[str, Any]:
        said = {"index": choice.index, "delta" if self.chat else "text": new, "logprobs": None, "finish_reason": ending}
        return {**self._chunk_head(), "choices": [said], **({"usage": None} if with_usage else {})}

    def _usage(self) -> dict[str, int]:
        """A prompt counts once, however many answers it gets."""
        asked = sum(len(choice.prompt) for choice in self.choices[:: self.n])
        answered = sum(choice.tokens for choice in self.choices)
        return {"prompt_tokens": asked, "completion_tokens": answered, "total_tokens": asked + answered}


def share_json(share: StageCoverage) -> dict[str, int]:
    return {"stages": share.stages, "of": share.total}


def share_text(share: StageCoverage) -> str:
    return f"{share.stages}/{share.total}"


def json_bytes(value: Any) -> bytes:
    """ASCII, whatever texts there are in it: also halves of characters that somebody sent us."""
    return json.dumps(value, allow_nan=False, separators=(",", ":")).encode()


def event(value: Any) -> bytes:
    """Of a stream of server-sent events."""
    return b"data: %b\n\n" % json_bytes(value)
