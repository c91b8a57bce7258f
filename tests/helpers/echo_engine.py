"""Stand-ins for a model: behind the HTTP interface, with ways to ask it, and token by token over virtual nodes."""

from __future__ import annotations

import asyncio
import json
import math
import socket
import threading
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import httpx2

from skippipe import web
from skippipe.errors import UserError
from skippipe.inference.request import FinishReason, SamplingParams
from skippipe.serving.async_engine import (
    Constraint,
    EngineRequest,
    RequestOutput,
    RequestRefused,
    StageCoverage,
    TextLogprob,
    UnknownTools,
)
from skippipe.serving.http import routes
from skippipe.serving.sequence import SequenceRequest
from skippipe.web import ApiSettings

MODEL = "org/mirror"
STAGES = 6
OPEN = ApiSettings(loopback=True, requests_per_minute=1_000_000)
PATIENCE_S = 60.0
VOCABULARY = 50
PLACES = {0: (0, 1), 1: (2, 3), 2: (4, 5), 3: (6,)}
"""Stage → its nodes."""
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


class EchoEngine:
    """Answers a prompt with its text backwards, character by character."""

    model = MODEL
    created = 1_700_000_000
    context = 100
    vocabulary = 0x110000

    def __init__(self) -> None:
        self.pause_s = 0.0
        """Pause before every token from `slow_from` on."""
        self.slow_from = 1
        self.refusal: str | None = None
        self.stages = STAGES
        self.lost: dict[int, int] = {}
        """Token → how many stages are left from there on; with none of them, the request is refused."""
        self.breaks_at: int | None = None
        """The token at which it raises `failure`."""
        self.failure: Exception = RuntimeError("node 7 of 10.0.0.9 sent nonsense")
        self.ends = True
        """Has the last output a finish reason?"""
        self.requests: list[tuple[tuple[int, ...], int, SamplingParams, tuple[str, ...]]] = []
        self.conversations: list[list[dict[str, Any]]] = []
        self.schemas: list[dict[str, Any]] = []
        self.tools: list[dict[str, Any]] = []
        self.knows_tools = True
        self.begun = threading.Event()
        self.cancelled = threading.Event()

    def coverage(self) -> StageCoverage:
        return StageCoverage(self.stages, STAGES, tuple(range(self.stages, STAGES)))

    def stage_nodes(self) -> list[int]:
        return [int(stage < self.stages) for stage in range(STAGES)]

    def stats(self) -> dict[str, float]:
        return {"steps_total": 12, "num_requests_running": 1.5}

    def encode(self, text: str) -> list[int]:
        return [ord(each) for each in text]

    def decode(self, tokens: Sequence[int]) -> str:
        return "".join(map(chr, tokens))

    def encode_chat(self, messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]] = ()) -> list[int]:
        if tools and not self.knows_tools:
            raise UnknownTools("no place for them")
        self.tools = list(tools)
        if messages[-1]["role"] == "assistant":
            raise UserError("the last word is the assistant's: end with the user's")
        self.conversations.append(list(messages))
        return self.encode(messages[-1]["content"])

    def json_constraint(self, schema: dict[str, Any]) -> Constraint:
        self.schemas.append(schema)
        raise UserError("nothing backwards is JSON")

    async def generate(self, request: EngineRequest) -> AsyncGenerator[RequestOutput, None]:
        prompt, max_tokens, sampling, stop = request.prompt, request.max_tokens, request.sampling, request.stop
        self.requests.append((prompt, max_tokens, sampling, stop))
        self.begun.set()
        if self.refusal is not None:
            raise RequestRefused(self.refusal)
        whole = self.decode(prompt)[::-1]
        found = [(whole.index(each), whole.index(each) + len(each)) for each in stop if each in whole]
        shown, until = min(found, default=(len(whole), len(whole)))
        num_stages = self.stages
        try:
            for count, each in enumerate(whole[:max_tokens], 1):
                await asyncio.sleep(self.pause_s if count >= self.slow_from else 0.0)
                if count == self.breaks_at:
                    raise self.failure
                self.stages = self.lost.get(count, self.stages)
                if not self.stages:
                    raise RequestRefused("no stage is left")
                num_stages = min(num_stages, self.stages)
                stopped = FinishReason.STOP if count == until else None
                reason = stopped or (FinishReason.LENGTH if count == max_tokens else None)
                text = each if count <= shown else ""
                missing = tuple(range(num_stages, STAGES))
                logprobs = () if sampling.logprobs is None else (_logprob(each, sampling.logprobs),)
                yield RequestOutput(text, count, num_stages, reason if self.ends else None, missing, logprobs, 0.25)
                if reason is not None:
                    return
        except (asyncio.CancelledError, GeneratorExit):
            self.cancelled.set()
            raise


