"""Stand-ins for a model: behind the HTTP interface, with ways to ask it, and token by token over virtual nodes."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import httpx2

from skippipe.errors import UserError
from skippipe.inference.request import SamplingParams
from skippipe.serving.engine_client import RequestOutput, RequestRefused, StageCoverage
from skippipe.serving.http import routes
from skippipe.serving.scheduler import SequenceRequest
from skippipe.web import server as web_server
from skippipe.web.auth import ApiSettings

MODEL = "org/mirror"
STAGES = 6
OPEN = ApiSettings(loopback=True, requests_a_minute=1_000_000)
PATIENCE_S = 10.0
VOCABULARY = 50
PLACES = {0: (0, 1), 1: (2, 3), 2: (4, 5), 3: (6,)}
"""Stage → its nodes."""
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


class Mirror:
    """Answers a prompt with the same backwards, character by character."""

    model = MODEL
    created = 1_700_000_000
    context = 100
    vocabulary = 0x110000

    def __init__(self) -> None:
        self.pause_s = 0.0
        """Before every token from this one on."""
        self.slow_from = 1
        self.refusal: str | None = None
        self.stages = STAGES
        self.lost: dict[int, int] = {}
        """Token → how many stages are left from there on; with none of them, it is refused."""
        self.breaks_at: int | None = None
        """The token at which it fails as nobody foresaw."""
        self.failure: Exception = RuntimeError("node 7 of 10.0.0.9 sent nonsense")
        self.ends = True
        """Does it say that it is over?"""
        self.asked: list[tuple[tuple[int, ...], int, SamplingParams, tuple[str, ...]]] = []
        self.conversations: list[list[dict[str, str]]] = []
        self.begun = threading.Event()
        self.cancelled = threading.Event()

    def share(self) -> StageCoverage:
        return StageCoverage(self.stages, STAGES)

    def figures(self) -> dict[str, float]:
        return {"steps_total": 12, "streams": 1.5}

    def tokens(self, text: str) -> list[int]:
        return [ord(each) for each in text]

    def text(self, tokens: Sequence[int]) -> str:
        return "".join(map(chr, tokens))

    def chat_tokens(self, messages: Sequence[dict[str, str]]) -> list[int]:
        if messages[-1]["role"] == "assistant":
            raise UserError("the last word is the assistant's: end with the user's")
        self.conversations.append(list(messages))
        return self.tokens(messages[-1]["content"])

    async def answer(
        self, prompt: Sequence[int], most: int, sampling: SamplingParams, stops: Sequence[str]
    ) -> AsyncGenerator[RequestOutput, None]:
        self.asked.append((tuple(prompt), most, sampling, tuple(stops)))
        self.begun.set()
        if self.refusal is not None:
            raise RequestRefused(self.refusal)
        whole = self.text(prompt)[::-1]
        found = [(whole.index(stop), whole.index(stop) + len(stop)) for stop in stops if stop in whole]
        shown, until = min(found, default=(len(whole), len(whole)))
        visited = self.stages
        try:
            for count, each in enumerate(whole[:most], 1):
                await asyncio.sleep(self.pause_s if count >= self.slow_from else 0.0)
                if count == self.breaks_at:
                    raise self.failure
                self.stages = self.lost.get(count, self.stages)
                if not self.stages:
                    raise RequestRefused("no stage is left")
                visited = min(visited, self.stages)
                ending = "stop" if count == until else "length" if count == most else None
                yield RequestOutput(each if count <= shown else "", count, visited, ending if self.ends else None)
                if ending is not None:
                    return
        except (asyncio.CancelledError, GeneratorExit):
            self.cancelled.set()
            raise


class Caller:
    """Asks an application without a server."""

    def __init__(self, mirror: Mirror | None = None, settings: ApiSettings = OPEN) -> None:
        self.mirror = mirror or Mirror()
        self.app = routes.app(self.mirror, settings)

    def __call__(self, method: str, path: str, **how: Any) -> httpx2.Response:
        return asyncio.run(self.asked(method, path, **how))

    async def asked(self, method: str, path: str, **how: Any) -> httpx2.Response:
        transport = httpx2.ASGITransport(self.app)
        async with httpx2.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            return await asyncio.wait_for(client.request(method, path, **how), PATIENCE_S)

    def post(self, path: str = COMPLETIONS, **fields: Any) -> httpx2.Response:
        body = json.dumps(valid(path) | fields)  # httpx2 would not send half a character
        return self("POST", path, content=body, headers={"Content-Type": "application/json"})


def valid(path: str) -> dict[str, Any]:
    if path == CHAT:
        return {"model": MODEL, "messages": [{"role": "user", "content": "hello"}]}
    return {"model": MODEL, "prompt": "hello"}


def complaint(response: httpx2.Response, status: int, code: str, param: str | None = None) -> str:
    """The message of an error, whose shape is as it should be."""
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
def serving(mirror: Mirror, settings: ApiSettings = OPEN) -> Iterator[str]:
    """The address of a server on loopback, in a thread of its own."""
    with socket.create_server(("127.0.0.1", 0)) as listening:  # who connects before it has begun just waits a bit
        server = web_server.server(routes.app(mirror, settings), "127.0.0.1", 0)
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


def answer(request: SequenceRequest) -> list[int]:
    tokens = list(request.prompt)
    while len(tokens) < len(request.prompt) + request.most:
        tokens.append(next_token(tokens, request.sampling.seed))
        if tokens[-1] in request.ends:
            break
    return tokens[len(request.prompt) :]
