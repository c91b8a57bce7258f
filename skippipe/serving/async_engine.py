"""Text in, text out: requests to the gateway's front, and what comes back as an asynchronous stream of words."""

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
from skippipe.inference.request import SamplingParams, TextStream
from skippipe.serving.engine_client import RequestOutput, RequestRefused, StageCoverage
from skippipe.serving.gateway_thread import GatewayThread
from skippipe.serving.scheduler import FinishReason, SequenceRequest, SequenceState

TEMPLATE_S = 5.0
"""For a chat template to make a text of a conversation: it comes with the model, and may loop for ever."""
TEMPLATE_CHARACTERS = 2**24
_News = tuple[list[int], int, FinishReason | None] | Exception
ENDINGS = {FinishReason.STOP: "stop", FinishReason.LENGTH: "length"}
REFUSALS = {
    FinishReason.NO_WAY: "too few stages of the model are there",
    FinishReason.SPOILED: "no node could compute it",
    FinishReason.CANCELLED: "the server is being stopped",
}


@contextmanager
def _bounded(seconds: float) -> Iterator[None]:
    """A deadline for Python code that loops: no thread can be stopped from outside, so this one looks at every line."""
    end = time.monotonic() + seconds

    def look(_frame: Any, _event: str, _argument: Any) -> Any:
        if time.monotonic() > end:
            raise TimeoutError(f"it is not done after {seconds:g} s")
        return look

    before = sys.gettrace()
    sys.settrace(look)
    try:
        yield
    finally:
        sys.settrace(before)


class AsyncEngine:
    """What `answering.Answering` asks for, by a model on nodes."""

    def __init__(
        self, front: GatewayThread, tokenizer: Any, model: str, *, context: int, vocabulary: int, ends: frozenset[int]
    ) -> None:
        """`ends`: tokens that end an answer."""
        self.model = model
        self.vocabulary = vocabulary
        self.created = int(time.time())
        self.context = context
        self._front = front
        self._tokenizer = tokenizer
        self._ends = ends

    def share(self) -> StageCoverage:
        return self._front.seen.share

    def figures(self) -> dict[str, float]:
        return self._front.seen.figures

    def tokens(self, text: str) -> list[int]:
        """With those around them that the model was trained with."""
        found: list[int] = self._tokenizer(text)["input_ids"]
        return found

    def text(self, tokens: Sequence[int]) -> str:
        found: str = self._tokenizer.decode(list(tokens), skip_special_tokens=True)
        return found

    def chat_tokens(self, messages: Sequence[dict[str, str]]) -> list[int]:
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
        said = "".join(f"{message['role'].capitalize()}: {message['content']}\n" for message in messages)
        return self.tokens(f"{said}Assistant:")

    async def answer(
        self, prompt: Sequence[int], most: int, sampling: SamplingParams, stops: Sequence[str]
    ) -> AsyncGenerator[RequestOutput, None]:
        loop = asyncio.get_running_loop()
        news: asyncio.Queue[_News] = asyncio.Queue()
        begun: list[int] = []
        gone = threading.Event()

        def put(found: _News) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
                loop.call_soon_threadsafe(news.put_nowait, found)

        def take(stream: SequenceState) -> None:
            begun.append(stream.number)
            if gone.is_set():
                self._front.cancel(stream.number)

        request = SequenceRequest(tuple(prompt), most, self._ends, sampling)
        self._front.submit(request, lambda stream: put((stream.answer, stream.visited, stream.ending)), put, take)
        text = TextStream(self._tokenizer, prompt, stops)
        done = 0
        over = False
        try:
            while not over:
                found = await news.get()
                if isinstance(found, Exception):
                    raise RequestRefused(str(found)) from None
                answer, visited, ending = found
                if ending in REFUSALS:
                    raise RequestRefused(REFUSALS[ending])
                said = ""
                for token in answer[done:]:
                    done += 1
                    if token in self._ends or text.stopped:
                        break
                    said += text.push(token)
                over = ending is not None or text.stopped
                if over:
                    said += text.rest()
                finish = "stop" if text.stopped else ENDINGS[ending] if ending else None
                yield RequestOutput(said, done, visited, finish)
        finally:
            gone.set()
            for number in begun:
                self._front.cancel(number)
