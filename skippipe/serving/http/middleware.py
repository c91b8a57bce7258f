"""Around every request: it gets an id and is counted for Prometheus, its body is read within limits, it ends with its
client, and whatever goes wrong becomes an error in OpenAI's shape."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import uuid4

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from skippipe.serving.async_engine import EngineClient, StageCoverage
from skippipe.serving.http.response_schema import event, json_bytes
from skippipe.web import APIError, ApiSettings, internal_error, short, too_large

TOKEN_BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)
BUCKETS_S = (0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
log = logging.getLogger(__name__)
CLIENT_CLOSED_REQUEST = 499  # nginx's status for the log; no client sees it
CLOSE_S = 5.0  # for a client that does not read to be sent why its stream ends
ENDPOINTS = ("/v1/models", "/v1/completions", "/v1/chat/completions", "/health", "/metrics")
UNLOGGED = ("/health", "/metrics")  # programs ask them every few seconds
MODEL = "/v1/models/"
ANSWER = "skippipe.answer"  # the key in a request's scope of what the access log says of its answer
CLOSE = {"Connection": "close"}  # the rest of the request is not read
DISCARD_LIMIT = 8  # times max_body_bytes that are read and discarded: a client that still sends reads no answer


class Metrics(Collector):
    """Counts of the HTTP server, and the engine's at the moment they are read."""

    def __init__(self, engine: EngineClient) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self._engine = engine
        self.registry = own = CollectorRegistry()
        labels = ["endpoint", "status"]
        self.requests = Counter("skippipe_requests", "Requests by endpoint and status.", labels, registry=own)
        self.seconds = Histogram(
            "skippipe_request_seconds",
            "From a request to the end of its answer.",
            labels[:1],
            registry=own,
            buckets=BUCKETS_S,
        )
        self.in_flight = Gauge("skippipe_requests_in_flight", "Requests that are being answered.", registry=own)
        self.prompt_tokens = Counter("skippipe_prompt_tokens", "Tokens of prompts.", registry=own)
        self.generation_tokens = Counter("skippipe_generation_tokens", "Tokens of answers.", registry=own)
        self.finished = Counter(
            "skippipe_request_success", "Answers by why they ended.", ["finished_reason"], registry=own
        )
        self.without_stage = Counter(
            "skippipe_answers_without_stage",
            "Answers that did without a stage, in part at least.",
            ["stage"],
            registry=own,
        )
        self.first_token_s = _histogram("time_to_first_token", "From a request to its first token.", BUCKETS_S, own)
        self.token_s = _histogram("time_per_output_token", "From one token to the next.", TOKEN_BUCKETS_S, own)
        self.queue_s = _histogram("request_queue_time", "How long requests wait for a place.", BUCKETS_S, own)
        self.whole_s = _histogram("e2e_request_latency", "From a request to its last token.", BUCKETS_S, own)
        own.register(self)

    def collect(self) -> Iterator[Metric]:
        coverage = self._engine.coverage()
        yield GaugeMetricFamily("skippipe_stages", "Stages of the model.", coverage.total)
        yield GaugeMetricFamily("skippipe_stages_there", "Stages that a live node holds.", coverage.stages)
        nodes = GaugeMetricFamily("skippipe_stage_nodes", "Live nodes that hold a stage.", labels=["stage"])
        for stage, count in enumerate(self._engine.stage_nodes()):
            nodes.add_metric([str(stage)], count)
        yield nodes
        for name, value in sorted(self._engine.stats().items()):
            family = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
            yield family(f"skippipe_{name}", "Of the gateway.", value)


def _histogram(name: str, what: str, buckets: tuple[float, ...], registry: CollectorRegistry) -> Histogram:
    return Histogram(f"skippipe_{name}_seconds", what, registry=registry, buckets=buckets)


