"""The HTTP interface: OpenAI's own client gets what it expects, and everything else gets an error that says why."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import threading
import time
from collections.abc import AsyncGenerator
from datetime import timedelta
from typing import Any

import httpx2
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from skippipe.errors import UserError
from skippipe.inference.request import SamplingParams
from skippipe.serving.http import routes
from skippipe.web import ApiSettings
from tests.helpers.echo_engine import (
    CHAT,
    COMPLETIONS,
    MODEL,
    OPEN,
    PATIENCE_S,
    STAGES,
    Caller,
    EchoEngine,
    api_error,
    events,
    serving,
    valid,
)
from tests.helpers.junk import junk_answered

TOKEN = "a-token-that-is-long"
WHOLE = {"stages": 6, "of": 6, "missing": []}


def client(address: str, token: str = "none needed") -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{address}/v1", api_key=token, max_retries=0, timeout=PATIENCE_S)


def test_openai_client() -> None:
    engine = EchoEngine()
    with serving(engine) as address, client(address) as ask:
        assert [model.id for model in ask.models.list()] == [MODEL]
        assert ask.models.retrieve(MODEL).owned_by == "skippipe"

        raw = ask.completions.with_raw_response.create(model=MODEL, prompt="hello", seed=5, temperature=0.5)
        text = raw.parse()
        assert raw.headers["x-skippipe-stages"] == "6/6"
        assert text.choices[0].text == "olleh"
        assert text.choices[0].finish_reason == "stop"
        assert text.id.startswith("cmpl-") and text.object == "text_completion" and text.model == MODEL
        assert (text.system_fingerprint or "").startswith("fp_")
        assert text.model_extra == {"skippipe": WHOLE}
        assert text.usage is not None
        assert (text.usage.prompt_tokens, text.usage.completion_tokens, text.usage.total_tokens) == (5, 5, 10)
        assert engine.requests[-1] == (tuple(map(ord, "hello")), 16, SamplingParams(0.5, 0, 1.0, 5), ())

        answer = ask.chat.completions.create(
            model=MODEL,
            messages=[{"role": "developer", "content": "be brief"}, {"role": "user", "content": "stressed"}],
            max_completion_tokens=4,
            extra_body={"top_k": 3},
        )
        assert answer.choices[0].message.content == "dess"
        assert answer.choices[0].message.role == "assistant"
        assert answer.choices[0].finish_reason == "length"
        assert answer.id.startswith("chatcmpl-") and answer.object == "chat.completion"
        assert engine.conversations[-1][0] == {"role": "system", "content": "be brief"}
        assert engine.requests[-1][2].top_k == 3

        again = ask.chat.completions.create(  # what the client made of our message is a message again
            model=MODEL,
            messages=[answer.choices[0].message.model_dump(), {"role": "user", "content": "ab"}],  # type: ignore[list-item]
        )
        assert again.choices[0].message.content == "ba"


def test_openai_client_streams() -> None:
    with serving(EchoEngine()) as address, client(address) as ask:
        pieces = list(ask.completions.create(model=MODEL, prompt="hello", stream=True))
        assert "".join(piece.choices[0].text for piece in pieces) == "olleh"
        assert [piece.choices[0].finish_reason for piece in pieces] == [None] * 5 + ["stop"]
        assert [piece.model_extra for piece in pieces] == [{}] * 5 + [{"skippipe": WHOLE}]
        assert len({piece.id for piece in pieces}) == 1

        chunks = list(
            ask.chat.completions.create(
                model=MODEL,
                messages=[{"role": "user", "content": "hello"}],
                stream=True,
                stream_options={"include_usage": True},
            )
        )
        assert chunks[0].choices[0].delta.role == "assistant"
        assert "".join(each.choices[0].delta.content or "" for each in chunks[:-1]) == "olleh"
        assert chunks[-2].choices[0].finish_reason == "stop"
        assert all(each.usage is None for each in chunks[:-1])
        assert chunks[-1].choices == [] and chunks[-1].usage is not None and chunks[-1].usage.total_tokens == 10
        assert chunks[-1].model_extra == {"skippipe": WHOLE}


def test_openai_client_asks_many_things_at_once() -> None:
    async def all_of_it(address: str) -> None:
        async with openai.AsyncOpenAI(base_url=f"{address}/v1", api_key="-", max_retries=0, timeout=PATIENCE_S) as ask:

            async def whole(word: str) -> str:
                answer = await ask.completions.create(model=MODEL, prompt=word)
                return answer.choices[0].text

            async def streamed(word: str) -> list[str]:
                texts = ["", "", ""]
                async for chunk in await ask.chat.completions.create(
                    model=MODEL, messages=[{"role": "user", "content": word}], n=3, stream=True
                ):
                    texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
                return texts

            words = [f"word {number}" for number in range(20)]
            wholes, streams = await asyncio.gather(
                asyncio.gather(*map(whole, words)), asyncio.gather(*map(streamed, words))
            )
            assert wholes == [word[::-1] for word in words]
            assert streams == [[word[::-1]] * 3 for word in words]

    engine = EchoEngine()
    engine.pause_s = 0.002
    with serving(engine) as address:
        asyncio.run(asyncio.wait_for(all_of_it(address), PATIENCE_S))
        assert_counted(address, 200, 20)


def test_openai_client_sees_errors_as_what_they_are() -> None:
    engine = EchoEngine()
    with serving(engine, ApiSettings(tokens=(TOKEN,), loopback=True)) as address:
        with client(address, "wrong") as ask, pytest.raises(openai.AuthenticationError, match="not known here"):
            ask.models.list()
        with client(address, TOKEN) as ask:
            with pytest.raises(openai.NotFoundError, match="ask for 'org/mirror'") as missing:
                ask.completions.create(model="gpt-7", prompt="hello")
            assert missing.value.code == "model_not_found"
            with pytest.raises(openai.BadRequestError) as bad:
                ask.completions.create(model=MODEL, prompt="hello", suffix="end")
            assert (bad.value.param, bad.value.code) == ("suffix", "unsupported_parameter")
            engine.refusal = "256 requests wait already"
            with pytest.raises(openai.InternalServerError, match="256 requests wait already") as full:
                ask.completions.create(model=MODEL, prompt="hello", stream=True)
            assert full.value.status_code == 503 and full.value.response.headers["retry-after"] == "5"
            engine.refusal, engine.lost = None, {3: 0}
            pieces = ask.completions.create(model=MODEL, prompt="hello", stream=True)
            assert [next(pieces).choices[0].text, next(pieces).choices[0].text] == ["o", "l"]
            with pytest.raises(openai.APIError, match="no stage is left"):
                next(pieces)
            engine.stages, engine.lost = STAGES, {}
            with pytest.raises(openai.AuthenticationError, match="no token"):
                ask.with_options(default_headers={"Authorization": "Basic abc"}).models.list()


@pytest.mark.parametrize("stream", [False, True])
def test_answer_is_cancelled_when_the_client_is_gone(stream: bool) -> None:
    engine = EchoEngine()
    engine.slow_from, engine.pause_s = 3, 3600.0
    with serving(engine) as address:
        with connected(address) as line:
            line.sendall(request(valid(COMPLETIONS) | {"stream": stream, "n": 2}))
            assert engine.begun.wait(PATIENCE_S)
            if stream:
                assert b"200 OK" in line.recv(1000)
        assert engine.cancelled.wait(PATIENCE_S), "it went on for nobody"
        assert_counted(address, 499, 1)


def test_client_that_does_not_read_gives_up_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("skippipe.serving.http.middleware.CLOSE_S", 0.1)
    engine = EchoEngine()
    engine.context = 1_000_000
    settings = ApiSettings(loopback=True, max_concurrent=1, answer_timeout=timedelta(seconds=1))
    with serving(engine, settings) as address:
        with connected(address) as line:  # the echo is more than all buffers between us hold
            line.sendall(request(valid(COMPLETIONS) | {"prompt": "x" * 500_000, "n": 16, "echo": True, "stream": True}))
            assert engine.begun.wait(PATIENCE_S)
            assert_counted(address, 504, 1)
            with httpx2.Client(base_url=address, timeout=PATIENCE_S) as ask:
                assert ask.post(COMPLETIONS, json=valid(COMPLETIONS)).status_code == 200
        assert engine.cancelled.is_set()


def connected(address: str) -> socket.socket:
    host, _, port = address.removeprefix("http://").partition(":")
    return socket.create_connection((host, int(port)), PATIENCE_S)


def request(fields: dict[str, Any]) -> bytes:
    body = json.dumps(fields)
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode()


def assert_counted(address: str, status: int, times: int) -> None:
    """The metrics count so many answers of that status before long."""
    line = f'skippipe_requests_total{{endpoint="{COMPLETIONS}",status="{status}"}} {times}.0\n'
    deadline_s = time.monotonic() + PATIENCE_S
    with httpx2.Client(base_url=address, timeout=PATIENCE_S) as ask:
        while line not in ask.get("/metrics").text:
            assert time.monotonic() < deadline_s, f"{times} × {status} never came"


# On the way


def test_addresses_and_methods() -> None:
    caller = Caller()
    assert "/v1/completions" in api_error(caller("GET", "/v1/engines"), 404, "not_found")
    api_error(caller("GET", "/v1/models/"), 404, "model_not_found", "model")
    api_error(caller("GET", "/docs"), 404, "not_found")
    api_error(caller("GET", "/v1/models/other"), 404, "model_not_found", "model")
    wrong = caller("GET", COMPLETIONS)
    assert "use POST" in api_error(wrong, 405, "method_not_allowed")
    assert wrong.headers["allow"] == "POST"
    assert caller("GET", f"/v1/models/{MODEL}").json()["created"] == EchoEngine.created


def test_only_json_is_read() -> None:
    body = json.dumps(valid(COMPLETIONS)).encode()
    for headers in (
        {"Content-Type": "text/plain"},
        {},
        {"Content-Type": "application/json", "Content-Encoding": "gzip"},
    ):
        api_error(Caller()("POST", COMPLETIONS, content=body, headers=headers), 415, "unsupported_media_type")
    headers = {"Content-Type": "Application/JSON; charset=utf-8"}
    assert Caller()("POST", COMPLETIONS, content=body, headers=headers).status_code == 200


def test_too_much_is_not_read_to_its_end() -> None:
    sent = 0

    async def endless() -> AsyncGenerator[bytes, None]:
        nonlocal sent
        while True:
            sent += 1
            yield b" " * 1000

    caller = Caller(settings=ApiSettings(loopback=True, max_body_bytes=10_000))
    kind = {"Content-Type": "application/json"}
    says = api_error(caller("POST", COMPLETIONS, content=endless(), headers=kind), 413, "request_too_large")
    assert "10,000 bytes" in says and sent == 11
    with serving(EchoEngine()) as address, connected(address) as line:
        line.sendall(f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n".encode())
        line.sendall(b"Content-Length: 99999999999\r\n\r\n")
        answer = b"".join(iter(lambda: line.recv(4096), b""))  # until the server closes it
        assert answer.startswith(b"HTTP/1.1 413") and b'"code":"request_too_large"' in answer
        for _ in range(5):  # a client that sends all before it listens
            much = httpx2.post(f"{address}{CHAT}", json={"model": "x" * 2**21}, timeout=PATIENCE_S)
            api_error(much, 413, "request_too_large")


# When those who answer are in trouble


def test_share_of_the_model() -> None:
    caller = Caller()
    caller.engine.lost = {3: 4, 4: 6}
    body = caller.post()
    assert body.headers["x-skippipe-stages"] == "4/6"
    assert body.headers["x-skippipe-missing-stages"] == "4,5"
    assert body.json()["skippipe"] == {"stages": 4, "of": 6, "missing": [4, 5]}
    stream = caller.post(stream=True)
    assert stream.headers["x-skippipe-stages"] == "6/6"
    assert "x-skippipe-missing-stages" not in stream.headers
    assert events(stream)[-2]["skippipe"] == {"stages": 4, "of": 6, "missing": [4, 5]}
    assert events(stream)[-1] == "[DONE]"


@pytest.mark.parametrize("usage", [False, True])
def test_share_stands_at_the_very_end_of_a_stream(usage: bool) -> None:
    options = {"include_usage": True} if usage else None
    response = Caller().post(CHAT, n=3, stream=True, stream_options=options)
    *chunks, done = events(response)
    assert (response.headers["x-skippipe-stages"], done) == ("6/6", "[DONE]")
    assert [number for number, chunk in enumerate(chunks, 1) if "skippipe" in chunk] == [len(chunks)]
    assert all(("usage" in chunk) == usage for chunk in chunks)
    assert [bool(chunk.get("usage")) for chunk in chunks] == [False] * (len(chunks) - 1) + [usage]


def test_pieces_of_many_answers_come_one_after_the_other() -> None:
    """Also if sending takes a while."""
    body = json.dumps(valid(CHAT) | {"stream": True, "n": 8}).encode()
    coming, sent, sending = [{"type": "http.request", "body": body}], list[Any](), 0

    async def receive() -> Any:
        return coming.pop() if coming else await asyncio.Event().wait()

    async def send(message: Any) -> None:
        nonlocal sending
        sending += 1
        await asyncio.sleep(0.001)
        assert sending == 1, "two at once"
        sending -= 1
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": CHAT, "query_string": b"", "root_path": ""}
    headers = [(b"content-type", b"application/json")]
    asyncio.run(asyncio.wait_for(Caller().app({**scope, "headers": headers}, receive, send), PATIENCE_S))
    assert [message["type"] for message in sent] == ["http.response.start"] + ["http.response.body"] * (len(sent) - 1)
    text = b"".join(message.get("body", b"") for message in sent)
    assert (text.count(b'"finish_reason":"stop"'), text.count(b'"skippipe"')) == (8, 1)


@pytest.mark.parametrize("stream", [False, True])
def test_refused(stream: bool) -> None:
    caller = Caller(settings=ApiSettings(loopback=True, retry_after=timedelta(seconds=6.5)))
    caller.engine.refusal = "2 of 6 stages are left"
    response = caller.post(stream=stream, n=3)
    assert "2 of 6 stages are left" in api_error(response, 503, "unavailable")
    assert response.headers["retry-after"] == "7"


def test_stream_that_cannot_go_on_says_so() -> None:
    caller = Caller()
    caller.engine.lost = {3: 0}
    api_error(caller.post(), 503, "unavailable")
    caller.engine.stages = STAGES
    heard = events(caller.post(stream=True))
    assert [each["choices"][0]["text"] for each in heard[:-1]] == ["o", "l"]
    assert heard[-1]["error"]["code"] == "unavailable"
    assert 'status="503"} 2.0' in caller("GET", "/metrics").text


@pytest.mark.parametrize("stream", [False, True])
def test_one_answer_that_fails_ends_the_others(stream: bool) -> None:
    caller = Caller()
    caller.engine.breaks_at = 3
    response = caller.post(prompt=["abcdef", "xy"], stream=stream)
    assert response.status_code == (200 if stream else 500)
    assert "internal_error" in response.text and "[DONE]" not in response.text


@pytest.mark.parametrize("stream", [False, True])
def test_our_own_faults_are_kept_to_the_log(stream: bool, caplog: pytest.LogCaptureFixture) -> None:
    caller = Caller()
    caller.engine.breaks_at = 1
    with caplog.at_level(logging.ERROR):
        response = caller.post(stream=stream)
    says = api_error(response, 500, "internal_error")
    assert "10.0.0.9" not in response.text and "10.0.0.9" in caplog.text
    assert response.headers["x-request-id"] in says and response.headers["x-request-id"] in caplog.text
    caller.engine.failure = TimeoutError("not that of the request")
    api_error(caller.post(stream=stream), 500, "internal_error")
    caller.engine.breaks_at, caller.engine.ends = None, False
    api_error(caller.post(), 500, "internal_error")


@pytest.mark.parametrize("stream", [False, True])
def test_slow_answers_are_given_up(stream: bool) -> None:
    caller = Caller(settings=ApiSettings(loopback=True, answer_timeout=timedelta(seconds=0.5)))
    caller.engine.slow_from, caller.engine.pause_s = 3, 3600.0
    response = caller.post(stream=stream)
    if stream:
        assert events(response)[-1]["error"]["code"] == "timeout"
    else:
        assert "after 0.5 s" in api_error(response, 504, "timeout")
        assert response.headers["x-should-retry"] == "false"
    assert caller.engine.cancelled.is_set()


def test_a_long_text_holds_up_no_short_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """The short request is answered while the long one is still being encoded."""
    caller, short_is_answered = Caller(), threading.Event()
    encode, long_text = caller.engine.encode, "x" * routes.LONG_BYTES

    def slow(text: str) -> list[int]:
        if text == long_text:
            assert short_is_answered.wait(PATIENCE_S)
        return encode(text)

    monkeypatch.setattr(caller.engine, "encode", slow)

    async def both() -> None:
        requests = [valid(COMPLETIONS) | {"prompt": prompt} for prompt in (long_text, "hello")]
        first, second = (asyncio.create_task(caller.request("POST", COMPLETIONS, json=each)) for each in requests)
        assert (await second).status_code == 200
        short_is_answered.set()
        api_error(await first, 400, "context_length_exceeded", "prompt")

    asyncio.run(both())


def test_slow_requests_are_given_up() -> None:
    async def never() -> AsyncGenerator[bytes, None]:
        yield b"{"
        await asyncio.sleep(3600)

    caller = Caller(settings=ApiSettings(loopback=True, body_timeout=timedelta(seconds=0.05)))
    kind = {"Content-Type": "application/json"}
    api_error(caller("POST", COMPLETIONS, content=never(), headers=kind), 408, "request_timeout")


def test_health() -> None:
    caller = Caller(settings=ApiSettings(tokens=(TOKEN,)))
    for stages, status, code in ((6, "ok", 200), (1, "degraded", 200), (0, "down", 503)):
        caller.engine.stages = stages
        response = caller("GET", "/health")
        expected = {"status": status, "stages": stages, "of": 6, "missing": list(range(stages, 6))}
        assert (response.status_code, response.json()) == (code, expected)


def test_metrics() -> None:
    lines: list[str] = []
    caller = Caller(access_log=lines.append)
    caller.post()
    caller.engine.lost = {2: 5}
    caller.post(CHAT, stream=True, n=2)
    caller.post(n=0)
    caller("GET", "/v1/models/other")
    caller("GET", "/any/path/at/all")
    families = {family.name: family for family in text_string_to_metric_families(caller("GET", "/metrics").text)}
    counted = {
        (one.labels["endpoint"], one.labels["status"]): one.value for one in families["skippipe_requests"].samples
    }
    assert counted == {
        (COMPLETIONS, "200"): 1,
        (COMPLETIONS, "400"): 1,
        (CHAT, "200"): 1,
        ("/v1/models/{model}", "404"): 1,
        ("other", "404"): 1,
    }
    single = {name: family.samples[0].value for name, family in families.items() if len(family.samples) == 1}
    assert single["skippipe_prompt_tokens"] == 10 and single["skippipe_generation_tokens"] == 15
    assert single["skippipe_requests_in_flight"] == 1  # this one
    assert (single["skippipe_stages_there"], single["skippipe_stages"]) == (5, 6)
    assert (single["skippipe_steps"], single["skippipe_num_requests_running"]) == (12, 1.5)
    assert single["skippipe_request_success"] == 3
    assert [(one.labels, one.value) for one in families["skippipe_answers_without_stage"].samples] == [
        ({"stage": "5"}, 1)
    ]
    nodes = {one.labels["stage"]: one.value for one in families["skippipe_stage_nodes"].samples}
    assert nodes == {"0": 1, "1": 1, "2": 1, "3": 1, "4": 1, "5": 0}
    observed = {
        name.removeprefix("skippipe_"): sum(one.value for one in family.samples if one.name.endswith("_count"))
        for name, family in families.items()
        if family.type == "histogram"
    }
    assert observed == {
        "request_seconds": 5,
        "time_to_first_token_seconds": 3,
        "time_per_output_token_seconds": 12,
        "request_queue_time_seconds": 3,
        "e2e_request_latency_seconds": 3,
    }
    waited = next(one for one in families["skippipe_request_queue_time_seconds"].samples if one.name.endswith("_sum"))
    assert waited.value == 0.75
    assert [line.split()[1:5] for line in lines] == [
        ["127.0.0.1", "POST", COMPLETIONS, "200"],
        ["127.0.0.1", "POST", CHAT, "200"],
        ["127.0.0.1", "POST", COMPLETIONS, "400"],
        ["127.0.0.1", "GET", "/v1/models/other", "404"],
        ["127.0.0.1", "GET", "/any/path/at/all", "404"],
    ]
    assert "prompt_tokens=5 tokens=5 stages=6/6 req_" in lines[0]
    assert "prompt_tokens=5 tokens=10 stages=5/6 missing=5 req_" in lines[1]


def test_a_line_of_the_access_log_is_one_line() -> None:
    lines: list[str] = []
    Caller(access_log=lines.append)("GET", "/a%0ab%20c%1b[31m")
    assert len(lines) == 1 and lines[0].isprintable() and len(lines[0].split()) == 7
    Caller()("GET", "/quiet")
    assert len(lines) == 1


def test_package_that_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing(name: str) -> None:
        raise ImportError(f"No module named '{name}'", name=name)

    monkeypatch.setattr("skippipe.errors.import_module", nothing)
    with pytest.raises(UserError, match=r"fastapi.*pip install 'skippipe\[serve\]'"):
        routes.application(EchoEngine(), OPEN)


def test_junk() -> None:
    statuses = asyncio.run(asyncio.wait_for(junk_answered(1000), 60))
    assert statuses[200] > 20 and statuses[400] > 500
