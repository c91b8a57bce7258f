"""The endpoints of the HTTP interface, which OpenAI's clients know (see docs/serving-api.md)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import aclosing
from dataclasses import dataclass
from hashlib import sha256
from typing import Any, NoReturn
from uuid import uuid4

from fastapi import FastAPI
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from skippipe import __version__
from skippipe.errors import UserError
from skippipe.serving.async_engine import (
    Constraint,
    EngineClient,
    EngineRequest,
    RequestOutput,
    RequestRefused,
    SchemaTooComplex,
    StageCoverage,
    UnknownTools,
)
from skippipe.serving.http.middleware import (
    AnswerTimer,
    Metrics,
    RequestMetrics,
    note_answer,
    read_body,
    while_connected,
    within,
)
from skippipe.serving.http.request_schema import (
    AnyRequest,
    ChatCompletionRequest,
    CompletionRequest,
    ServedModel,
    parse_request,
)
from skippipe.serving.http.response_schema import END_OF_STREAM, Choice, ResponseBuilder, event, json_bytes
from skippipe.web import (
    APIError,
    ApiSettings,
    BearerAuth,
    RateLimiter,
    check_installed,
    no_such_model,
    short,
    timed_out,
    unavailable,
    wrong,
)

LONG_BYTES = 2**16  # of a request; its text is encoded by a thread of its own
STAGES, MISSING = "X-SkipPipe-Stages", "X-SkipPipe-Missing-Stages"
EVENTS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",  # or a proxy would keep them until the end
}
ChoiceCallback = Callable[[Choice, RequestOutput], Awaitable[None]]


def application(
    engine: EngineClient, settings: ApiSettings, access_log: Callable[[str], None] | None = None
) -> FastAPI:
    """`access_log` gets a line for every request, but for those to /health and /metrics."""
    check_installed("prometheus_client")
    api = ApiRoutes(engine, settings)
    return FastAPI(
        title="SkipPipe",
        version=__version__,
        openapi_url=None,  # requests are read by us, so it would be empty
        redirect_slashes=False,
        routes=[
            Route("/v1/models", api.models),
            Route("/v1/models/{model:path}", api.one_model),
            Route("/v1/completions", CompletionEndpoint(api, CompletionRequest), methods=["POST"]),
            Route("/v1/chat/completions", CompletionEndpoint(api, ChatCompletionRequest), methods=["POST"]),
            Route("/health", api.health),
            Route("/metrics", api.read_metrics),
        ],
        middleware=[Middleware(RequestMetrics, metrics=api.metrics, access_log=access_log)],
        exception_handlers={HTTPException: _not_found},
    )


class ApiRoutes:
    """What all endpoints share, and the endpoints that only read something."""

    def __init__(self, engine: EngineClient, settings: ApiSettings) -> None:
        self.engine = engine
        self.settings = settings
        self.served = ServedModel(engine.model, engine.vocabulary, settings)
        self.metrics = Metrics(engine)
        self.rate_limiter = RateLimiter(settings, time.monotonic)
        # a text that takes seconds must hold up neither other requests' streams, nor their texts if these are short
        self.tokenizer, self.long_texts = (ThreadPoolExecutor(1, name) for name in ("tokenizer", "long texts"))
        named = f"{engine.model} {engine.created} {__version__}"
        self.fingerprint = f"fp_{sha256(named.encode()).hexdigest()[:10]}"
        self._auth = BearerAuth(settings)

    def admit(self, headers: Headers) -> int:
        return self._auth.admit(headers.get("authorization"), headers.get("host"))

    async def models(self, request: Request) -> Response:
        self.admit(request.headers)
        return _json({"object": "list", "data": [self._model()]})

    async def one_model(self, request: Request) -> Response:
        self.admit(request.headers)
        if request.path_params["model"] != self.engine.model:
            raise no_such_model(request.path_params["model"], self.engine.model)
        return _json(self._model())

    async def health(self, _request: Request) -> Response:
        coverage = self.engine.coverage()
        status = "down" if not coverage.stages else "ok" if coverage.stages == coverage.total else "degraded"
        return _json({"status": status, **coverage.to_json()}, 200 if coverage.stages else 503)

    async def read_metrics(self, request: Request) -> Response:
        self.admit(request.headers)
        return Response(generate_latest(self.metrics.registry), headers={"Content-Type": CONTENT_TYPE_LATEST})

    def _model(self) -> dict[str, Any]:
        return {"id": self.engine.model, "object": "model", "created": self.engine.created, "owned_by": "skippipe"}


@dataclass(frozen=True)
class CompletionEndpoint:
    """An endpoint that generates."""

    api: ApiRoutes
    schema: type[AnyRequest]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        api, headers = self.api, Headers(scope=scope)
        with api.rate_limiter.admit(api.admit(headers)):
            body = await read_body(headers, receive, api.settings)
            request = parse_request(self.schema, body, api.served)
            pool = api.tokenizer if len(body) < LONG_BYTES else api.long_texts
            await while_connected(receive, self._respond(request, pool, scope, receive, send))

    async def _respond(self, request: AnyRequest, pool: Executor, scope: Scope, receive: Receive, send: Send) -> None:
        timeout = self.api.settings.answer_timeout
        async with within(timeout, timed_out(timeout)):
            response = self._builder(request, await self._choices(request, pool))
            if request.stream:
                await self._stream(response, request, send)
                self._answered(response, scope)
                return
            await self._generate_all(response, _keep)
        self._answered(response, scope)
        await _json(response.whole(), headers=_stage_headers(response.coverage))(scope, receive, send)

    async def _stream(self, response: ResponseBuilder, request: AnyRequest, send: Send) -> None:
        """Sends outputs as events. The status follows the first output: until then it can still be an error."""
        sending = asyncio.Lock()
        begun = False

        async def send_output(choice: Choice, output: RequestOutput) -> None:
            nonlocal begun
            async with sending:
                if not begun:
                    begun = True
                    headers = Headers({**EVENTS, **_stage_headers(self.api.engine.coverage())})
                    await send({"type": "http.response.start", "status": 200, "headers": headers.raw})
                events = b"".join(map(event, response.chunks(choice, output, request.include_usage)))
                if events:
                    await send({"type": "http.response.body", "body": events, "more_body": True})

        await self._generate_all(response, send_output)
        end = event(response.usage_chunk()) + END_OF_STREAM if request.include_usage else END_OF_STREAM
        await send({"type": "http.response.body", "body": end, "more_body": False})

    def _answered(self, response: ResponseBuilder, scope: Scope) -> None:
        """A complete answer goes into the metrics and the access log."""
        tokens = sum(choice.num_tokens for choice in response.choices)
        for stage in response.coverage.missing:
            self.api.metrics.without_stage.labels(stage).inc()
        note_answer(scope, response.prompt_tokens, tokens, response.coverage)

    async def _generate_all(self, response: ResponseBuilder, callback: ChoiceCallback) -> None:
        """If one choice fails, all do."""
        try:
            async with asyncio.TaskGroup() as group:
                for choice in response.choices:
                    group.create_task(self._generate(choice, callback))
        except ExceptionGroup as failed:
            raise failed.exceptions[0] from None

    async def _generate(self, choice: Choice, callback: ChoiceCallback) -> None:
        timer = AnswerTimer(self.api.metrics)
        try:
            async with aclosing(self.api.engine.generate(choice.request)) as outputs:
                async for output in outputs:
                    timer.add(choice.add(output), output.queue_s)
                    await callback(choice, output)
                    if output.finish_reason is not None:
                        timer.end(output.finish_reason.value)
                        return
        except RequestRefused as refused:
            raise unavailable(str(refused), self.api.settings.retry_after) from None
        except SchemaTooComplex as error:
            raise wrong("response_format", str(error), "unsupported_value") from None
        raise RuntimeError("an answer stopped without a finish reason")

    async def _choices(self, request: AnyRequest, pool: Executor) -> list[Choice]:
        api, loop = self.api, asyncio.get_running_loop()
        try:
            prompts = await loop.run_in_executor(pool, self._encode, request)
        except UserError as error:  # say, a conversation that the model's template does not foresee
            raise wrong("tools" if isinstance(error, UnknownTools) else request.param, str(error)) from None
        constraint = await loop.run_in_executor(api.tokenizer, self._constraint, request)
        choices: list[Choice] = []
        for prompt, echo in prompts:
            if not prompt:
                raise wrong(request.param, "no tokens are in it: say something")
            most = request.max_new_tokens(len(prompt), api.engine.context, api.settings.max_tokens)
            for number in range(request.n):
                wanted = EngineRequest(
                    prompt, most, request.sampling(number), tuple(request.stop), request.ignore_eos, constraint
                )
                choices.append(Choice(len(choices), wanted, echo))
            api.metrics.prompt_tokens.inc(len(prompt))
        return choices

    def _encode(self, request: AnyRequest) -> list[tuple[tuple[int, ...], str]]:
        """The tokens of every prompt, and its text if that is to be repeated."""
        engine = self.api.engine
        if isinstance(request, ChatCompletionRequest):
            messages = [message.for_template() for message in request.messages]
            return [(tuple(engine.encode_chat(messages, request.tools_for_template)), "")]
        found: list[tuple[tuple[int, ...], str]] = []
        for prompt in request.prompts:
            tokens = engine.encode(prompt) if isinstance(prompt, str) else prompt
            text = prompt if isinstance(prompt, str) else engine.decode(prompt) if request.echo else ""
            found.append((tuple(tokens), text if request.echo else ""))
        return found

    def _constraint(self, request: AnyRequest) -> Constraint | None:
        schema = None if request.response_format is None else request.response_format.schema_wanted
        if schema is None:
            return None
        try:
            return self.api.engine.json_constraint(schema)
        except UserError as error:
            raise wrong("response_format", str(error), "unsupported_value") from None

    def _builder(self, request: AnyRequest, choices: Sequence[Choice]) -> ResponseBuilder:
        chat = isinstance(request, ChatCompletionRequest)
        return ResponseBuilder(
            id=f"{'chatcmpl' if chat else 'cmpl'}-{uuid4().hex}",
            created=int(time.time()),
            model=request.model,
            fingerprint=self.api.fingerprint,
            chat=chat,
            n=request.n,
            choices=choices,
            stages=self.api.engine.coverage().total,
        )


async def _keep(_choice: Choice, _output: RequestOutput) -> None:
    """A response in one piece is sent at the end: the choices keep the outputs until then."""


async def _not_found(request: Request, error: Exception) -> NoReturn:
    assert isinstance(error, HTTPException)
    path = short(request.scope["path"])  # request.url chokes on odd hosts
    if error.status_code == 405:
        allowed = ", ".join(sorted((error.headers or {}).get("Allow", "").split(", ")))
        message = f"{request.method} is not possible at {path}: use {allowed}"
        raise APIError(405, message, "method_not_allowed", headers={"Allow": allowed})
    message = f"there is nothing at {path}; answers are given at /v1/completions and /v1/chat/completions"
    raise APIError(error.status_code, message, "not_found")


def _stage_headers(coverage: StageCoverage) -> dict[str, str]:
    missing = {MISSING: ",".join(map(str, coverage.missing))} if coverage.missing else {}
    return {STAGES: str(coverage), **missing}


def _json(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(json_bytes(value), status, headers, "application/json")
