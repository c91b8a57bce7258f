"""Text in, text out: requests to the gateway's front, and what comes back as an asynchronous stream of words."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

from skippipe.inference.text import TextStream
from skippipe.serving.answering import Refused, Said, Share
from skippipe.serving.front import Front
from skippipe.serving.gateway import Full
from skippipe.serving.streams import Ending, Request, Sampling, Stream

ENDINGS = {Ending.STOP: "stop", Ending.LENGTH: "length"}


class Answers:
    """What `answering.Answering` asks for, by a model on nodes."""

    def __init__(self, front: Front, tokenizer: Any, model: str, context: int) -> None:
        self.model = model
        self.created = int(time.time())
        self.context = context
        self._front = front
        self._tokenizer = tokenizer
        self._ends = frozenset(
            each for each in (tokenizer.eos_token_id, *tokenizer.all_special_ids) if each is not None
        )

    def share(self) -> Share:
        gateway = self._front.gateway
        return Share(int(gateway.share * gateway.stages), gateway.stages)

    def figures(self) -> dict[str, float]:
        gateway = self._front.gateway
        lost = {name.replace(" ", "_") + "_total": float(count) for name, count in self._front.counted.items()}
        return {"nodes": float(len(gateway.stage_of)), "streams": float(len(gateway.streams)), **lost}

    def tokens(self, text: str) -> list[int]:
        found: list[int] = self._tokenizer.encode(text, add_special_tokens=False)
        return found

    def text(self, tokens: Sequence[int]) -> str:
        found: str = self._tokenizer.decode(list(tokens), skip_special_tokens=True)
        return found

    def chat_tokens(self, messages: Sequence[dict[str, str]]) -> list[int]:
        if getattr(self._tokenizer, "chat_template", None):
            text = self._tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True)
            return self.tokens(text)
        said = "".join(f"{message['role'].capitalize()}: {message['content']}\n" for message in messages)
        return self.tokens(f"{said}Assistant:")

    async def answer(
        self, prompt: Sequence[int], most: int, sampling: Sampling, stops: Sequence[str]
    ) -> AsyncIterator[Said]:
        loop = asyncio.get_running_loop()
        news: asyncio.Queue[tuple[list[int], int, Ending | None] | Exception] = asyncio.Queue()
        number: asyncio.Future[int] = loop.create_future()

        def tell(stream: Stream) -> None:
            state = stream.answer, stream.visited, stream.ending
            loop.call_soon_threadsafe(news.put_nowait, state)

        def begun(stream: Stream) -> None:
            loop.call_soon_threadsafe(number.set_result, stream.number)

        def refused(error: Exception) -> None:
            loop.call_soon_threadsafe(number.set_exception, error)

        request = Request(tuple(prompt), most, self._ends, sampling)
        self._front.submit(request, tell, refused, begun)
        try:
            stream = await number
        except Full as error:
            raise Refused(str(error)) from None
        text = TextStream(self._tokenizer, prompt, stops)
        done = 0
        over = False
        try:
            while not over:
                found = await news.get()
                assert not isinstance(found, Exception)
                answer, visited, ending = found
                if ending is Ending.NO_WAY:
                    raise Refused("too few stages of the model are there")
                said = ""
                for token in answer[done:]:
                    done += 1
                    if token in self._ends or text.stopped:
                        break
                    said += text.push(token)
                over = ending is not None or text.stopped
                if over:
                    said += text.rest()
                finish = "stop" if text.stopped else ENDINGS.get(ending, "stop") if ending else None
                yield Said(said, done, visited, finish)
        finally:
            self._front.cancel(stream)
