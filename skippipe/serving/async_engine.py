"""Text in, text out: requests to the gateway, and their outputs as asynchronous iterators."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import threading
import time
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from skippipe.errors import UserError
from skippipe.inference.request import Detokenizer, FinishReason, SamplingParams
from skippipe.serving.engine_client import RequestOutput, RequestRefused, StageCoverage
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


class AsyncEngine:
    """The `EngineClient` of a model whose stages are on nodes."""

    def __init__(
        self,
        gateway: GatewayThread,
        tokenizer: Any,
        model: str,
        *,
        context: int,
        vocabulary: int,
        end_tokens: frozenset[int],
    ) -> None:
        self.model = model
        self.vocabulary = vocabulary
        self.created = int(time.time())
        self.context = context
        self._gateway = gateway
        self._tokenizer = tokenizer
        self._end_tokens = end_tokens

    def coverage(self) -> StageCoverage:
        return self._gateway.status.coverage

    def stats(self) -> dict[str, float]:
        return self._gateway.status.stats

    def encode(self, text: str) -> list[int]:
        """Tokens, with the special ones around them that the model was trained with."""
        found: list[int] = self._tokenizer(text)["input_ids"]
        return found

    def decode(self, tokens: Sequence[int]) -> str:
        found: str = self._tokenizer.decode(list(tokens), skip_special_tokens=True)
        return found

    def encode_chat(self, messages: Sequence[dict[str, str]]) -> list[int]:
        if getattr(self._tokenizer, "chat_template", None):
            try:
                with _bounded(TEMPLATE_S):
                    text = self._tokenizer.apply_chat_template(
                        list(messages), tokenize=False, add_generation_prompt=True
                    )
            except Exception as error:  # a template is a program of its own
                raise UserError(f"messages: the model's chat template does not take them: {error}") from None
            if len(text) > TEMPLATE_CHARACTERS:
                raise UserError(
                    f"messages: the model's chat template makes {len(text):,} characters of them; "
                    f"{TEMPLATE_CHARACTERS:,} at most are read"
                )
            found: list[int] = self._tokenizer(text, add_special_tokens=False)["input_ids"]  # the template has them
            return found
        text = "".join(f"{message['role'].capitalize()}: {message['content']}\n" for message in messages)
        return self.encode(f"{text}Assistant:")

    async def generate(
        self, prompt: Sequence[int], max_tokens: int, sampling: SamplingParams, stop: Sequence[str]
    ) -> AsyncGenerator[RequestOutput, None]:
        loop = asyncio.get_running_loop()
        updates: asyncio.Queue[_Update] = asyncio.Queue()
        submitted: list[int] = []
        closed = threading.Event()

        def put(update: _Update) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: no request waits any more
                loop.call_soon_threadsafe(updates.put_nowait, update)

        def begin(sequence: SequenceState) -> None:
            submitted.append(sequence.number)
            if closed.is_set():
                self._gateway.cancel(sequence.number)

        def updated(sequence: SequenceState) -> None:
            put((sequence.output_tokens, sequence.num_stages, sequence.finish_reason))

        self._gateway.submit(
            SequenceRequest(tuple(prompt), max_tokens, self._end_tokens, sampling), updated, put, begin
        )
        detokenizer = Detokenizer(self._tokenizer, prompt, stop)
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
                    if token in self._end_tokens or detokenizer.stopped:
                        break
                    text += detokenizer.push(token)
                if detokenizer.stopped:
                    reason = FinishReason.STOP
                if reason is not None:
                    text += detokenizer.flush()
                yield RequestOutput(text, num_tokens, num_stages, reason)
        finally:
            closed.set()
            for number in submitted:
                self._gateway.cancel(number)
