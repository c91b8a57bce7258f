"""The engine of the HTTP interface: text in, text out. Requests go to the gateway, their outputs come as asynchronous
iterators; `EngineClient` is all that the interface knows of it."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

from skippipe.errors import UserError
from skippipe.inference.request import Detokenizer, FinishReason, SamplingParams
from skippipe.serving.gateway_thread import GatewayThread
from skippipe.serving.scheduler import SequenceRequest, SequenceState

TEMPLATE_S = 5.0
"""Deadline of a chat template: it is a program that comes with the model, and may loop for ever."""
TEMPLATE_CHARACTERS = 2**24
_Update = tuple[list[int], int, FinishReason | None] | Exception
REFUSALS = {
    FinishReason.UNAVAILABLE: "too few stages of the model are there",
    FinishReason.FAILED: "no node could compute it",
    FinishReason.CANCELLED: "the server is being stopped",
}


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

    def __str__(self) -> str:
        return f"{self.stages}/{self.total}"

    def to_json(self) -> dict[str, int]:
        return {"stages": self.stages, "of": self.total}


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


@contextmanager
def _bounded(seconds: float) -> Iterator[None]:
    """A deadline for Python code that loops: no thread can be stopped from outside, so this one checks every line."""
    end = time.monotonic() + seconds

    def check(_frame: Any, _event: str, _argument: Any) -> Any:
        if time.monotonic() > end:
            raise TimeoutError(f"it is not done after {seconds:g} s")
        return check

    before = sys.gettrace()
    sys.settrace(check)
    try:
        yield
    finally:
        sys.settrace(before)


@dataclass
class AsyncEngine:
    """The `EngineClient` of a model whose stages are on nodes."""

    gateway: GatewayThread
    tokenizer: Any
    """A tokenizer of transformers."""
    model: str
    context: int
    vocabulary: int
    end_tokens: frozenset[int]
    created: int = field(init=False, default_factory=lambda: int(time.time()))

    def coverage(self) -> StageCoverage:
        return StageCoverage(self.gateway.covered_stages, self.gateway.stages)

    def stats(self) -> dict[str, float]:
        return self.gateway.stats

    def encode(self, text: str) -> list[int]:
        """Tokens, with the special ones around them that the model was trained with."""
        found: list[int] = self.tokenizer(text)["input_ids"]
        return found

    def decode(self, tokens: Sequence[int]) -> str:
        found: str = self.tokenizer.decode(list(tokens), skip_special_tokens=True)
        return found

    def encode_chat(self, messages: Sequence[dict[str, str]]) -> list[int]:
        if getattr(self.tokenizer, "chat_template", None):
            try:
                with _bounded(TEMPLATE_S):
                    text = self.tokenizer.apply_chat_template(
                        list(messages), tokenize=False, add_generation_prompt=True
                    )
            except Exception as error:  # a template is a program of its own
                raise UserError(f"messages: the model's chat template does not take them: {error}") from None
            if len(text) > TEMPLATE_CHARACTERS:
                raise UserError(
                    f"messages: the model's chat template makes {len(text):,} characters of them; "
                    f"{TEMPLATE_CHARACTERS:,} at most are read"
                )
            found: list[int] = self.tokenizer(text, add_special_tokens=False)["input_ids"]  # the template has them
            return found
        text = "".join(f"{message['role'].capitalize()}: {message['content']}\n" for message in messages)
        return self.encode(f"{text}Assistant:")

    async def generate(
        self, prompt: Sequence[int], max_tokens: int, sampling: SamplingParams, stop: Sequence[str]
    ) -> AsyncGenerator[RequestOutput, None]:
        loop = asyncio.get_running_loop()
        updates: asyncio.Queue[_Update] = asyncio.Queue()

        def put(update: _Update) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: no request waits any more
                loop.call_soon_threadsafe(updates.put_nowait, update)

        def updated(sequence: SequenceState) -> None:
            put((sequence.output_tokens, sequence.num_stages, sequence.finish_reason))

        self.gateway.submit(SequenceRequest(tuple(prompt), max_tokens, self.end_tokens, sampling), updated, put)
        detokenizer = Detokenizer(self.tokenizer, prompt, stop)
        num_tokens, reason = 0, None
        try:
            while reason is None:
                update = await updates.get()
                if isinstance(update, Exception):
                    raise RequestRefused(str(update)) from None
                tokens, num_stages, reason = update
                if reason in REFUSALS:
                    raise RequestRefused(REFUSALS[reason])
                text = ""
                for token in tokens[num_tokens:]:
                    num_tokens += 1
                    if token in self.end_tokens or detokenizer.stopped:
                        break
                    text += detokenizer.push(token)
                if detokenizer.stopped:
                    reason = FinishReason.STOP
                if reason is not None:
                    text += detokenizer.flush()
                yield RequestOutput(text, num_tokens, num_stages, reason)
        finally:
            self.gateway.cancel(updated)
