"""The addresses of the HTTP interface, and what is done there."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from dataclasses import replace
from hashlib import sha256
from typing import Any, NoReturn
from uuid import uuid4

from fastapi import FastAPI
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from skippipe import __version__
from skippipe.errors import UserError
from skippipe.serving.engine_client import EngineClient, RequestOutput, RequestRefused
from skippipe.serving.http.metrics import CONTENT_TYPE, Metrics
from skippipe.serving.http.middleware import RequestMetrics, body, while_there, within
from skippipe.serving.http.request_schema import (
    CompletionRequest,
    Conversation,
    RequestParser,
    ServedModel,
    parse_chat,
    parse_completion,
    read_object,
    seed_of,
)
from skippipe.serving.http.response_schema import (
    END_OF_STREAM,
    Choice,
    ResponseBuilder,
    event,
    json_bytes,
    share_json,
    share_text,
)
from skippipe.web.auth import ApiSettings, BearerAuth, RateLimiter
from skippipe.web.errors import APIError, no_such_model, short, too_slow, unavailable, wrong
from skippipe.web.server import check_installed

JSON = "application/json"
STAGES = "X-SkipPipe-Stages"
EVENTS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",  # or a proxy would keep them until the end
}
Hear = Callable[[Choice, RequestOutput], Awaitable[None]]


def application(answering: EngineClient, settings: ApiSettings) -> FastAPI:
    desk = ApiRoutes(answering, settings)
    return FastAPI(
        title="SkipPipe",
        version=__version__,
        openapi_url=None,  # requests are read by us, so it would be empty
        redirect_slashes=False,
        routes=[
            Route("/v1/models", desk.models),
            Route("/v1/models/{model:path}", desk.one_model),
            Route("/v1/completions", CompletionEndpoint(desk, parse_completion), methods=["POST"]),
            Route("/v1/chat/completions", CompletionEndpoint(desk, parse_chat), methods=["POST"]),
            Route("/health", desk.health),
            Route("/metrics", desk.metrics),
        ],
        middleware=[Middleware(RequestMetrics, tally=desk.tally)],
        exception_handlers={HTTPException: _not_here},
    )


class ApiRoutes:
    """What all endpoints share, and those that only tell something."""

    def __init__(self, answering: EngineClient, settings: ApiSettings) -> None:
        self.answering = answering
        self.settings = settings
        self.served = ServedModel(answering.model, answering.vocabulary, settings)
        self.tally = Metrics()
        self.turnstile = RateLimiter(settings, time.monotonic)
        self.tokenizer = ThreadPoolExecutor(1, "tokenizer")  # a long text must not hold up everybody's streams
        named = f"{answering.model} {answering.created} {__version__}"
        self.fingerprint = f"fp_{sha256(named.encode()).hexdigest()[:10]}"
        self._door = BearerAuth(settings)

    def admit(self, headers: Headers) -> int:
        return self._door.admit(headers.get("authorization"), headers.get("host"))

    async def models(self, request: Request) -> Response:
        self.admit(request.headers)
        return _json({"object": "list", "data": [self._model()]})

    async def one_model(self, request: Request) -> Response:
        self.admit(request.headers)
        if request.path_params["model"] != self.answering.model:
            raise no_such_model(request.path_params["model"], self.answering.model)
        return _json(self._model())

    async def health(self, _request: Request) -> Response:
        share = self.answering.share()
        status = "down" if not share.stages else "ok" if share.stages == share.total else "degraded"
        return _json({"status": status, **share_json(share)}, 200 if share.stages else 503)

    async def metrics(self, request: Request) -> Response:
        self.admit(request.headers)
        text = self.tally.text(self.answering.share(), self.answering.figures())
        return Response(text, headers={"Content-Type": CONTENT_TYPE})

    def _model(self) -> dict[str, Any]:
        return {
            "id": self.answering.model,
            "object": "model",
            "created": self.answering.created,
            "owned_by": "skippipe",
        }


class CompletionEndpoint:
    """An endpoint that answers."""

    def __init__(self, desk: ApiRoutes, read: RequestParser) -> None:
        self._desk = desk
        self._read = read

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        desk, headers = self._desk, Headers(scope=scope)
        with desk.turnstile.passing(desk.admit(headers)):
            asked = self._read(read_object(await body(headers, receive, desk.settings)), desk.served)
            await while_there(receive, self._answer(asked, scope, receive, send))

    async def _answer(self, asked: CompletionRequest, scope: Scope, receive: Receive, send: Send) -> None:
        most = self._desk.settings.answer
        async with within(most, too_slow(most)):
            reply = self._reply(asked, await self._choices(asked))
            if asked.stream:
                await self._in_pieces(reply, asked, send)
                return
            await self._hear_all(reply, asked, _nothing)
        await _json(reply.whole(), headers={STAGES: share_text(reply.least)})(scope, receive, send)

    async def _in_pieces(self, reply: ResponseBuilder, asked: CompletionRequest, send: Send) -> None:
        """The first piece comes before the status: until then it can still be an error."""
        talking = asyncio.Lock()
        begun = False

        async def tell(choice: Choice, said: RequestOutput) -> None:
            nonlocal begun
            async with talking:
                if not begun:
                    begun = True
                    headers = Headers({**EVENTS, STAGES: share_text(self._desk.answering.share())})
                    await send({"type": "http.response.start", "status": 200, "headers": headers.raw})
                events = b"".join(map(event, reply.chunks(choice, said, asked.usage)))
                if events:
                    await send({"type": "http.response.body", "body": events, "more_body": True})

        await self._hear_all(reply, asked, tell)
        end = event(reply.usage_chunk()) + END_OF_STREAM if asked.usage else END_OF_STREAM
        await send({"type": "http.response.body", "body": end, "more_body": False})

    async def _hear_all(self, reply: ResponseBuilder, asked: CompletionRequest, hear: Hear) -> None:
        """If one answer fails, all do."""
        try:
            async with asyncio.TaskGroup() as group:
                for choice in reply.choices:
                    group.create_task(self._hear(choice, asked.stops, hear))
        except ExceptionGroup as failed:
            raise failed.exceptions[0] from None

    async def _hear(self, choice: Choice, stops: Sequence[str], hear: Hear) -> None:
        answer = self._desk.answering.answer
        try:
            async with aclosing(answer(choice.prompt, choice.most, choice.sampling, stops)) as pieces:
                async for said in pieces:
                    self._desk.tally.answer_tokens += choice.add(said)
                    await hear(choice, said)
                    if said.ending is not None:
                        return
        except RequestRefused as refused:
            raise unavailable(str(refused), self._desk.settings.retry) from None
        raise RuntimeError("an answer stopped without an ending")

    async def _choices(self, asked: CompletionRequest) -> list[Choice]:
        loop = asyncio.get_running_loop()
        try:
            read = await loop.run_in_executor(self._desk.tokenizer, self._tokens, asked)
        except UserError as error:  # say, a conversation that the model's template does not foresee
            raise wrong(asked.param, str(error)) from None
        choices: list[Choice] = []
        for prompt, echo in read:
            if not prompt:
                raise wrong(asked.param, "no tokens are in it: say something")
            most = asked.most_after(len(prompt), self._desk.answering.context)
            for answer in range(asked.n):
                sampling = replace(asked.sampling, seed=seed_of(asked.sampling.seed, answer))
                choices.append(Choice(len(choices), prompt, most, sampling, echo))
            self._desk.tally.prompt_tokens += len(prompt)
        return choices

    def _tokens(self, asked: CompletionRequest) -> list[tuple[tuple[int, ...], str]]:
        """Of every prompt, and its text if that is to be repeated."""
        answering = self._desk.answering
        found: list[tuple[tuple[int, ...], str]] = []
        for prompt in asked.prompts:
            match prompt:
                case Conversation():
                    found.append((tuple(answering.chat_tokens(prompt.messages)), ""))
                case str():
                    found.append((tuple(answering.tokens(prompt)), prompt if asked.echo else ""))
                case _:
                    found.append((prompt, answering.text(prompt) if asked.echo else ""))
        return found

    def _reply(self, asked: CompletionRequest, choices: Sequence[Choice]) -> ResponseBuilder:
        desk = self._desk
        return ResponseBuilder(
            id=f"{'chatcmpl' if asked.chat else 'cmpl'}-{uuid4().hex}",
            created=int(time.time()),
            model=desk.answering.model,
            fingerprint=desk.fingerprint,
            chat=asked.chat,
            n=asked.n,
            choices=choices,
            stages=desk.answering.share().total,
        )


async def _nothing(_choice: Choice, _said: RequestOutput) -> None:
    """Whoever wants the answer in one piece hears nothing before its end."""


async def _not_here(request: Request, error: Exception) -> NoReturn:
    assert isinstance(error, HTTPException)
    path = short(request.scope["path"])  # request.url chokes on odd hosts
    if error.status_code == 405:
        allowed = ", ".join(sorted((error.headers or {}).get("Allow", "").split(", ")))
        message = f"{request.method} is not possible at {path}: use {allowed}"
        raise APIError(405, message, "method_not_allowed", headers={"Allow": allowed})
    message = f"there is nothing at {path}; answers are given at /v1/completions and /v1/chat/completions"
    raise APIError(error.status_code, message, "not_found")


def _json(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(json_bytes(value), status, headers, JSON)


def app(answering: EngineClient, settings: ApiSettings) -> FastAPI:
    check_installed()
    return application(answering, settings)