class AnswerTimer:
    """Times one answer for the metrics, from its request on."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._began_s = time.monotonic()
        self._last_s: float | None = None
        """When the last token came."""

    def add(self, new: int, queue_s: float) -> None:
        """So many tokens have come, of an answer that waited for its place so long."""
        now_s = time.monotonic()
        self._metrics.generation_tokens.inc(new)
        if self._last_s is None:
            self._metrics.queue_s.observe(queue_s)
            self._metrics.first_token_s.observe(now_s - self._began_s)
        else:
            self._metrics.token_s.observe((now_s - self._last_s) / max(1, new))
        self._last_s = now_s

    def end(self, reason: str) -> None:
        self._metrics.finished.labels(reason).inc()
        self._metrics.whole_s.observe(time.monotonic() - self._began_s)


def note_answer(scope: Scope, prompt_tokens: int, tokens: int, coverage: StageCoverage) -> None:
    """What an answer was, for the access log."""
    missing = f" missing={','.join(map(str, coverage.missing))}" if coverage.missing else ""
    scope[ANSWER].append(f"prompt_tokens={prompt_tokens} tokens={tokens} stages={coverage}{missing}")


@dataclass(frozen=True)
class RequestMetrics:
    """Middleware that counts requests, and answers with an error where one is raised."""

    app: ASGIApp
    metrics: Metrics
    access_log: Callable[[str], None] | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        began_s = time.monotonic()
        response = _Response(f"req_{uuid4().hex}", send)
        scope[ANSWER] = []
        self.metrics.in_flight.inc()
        try:
            await self.app(scope, receive, response.send)
        except ClientDisconnected:
            response.status = CLIENT_CLOSED_REQUEST
        except APIError as error:
            await response.fail(error, scope, receive)
        except Exception:
            log.exception("%s: %a %a failed", response.request_id, scope["method"], scope["path"])
            await response.fail(internal_error(response.request_id), scope, receive)
        finally:
            self.metrics.in_flight.dec()
            endpoint = _endpoint(scope["path"])
            status, seconds = response.status or CLIENT_CLOSED_REQUEST, time.monotonic() - began_s
            self.metrics.requests.labels(endpoint, status).inc()
            self.metrics.seconds.labels(endpoint).observe(seconds)
            if self.access_log is not None and endpoint not in UNLOGGED:
                client = (scope.get("client") or ("-",))[0]
                now = datetime.now(UTC).isoformat(timespec="milliseconds")
                what = f"{scope['method']} {short(scope['path']).replace(' ', '_')} {status} {seconds:.3f}s"
                self.access_log(" ".join([now, client, what, *scope[ANSWER], response.request_id]))


@dataclass
class _Response:
    """The response to a request, while it is sent."""

    request_id: str
    to_client: Send
    status: int = 0
    """0: nothing has been sent yet."""

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            MutableHeaders(scope=message)["x-request-id"] = self.request_id
        await self.to_client(message)

    async def fail(self, error: APIError, scope: Scope, receive: Receive) -> None:
        if not self.status:
            respond = Response(json_bytes(error.body), error.status, error.headers, "application/json")
            await respond(scope, receive, self.send)
            return
        self.status = error.status  # for the metrics: the client has got status 200 and a part of the answer
        with suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_S):
                await self.to_client({"type": "http.response.body", "body": event(error.body), "more_body": False})


def _endpoint(path: str) -> str:
    """The label of a path: one of a few, whatever paths are tried."""
    if path in ENDPOINTS:
        return path
    return f"{MODEL}{{model}}" if path.startswith(MODEL) else "other"


class ClientDisconnected(Exception):
    """The client has closed its connection."""


async def read_body(headers: Headers, receive: Receive, settings: ApiSettings) -> bytes:
    _check_media_type(headers)
    length = headers.get("content-length", "")
    declared = int(length[:20]) if length.isdecimal() else 0
    if declared > DISCARD_LIMIT * settings.max_body_bytes:
        raise too_large(settings.max_body_bytes)
    late = APIError(
        408,
        f"the request was not here after {settings.body_timeout.total_seconds():g} s",
        "request_timeout",
        headers=CLOSE,
    )
    async with within(settings.body_timeout, late):
        if declared > settings.max_body_bytes:
            await _discard(receive)
            raise too_large(settings.max_body_bytes)
        return await _read_all(receive, settings.max_body_bytes)


async def while_connected(receive: Receive, work: Coroutine[Any, Any, None]) -> None:
    """Awaits the work, or cancels it with ClientDisconnected when the client closes its connection."""
    working, leaving = asyncio.create_task(work), asyncio.create_task(_disconnected(receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnected
        working.result()
    finally:
        working.cancel()
        leaving.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


@asynccontextmanager
async def within(timeout: timedelta, late: APIError) -> AsyncIterator[None]:
    """Raises `late` when the time is over."""
    try:
        async with asyncio.timeout(timeout.total_seconds()) as deadline:
            yield
    except TimeoutError:
        if not deadline.expired():
            raise
        raise late from None


def _check_media_type(headers: Headers) -> None:
    """JSON alone: a web page cannot send that to us from a visitor's browser without our leave, but other types."""
    kind = headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        message = "requests have to be JSON: send the header 'Content-Type: application/json'"
        raise APIError(415, message, "unsupported_media_type", headers=CLOSE)
    if headers.get("content-encoding", "identity").lower() != "identity":
        message = "compressed requests are not read: send them without 'Content-Encoding'"
        raise APIError(415, message, "unsupported_media_type", headers=CLOSE)


async def _read_all(receive: Receive, max_bytes: int) -> bytes:
    parts = bytearray()
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnected
        parts += message.get("body", b"")
        if len(parts) > max_bytes:
            raise too_large(max_bytes)
        if not message.get("more_body", False):
            return bytes(parts)


async def _discard(receive: Receive) -> None:
    while (message := await receive())["type"] != "http.disconnect" and message.get("more_body", False):
        pass


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
