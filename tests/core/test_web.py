"""Who may ask over HTTP, how much at once and how often."""

from __future__ import annotations

import asyncio
import signal
import socket
from datetime import timedelta

import pytest
from fastapi import FastAPI

from skippipe import web
from skippipe.errors import UserError
from skippipe.web import APIError, ApiSettings, RateLimiter
from tests.helpers.echo_engine import CHAT, COMPLETIONS, Caller, api_error, valid

TOKEN, OTHER = "a-token-that-is-long", "another-token-as-long"


def test_tokens() -> None:
    caller = Caller(settings=ApiSettings(tokens=(TOKEN, OTHER)))
    for given in (
        None,
        TOKEN,
        f"Basic {TOKEN}",
        "Bearer",
        "Bearer ",
        f"Bearer {TOKEN}x",
        "Bearer \xe9",
        "Bearer x" * 999,
    ):
        headers = {} if given is None else {"Authorization": given.encode("latin-1")}
        for method, path in (("GET", "/v1/models"), ("GET", "/metrics"), ("POST", COMPLETIONS)):
            response = caller(method, path, headers=headers)
            api_error(response, 401, "invalid_api_key")
            assert response.headers["www-authenticate"] == "Bearer"
            assert TOKEN not in response.text
    for token in (TOKEN, OTHER):
        assert caller("GET", "/v1/models", headers={"Authorization": f"bearer {token}"}).status_code == 200
    assert caller("GET", "/health").status_code == 200
    assert TOKEN not in repr(ApiSettings(tokens=(TOKEN,)))


def test_settings_that_would_not_do() -> None:
    for settings, says in (
        ({}, "tokens: none, and others can reach the server"),
        ({"tokens": ("short",)}, "5 characters"),
        ({"tokens": ("with a space in the middle",)}, "a space"),
        ({"loopback": True, "max_choices": 0}, "max_choices: 0"),
        ({"loopback": True, "answer_timeout": timedelta(0)}, "answer_timeout: 0 s"),
    ):
        with pytest.raises(UserError, match=says):
            ApiSettings(**settings)


def test_without_tokens_only_this_machine_is_answered() -> None:
    """A web page that has its name point to 127.0.0.1 gets nothing."""
    caller = Caller()
    for host in ("localhost", "localhost:8000", "127.0.0.1:1", "[::1]:80", "[::1]", "LOCALHOST"):
        assert caller("GET", "/v1/models", headers={"Host": host}).status_code == 200, host
    for host in ("evil.example", "evil.example:8000", "localhost.evil.example", "10.0.0.1", "[", "::1"):
        assert "give the server a token" in api_error(
            caller("GET", "/v1/models", headers={"Host": host}), 403, "host_not_allowed"
        )


def test_rate_limiter_admits_so_many_requests_a_minute() -> None:
    now_s, waits = 0.0, list[str]()
    rate_limiter = RateLimiter(ApiSettings(loopback=True, requests_per_minute=30), lambda: now_s)

    def passed(token: int) -> int:
        for count in range(1000):
            try:
                with rate_limiter.admit(token):
                    pass
            except APIError as refused:
                waits.append(refused.headers["Retry-After"])
                return count
        return 1000

    assert (passed(0), passed(0), passed(1)) == (30, 0, 30)
    now_s = 1.9
    assert passed(0) == 0
    now_s = 2.0
    assert passed(0) == 1
    now_s = 1e6
    assert passed(0) == 30
    assert waits == ["2", "2", "2", "1", "2", "2"]


def test_too_many_requests() -> None:
    caller = Caller(settings=ApiSettings(tokens=(TOKEN, OTHER), requests_per_minute=2))
    mine, theirs = ({"Authorization": f"Bearer {token}"} for token in (TOKEN, OTHER))
    for _ in range(2):
        assert caller("POST", COMPLETIONS, json=valid(COMPLETIONS), headers=mine).status_code == 200
    response = caller("POST", COMPLETIONS, json=valid(COMPLETIONS), headers=mine)
    assert "more than 2 requests a minute" in api_error(response, 429, "rate_limit_exceeded")
    assert response.json()["error"]["type"] == "requests"
    assert 1 <= int(response.headers["retry-after"]) <= 30
    assert caller("POST", COMPLETIONS, json=valid(COMPLETIONS), headers=theirs).status_code == 200
    assert caller("GET", "/v1/models", headers=mine).status_code == 200


def test_too_many_at_once() -> None:
    async def both() -> None:
        caller = Caller(settings=ApiSettings(loopback=True, max_concurrent=1))
        caller.engine.pause_s = 0.01
        answers = await asyncio.gather(*(caller.request("POST", CHAT, json=valid(CHAT)) for _ in range(3)))
        assert sorted(answer.status_code for answer in answers) == [200, 429, 429]
        refused = next(answer for answer in answers if answer.status_code == 429)
        assert "wait until one is done" in api_error(refused, 429, "rate_limit_exceeded")
        assert refused.headers["retry-after"] == "1"
        assert (await caller.request("POST", CHAT, json=valid(CHAT))).status_code == 200

    asyncio.run(both())


@pytest.mark.parametrize("ignored", [False, True])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_server_that_gets_a_signal_ends_in_order_and_says_that_it_was_interrupted(
    number: signal.Signals, ignored: bool
) -> None:
    """Also one that a script has started in the background: shells have such a process ignore SIGINT."""
    before = {each: signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)}
    for each in before:
        signal.signal(each, signal.SIG_IGN if ignored else signal.default_int_handler)
    server = web.server(FastAPI(), "127.0.0.1", 0)

    async def serve_and_stop(listening: socket.socket) -> None:
        serving = asyncio.create_task(server.serve([listening]))
        async with asyncio.timeout(10):
            while not server.started:
                await asyncio.sleep(0.01)
        signal.raise_signal(number)
        await serving

    try:
        with socket.create_server(("127.0.0.1", 0)) as listening, pytest.raises(KeyboardInterrupt):
            asyncio.run(serve_and_stop(listening))
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
    assert not server.started or not server.servers[0].is_serving()


def test_answers_that_take_too_long_are_cancelled_when_the_server_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(web, "DRAIN_S", 0.1)
    application = FastAPI()
    begun, cancelled = asyncio.Event(), asyncio.Event()

    @application.get("/")
    async def answer() -> str:
        begun.set()
        await cancelled.wait()
        return "cancelled"

    async def ask_and_stop(listening: socket.socket) -> bytes:
        server = web.server(application, "127.0.0.1", 0, cancelled.set)
        serving = asyncio.create_task(server.serve([listening]))
        reader, writer = await asyncio.open_connection(*listening.getsockname())
        writer.write(b"GET / HTTP/1.1\r\nHost: here\r\n\r\n")
        await begun.wait()
        server.should_exit = True
        await serving
        writer.close()
        return await reader.read()

    with socket.create_server(("127.0.0.1", 0)) as listening:
        assert asyncio.run(asyncio.wait_for(ask_and_stop(listening), 10)).endswith(b'"cancelled"')