def _logprob(each: str, most: int) -> TextLogprob:
    """As likely as one half; and after it in the alphabet, tokens that are half as likely each."""
    top = tuple(TextLogprob(chr(ord(each) + number), math.log(0.5 ** (number + 1))) for number in range(most))
    return TextLogprob(each, math.log(0.5), top)


class Caller:
    """Calls an application without a server."""

    def __init__(self, settings: ApiSettings = OPEN, access_log: Callable[[str], None] | None = None) -> None:
        self.engine = EchoEngine()
        self.app = routes.application(self.engine, settings, access_log)

    def __call__(self, method: str, path: str, **options: Any) -> httpx2.Response:
        return asyncio.run(self.request(method, path, **options))

    async def request(self, method: str, path: str, **options: Any) -> httpx2.Response:
        transport = httpx2.ASGITransport(self.app)
        async with httpx2.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            return await asyncio.wait_for(client.request(method, path, **options), PATIENCE_S)

    def post(self, path: str = COMPLETIONS, **fields: Any) -> httpx2.Response:
        body = json.dumps(valid(path) | fields)  # httpx2 would not send half a character
        return self("POST", path, content=body, headers={"Content-Type": "application/json"})


def valid(path: str) -> dict[str, Any]:
    if path == CHAT:
        return {"model": MODEL, "messages": [{"role": "user", "content": "hello"}]}
    return {"model": MODEL, "prompt": "hello"}


def api_error(response: httpx2.Response, status: int, code: str, param: str | None = None) -> str:
    """The message of an error, after a check of its shape."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    assert response.headers["x-request-id"].startswith("req_")
    body = response.json()
    assert body.keys() == {"error"}
    assert body["error"].keys() == {"message", "type", "param", "code"}
    assert (body["error"]["code"], body["error"]["param"]) == (code, param), body
    message: str = body["error"]["message"]
    assert message and message.isprintable()
    return message


def events(response: httpx2.Response) -> list[Any]:
    assert response.headers["content-type"].startswith("text/event-stream")
    lines = [line for line in response.text.split("\n\n") if line]
    assert all(line.startswith("data: ") for line in lines)
    return [line[6:] if line == "data: [DONE]" else json.loads(line[6:]) for line in lines]


@contextmanager
def serving(engine: EchoEngine, settings: ApiSettings = OPEN) -> Iterator[str]:
    """The address of a server on loopback, in a thread of its own."""
    with socket.create_server(("127.0.0.1", 0)) as listening:  # an early client waits in its backlog
        server = web.server(routes.application(engine, settings), "127.0.0.1", 0)
        thread = threading.Thread(target=lambda: asyncio.run(server.serve([listening])), daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join(PATIENCE_S)
            assert not thread.is_alive(), "the server did not stop"


def next_token(tokens: list[int], seed: int) -> int:
    """What the model says: any function of all that it was fed."""
    found = seed
    for token in tokens:
        found = (found * 31 + token + 1) % 1_000_003
    return found % VOCABULARY


def expected_tokens(request: SequenceRequest) -> list[int]:
    tokens = list(request.prompt)
    while len(tokens) < len(request.prompt) + request.max_tokens:
        tokens.append(next_token(tokens, request.sampling.seed))
        if tokens[-1] in request.end_tokens:
            break
    return tokens[len(request.prompt) :]
