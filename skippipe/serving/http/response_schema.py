"""The OpenAI response schema: completions in one piece, and chunks of a stream."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

from skippipe.inference.request import BROKEN
from skippipe.serving.async_engine import EngineRequest, RequestOutput, StageCoverage, TextLogprob

END_OF_STREAM = b"data: [DONE]\n\n"


@dataclass
class Choice:
    """One of the answers to a request, as far as it has been generated."""

    index: int
    request: EngineRequest
    echo: str = ""
    """The prompt's text, where it is to stand before the answer."""
    texts: list[str] = field(default_factory=list)
    logprobs: list[TextLogprob] = field(default_factory=list)
    """Log-probabilities of every token, if they were asked for."""
    num_tokens: int = 0
    num_stages: int = 0
    """Stages of the shortest route by which a token of the answer was computed."""
    missing: tuple[int, ...] = ()
    """Stages without which a token of the answer was computed."""
    finish_reason: str | None = None
    finish_sent: bool = False
    """Has the stream's client been sent the finish reason?"""

    def add(self, output: RequestOutput) -> int:
        """The number of tokens that are new."""
        new = output.num_tokens - self.num_tokens
        self.texts.append(output.text)
        self.logprobs += output.logprobs
        self.missing = output.missing
        self.num_tokens, self.num_stages = output.num_tokens, output.num_stages
        self.finish_reason = output.finish_reason.value if output.finish_reason else None
        return new


@dataclass(frozen=True)
class ResponseBuilder:
    """The response to one request, in JSON."""

    id: str
    created: int
    model: str
    fingerprint: str
    chat: bool
    n: int
    """Choices for each prompt."""
    choices: Sequence[Choice]
    stages: int
    """Stages of the whole model."""

    @property
    def coverage(self) -> StageCoverage:
        """The fewest stages by which a token was computed; to be read when all choices are complete."""
        missing = sorted({stage for choice in self.choices for stage in choice.missing})
        return StageCoverage(min(choice.num_stages for choice in self.choices), self.stages, tuple(missing))

    @property
    def prompt_tokens(self) -> int:
        """A prompt counts once, however many choices it gets."""
        return sum(len(choice.request.prompt) for choice in self.choices[:: self.n])

    def whole(self) -> dict[str, Any]:
        return {
            **self._head("chat.completion" if self.chat else "text_completion"),
            "choices": [self._choice(choice) for choice in self.choices],
            "usage": self._usage(),
            "skippipe": self.coverage.to_json(),
        }

    def chunks(self, choice: Choice, output: RequestOutput, with_usage: bool) -> Iterator[dict[str, Any]]:
        """Chunks for an output that was just added to `choice`; the very last one carries the coverage, unless a chunk
        with the usage follows."""
        first = len(choice.texts) == 1
        if self.chat and first:
            yield self._chunk(choice, {"role": "assistant", "content": ""}, None, with_usage)
        text = choice.echo + output.text if first else output.text
        if text or output.logprobs:
            chunk = self._chunk(choice, {"content": text} if self.chat else text, None, with_usage)
            chunk["choices"][0]["logprobs"] = self._logprobs(choice, output.logprobs)
            yield chunk
        if choice.finish_reason is not None:
            last = self._chunk(choice, {} if self.chat else "", choice.finish_reason, with_usage)
            choice.finish_sent = True
            if not with_usage and all(each.finish_sent for each in self.choices):
                last["skippipe"] = self.coverage.to_json()
            yield last

    def usage_chunk(self) -> dict[str, Any]:
        return {**self._chunk_head(), "choices": [], "usage": self._usage(), "skippipe": self.coverage.to_json()}

    def _head(self, kind: str) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.fingerprint,
        }

    def _chunk_head(self) -> dict[str, Any]:
        return self._head("chat.completion.chunk" if self.chat else "text_completion")

    def _choice(self, choice: Choice) -> dict[str, Any]:
        text = choice.echo + "".join(choice.texts)
        message = {"role": "assistant", "content": text, "refusal": None}
        content = {"message": message} if self.chat else {"text": text}
        logprobs = self._logprobs(choice, choice.logprobs)
        return {"index": choice.index, **content, "logprobs": logprobs, "finish_reason": choice.finish_reason}

    def _chunk(self, choice: Choice, new: Any, finish: str | None, with_usage: bool) -> dict[str, Any]:
        delta = {"delta" if self.chat else "text": new}
        one = {"index": choice.index, **delta, "logprobs": None, "finish_reason": finish}
        return {**self._chunk_head(), "choices": [one], **({"usage": None} if with_usage else {})}

    def _logprobs(self, choice: Choice, new: Sequence[TextLogprob]) -> dict[str, Any] | None:
        """Log-probabilities of the choice's newest tokens."""
        if choice.request.sampling.logprobs is None:
            return None
        if self.chat:
            content = [{**_chat_logprob(each), "top_logprobs": list(map(_chat_logprob, each.top))} for each in new]
            return {"content": content, "refusal": None}
        before = sum(len(each.text) for each in choice.logprobs[: len(choice.logprobs) - len(new)])
        lengths = [len(each.text) for each in new]
        return {
            "tokens": [each.text for each in new],
            "token_logprobs": [each.logprob for each in new],
            "top_logprobs": list(map(_by_text, new)),
            "text_offset": list(accumulate(lengths[:-1], initial=before)) if new else [],
        }

    def _usage(self) -> dict[str, int]:
        prompt = self.prompt_tokens
        completion = sum(choice.num_tokens for choice in self.choices)
        return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def _by_text(each: TextLogprob) -> dict[str, float]:
    """The likeliest tokens and the chosen one; of two with the same text the likelier one."""
    found: dict[str, float] = {}
    for one in (*each.top, each):
        found.setdefault(one.text, one.logprob)
    return found


def _chat_logprob(each: TextLogprob) -> dict[str, Any]:
    """A part of a character has no bytes that are known here."""
    known = None if BROKEN in each.text else list(each.text.encode())
    return {"token": each.text, "logprob": each.logprob, "bytes": known}


def json_bytes(value: Any) -> bytes:
    """JSON in ASCII, so that halves of characters which a client sent can be repeated to it."""
    return json.dumps(value, allow_nan=False, separators=(",", ":")).encode()


def event(value: Any) -> bytes:
    """One event of a stream of server-sent events."""
    return b"data: %b\n\n" % json_bytes(value)
