"""Random and malformed requests: each gets an error that says why, and the server goes on."""

from __future__ import annotations

import json
from collections import Counter
from random import Random
from typing import Any

import httpx2

from skippipe.web import ApiSettings
from tests.helpers.echo_engine import CHAT, COMPLETIONS, MODEL, Caller, api_error, valid


def random_json(random: Random, depth: int = 0) -> Any:
    kind = random.randrange(9 if depth < 4 else 7)
    if kind == 7:
        return [random_json(random, depth + 1) for _ in range(random.randrange(4))]
    if kind == 8:
        return {random_text(random): random_json(random, depth + 1) for _ in range(random.randrange(4))}
    odd: list[Any] = [
        None,
        random.random() < 0.5,
        random.choice([0, -1, 1, 2**31, 2**63, -(2**63), 10**30]),
        random.choice([0.0, -0.5, 1e308, 1e999, -1e999, 5e-324]),
        random_text(random),
        random.randrange(-10, 200),
        "text",
    ]
    return odd[kind]


def random_text(random: Random) -> str:
    letters = 'ab\0\n"\\é€😀\ud800\udfff{}[]:,\u202e'
    return "".join(random.choice(letters) for _ in range(random.randrange(12)))


def mutated(random: Random, value: Any) -> Any:
    """The value with one thing changed."""
    if isinstance(value, dict) and value and random.random() < 0.8:
        changed = dict(value)
        name = random.choice(list(changed))
        what = random.randrange(4)
        if what == 0:
            del changed[name]
        elif what == 1:
            changed[name + random.choice(["", "s", "_", "\0"])] = random_json(random)
        else:
            changed[name] = mutated(random, changed[name])
        return changed
    if isinstance(value, list) and value and random.random() < 0.8:
        place = random.randrange(len(value))
        return [*value[:place], mutated(random, value[place]), *value[place + random.randrange(2) :]]
    return random_json(random)


FULL: dict[str, dict[str, Any]] = {
    COMPLETIONS: {
        "model": MODEL,
        "prompt": ["ab", [1, 2]],
        "n": 2,
        "max_tokens": 5,
        "temperature": 0.5,
        "top_p": 0.5,
        "top_k": 5,
        "seed": 3,
        "stop": ["a", "b"],
        "echo": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        "logit_bias": {},
        "best_of": 1,
    },
    CHAT: {
        "model": MODEL,
        "messages": [
            {"role": "system", "content": "be kind"},
            {"role": "user", "content": [{"type": "text", "text": "ab"}]},
        ],
        "n": 2,
        "max_completion_tokens": 5,
        "temperature": 0.5,
        "stop": "a",
        "stream": False,
        "response_format": {"type": "text"},
        "tools": [],
    },
}


def junk_request(random: Random) -> tuple[str, str, bytes, dict[bytes, bytes]]:
    """Method, path, body and headers."""
    path = random.choice([COMPLETIONS, CHAT])
    headers = {b"Content-Type": b"application/json"}
    body: bytes
    match random.randrange(10):
        case 0:
            body = random.randbytes(random.randrange(200))
        case 1:
            body = json.dumps(random_json(random)).encode()
        case 2:
            whole = json.dumps(FULL[path]).encode()
            place = random.randrange(len(whole))
            body = whole[:place] + random.randbytes(random.randrange(3)) + whole[place + random.randrange(3) :]
        case 3:
            body = json.dumps(FULL[path]).encode()
            headers[random.choice([b"Content-Type", b"Authorization", b"Host", b"Content-Encoding"])] = bytes(
                random.choice(range(0x20, 0xFF)) for _ in range(random.randrange(1, 20))
            )
        case _:
            value = FULL[path]
            for _ in range(random.randrange(1, 4)):
                value = mutated(random, value)
            body = json.dumps(value).encode()
    method = "POST" if random.random() < 0.9 else random.choice(["GET", "PUT", "DELETE", "PATCH", "OPTIONS", "X"])
    if random.random() < 0.1:
        odd = ["/", "/v1", "/v1/models/%00%ff", "/v1/completions/", "//v1/completions", "/health", "/v1/models", "/é"]
        path = random.choice(odd)
    return method, path, body, headers


async def junk_answered(count: int) -> Counter[int]:
    """Status → how often; every error has its shape, and afterwards the server works."""
    random, statuses = Random(0), Counter[int]()
    caller = Caller(settings=ApiSettings(loopback=True, requests_per_minute=10**9))
    transport = httpx2.ASGITransport(caller.app)
    async with httpx2.AsyncClient(transport=transport, base_url="http://127.0.0.1") as ask:
        for number in range(count):
            method, path, body, headers = junk_request(random)
            response = await ask.request(method, path, content=body, headers=headers)
            statuses[response.status_code] += 1
            assert response.status_code < 500, (number, method, path, body, headers, response.text)
            if response.status_code >= 400:
                error = response.json()["error"]
                api_error(response, response.status_code, error["code"], error["param"])
        assert (await ask.get("/health")).json()["status"] == "ok"
        whole = (await ask.post(COMPLETIONS, json=valid(COMPLETIONS))).json()
        assert whole["choices"][0]["text"] == "olleh"
        assert "\nskippipe_requests_in_flight 1.0\n" in (await ask.get("/metrics")).text
    return statuses
