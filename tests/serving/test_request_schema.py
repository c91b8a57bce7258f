"""The request schema: what can be asked for over HTTP, and the errors for everything else."""

from __future__ import annotations

from typing import Any

import pytest

from tests.helpers.echo_engine import CHAT, COMPLETIONS, Caller, api_error, events

# What can be asked


@pytest.mark.parametrize(
    ("prompt", "texts"),
    [
        ("abc", ["cba"]),
        (["abc", "de"], ["cba", "ed"]),
        ([97, 98, 99], ["cba"]),
        ([[97, 98], [99]], ["ba", "c"]),
    ],
)
@pytest.mark.parametrize("n", [1, 2])
def test_prompts(prompt: Any, texts: list[str], n: int) -> None:
    body = Caller().post(prompt=prompt, n=n).json()
    assert [choice["text"] for choice in body["choices"]] == [text for text in texts for _ in range(n)]
    assert [choice["index"] for choice in body["choices"]] == list(range(n * len(texts)))
    request = sum(map(len, texts))
    assert body["usage"] == {
        "prompt_tokens": request,
        "completion_tokens": n * request,
        "total_tokens": request + n * request,
    }


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prompt", ["abc", [97, 98, 99]])
def test_echo(prompt: Any, stream: bool) -> None:
    response = Caller().post(prompt=prompt, echo=True, stream=stream)
    if stream:
        text = "".join(each["choices"][0]["text"] for each in events(response)[:-1])
    else:
        text = response.json()["choices"][0]["text"]
    assert text == "abccba"


def test_stops_and_lengths() -> None:
    caller = Caller()
    assert caller.post(prompt="abcdef", stop="cb").json()["choices"][0]["text"] == "fed"
    cut = caller.post(prompt="abcdef", stop=["b", "dc"]).json()
    assert (cut["choices"][0]["text"], cut["choices"][0]["finish_reason"]) == ("fe", "stop")
    assert cut["usage"]["completion_tokens"] == 4
    long = caller.post(prompt="x" * 40).json()
    assert (long["choices"][0]["finish_reason"], long["usage"]["completion_tokens"]) == ("length", 16)
    assert caller.post(prompt="x" * 90).json()["usage"]["completion_tokens"] == 10  # as much as there is room for
    assert caller.post(CHAT, messages=[{"role": "user", "content": "x" * 40}]).status_code == 200
    assert caller.engine.requests[-1][1] == 60


def test_parts_of_a_message_are_put_together() -> None:
    subsets = [{"type": "text", "text": "ab"}, {"type": "text", "text": "cd"}]
    body = Caller().post(CHAT, messages=[{"role": "user", "content": subsets}]).json()
    assert body["choices"][0]["message"] == {"role": "assistant", "content": "dcba", "refusal": None}


def test_seeds() -> None:
    """Each of n answers has its own, which is the same next time, and which nodes can be told."""
    caller = Caller()
    for seed in (7, -7, 2**63 - 1, -(2**63), None):
        caller.engine.requests.clear()
        caller.post(n=4, seed=seed)
        caller.post(n=4, seed=seed)
        seeds = [sampling.seed for _, _, sampling, _ in caller.engine.requests]
        assert len(set(seeds[:4])) == 4 and all(0 <= each < 2**53 for each in seeds)
        assert (seeds[:4] == seeds[4:]) == (seed is not None)
    caller.post(seed=7)
    assert caller.engine.requests[-1][2].seed == 7


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_what_makes_no_difference_passes(path: str) -> None:
    neutral: dict[str, Any] = {
        "user": "me",
        "metadata": {"a": "b"},
        "store": True,
        "logit_bias": {},
        "presence_penalty": 0,
        "frequency_penalty": 0.0,
        "stop": None,
        "n": None,
        "stream_options": None,
        "seed": None,
    }
    if path == CHAT:
        neutral |= {"response_format": {"type": "text"}, "tools": [], "logprobs": False, "modalities": ["text"]}
    else:
        neutral |= {"best_of": 1, "suffix": None, "logprobs": None}
    assert Caller().post(path, **neutral).status_code == 200


@pytest.mark.parametrize(
    ("path", "field", "value"),
    [
        (COMPLETIONS, "logprobs", 0),
        (COMPLETIONS, "best_of", 2),
        (COMPLETIONS, "suffix", "end"),
        (COMPLETIONS, "logit_bias", {"5": 1}),
        (COMPLETIONS, "presence_penalty", 0.1),
        (COMPLETIONS, "frequency_penalty", -1),
        (CHAT, "logprobs", True),
        (CHAT, "logprobs", 0),
        (CHAT, "top_logprobs", 2),
        (CHAT, "tools", [{"type": "function"}]),
        (CHAT, "tool_choice", "required"),
        (CHAT, "functions", [{}]),
        (CHAT, "response_format", {"type": "json_object"}),
        (CHAT, "modalities", ["text", "audio"]),
        (CHAT, "audio", {}),
        (CHAT, "reasoning_effort", "high"),
        (CHAT, "web_search_options", {}),
        (CHAT, "prediction", {}),
    ],
)
def test_what_is_not_supported_is_refused_by_name(path: str, field: str, value: Any) -> None:
    assert "leave it out" in api_error(Caller().post(path, **{field: value}), 400, "unsupported_parameter", field)


# What is wrong


@pytest.mark.parametrize(
    ("field", "value", "code", "says"),
    [
        ("model", None, "missing_required_parameter", "add it"),
        ("model", 5, "invalid_type", "expected a text, found the number 5"),
        ("prompt", None, "missing_required_parameter", "add it"),
        ("prompt", "", "invalid_value", "at least 1 character"),
        ("prompt", [], "invalid_value", "at least 1 item"),
        ("prompt", {"a": 1}, "invalid_type", "found an object"),
        ("prompt", "\ud800", "invalid_value", "half a character"),
        ("max_tokens", 0, "invalid_value", "from 1 to 4096, found the number 0"),
        ("max_tokens", 1.5, "invalid_type", "whole number, found the number 1.5"),
        ("max_tokens", True, "invalid_type", "found true"),
        ("max_tokens", 10**400, "invalid_value", "too large"),
        ("temperature", 2.1, "invalid_value", "from 0.0 to 2.0"),
        ("temperature", "hot", "invalid_type", "found the text 'hot'"),
        ("top_p", 0, "invalid_value", "give temperature 0"),
        ("top_p", 1.01, "invalid_value", "1.01"),
        ("top_k", -1, "invalid_value", "from 0"),
        ("seed", 2**63, "invalid_value", "too large"),
        ("n", 17, "invalid_value", "from 1 to 16"),
        ("stop", ["a"] * 5, "invalid_value", "at most 4 items"),
        ("stream", "yes", "invalid_type", "true or false"),
        ("stream_options", {"include_usage": True}, "invalid_value", "set stream to true"),
        ("temprature", 1, "unknown_parameter", "did you mean 'temperature'?"),
        ("zzz", 1, "unknown_parameter", "leave it out"),
    ],
)
def test_wrong_fields_are_named(field: str, value: Any, code: str, says: str) -> None:
    assert says in api_error(Caller().post(**{field: value}), 400, code, field)


@pytest.mark.parametrize(
    ("path", "fields", "param", "says"),
    [
        (COMPLETIONS, {"prompt": ["ok", ""]}, "prompt[1]", "at least 1 character"),
        (COMPLETIONS, {"prompt": ["ok", 3]}, "prompt[1]", "expected a text"),
        (COMPLETIONS, {"prompt": [3, "no"]}, "prompt[1]", "expected a whole number, found the text 'no'"),
        (COMPLETIONS, {"prompt": [[3], [-1]]}, "prompt[1][0]", "from 0 to 1114111"),
        (COMPLETIONS, {"prompt": [True]}, "prompt[0]", "expected a whole number, found true"),
        (COMPLETIONS, {"prompt": [0x110000]}, "prompt[0]", "from 0 to 1114111"),
        (COMPLETIONS, {"prompt": ["a"] * 17}, "prompt", "17 prompts × 1 answers each"),
        (COMPLETIONS, {"prompt": ["a"] * 6, "n": 3}, "n", "6 prompts × 3 answers each"),
        (
            COMPLETIONS,
            {"stream": True, "stream_options": {"include_usages": 1}},
            "stream_options.include_usages",
            "mean",
        ),
        (COMPLETIONS, {"stop": ["ok", ""]}, "stop[1]", "at least 1 character"),
        (COMPLETIONS, {"stop": [1]}, "stop[0]", "expected a text"),
        (CHAT, {"messages": []}, "messages", "at least 1 item"),
        (CHAT, {"messages": "hi"}, "messages", "expected a list"),
        (CHAT, {"messages": ["hi"]}, "messages[0]", "expected an object"),
        (CHAT, {"messages": [{"content": "hi"}]}, "messages[0].role", "missing"),
        (
            CHAT,
            {"messages": [{"role": "tool", "content": "hi"}]},
            "messages[0].role",
            "or 'assistant', found the text 'tool'",
        ),
        (
            CHAT,
            {"messages": [{"role": "king", "content": "hi"}]},
            "messages[0].role",
            "expected 'system', 'developer', 'user' or 'assistant'",
        ),
        (CHAT, {"messages": [{"role": "user", "content": None}]}, "messages[0].content", "missing"),
        (CHAT, {"messages": [{"role": "user", "content": ""}]}, "messages", "no tokens"),
        (CHAT, {"messages": [{"role": "user", "content": "a", "name": "b"}]}, "messages[0].name", "leave it out"),
        (
            CHAT,
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "messages[0].content[0].type",
            "expected 'text', found the text 'image_url'",
        ),
        (CHAT, {"messages": [{"role": "user", "content": "a", "tone": "b"}]}, "messages[0].tone", "unknown"),
        (
            CHAT,
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "a", "tone": "b"}]}]},
            "messages[0].content[0].tone",
            "unknown",
        ),
        (CHAT, {"messages": [{"role": "assistant", "content": "a"}]}, "messages", "end with the user's"),
        (CHAT, {"max_tokens": 5, "max_completion_tokens": 5}, "max_tokens", "keep one"),
    ],
)
def test_wrong_places_are_named(path: str, fields: dict[str, Any], param: str, says: str) -> None:
    response = Caller().post(path, **fields)
    assert response.json()["error"]["param"] == param
    assert says in api_error(response, 400, response.json()["error"]["code"], param)


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b"", "not valid JSON"),
        (b'{"model": ', "not valid JSON: Expecting value (line 1, column 11)"),
        (b"\xff\xfe", "not UTF-8 from byte 0"),
        (b"[]", "expected an object"),
        (b'{"n": 1, "n": 2}', "'n' is given twice"),
        (b'{"temperature": NaN}', "it has no NaN"),
        (b"[" * 100_000, "too deeply"),
        (b'{"n": ' + b"9" * 5000 + b"}", "thousands of digits"),
    ],
)
def test_malformed_requests(body: bytes, says: str) -> None:
    response = Caller()("POST", COMPLETIONS, content=body, headers={"Content-Type": "application/json"})
    assert says in api_error(response, 400, response.json()["error"]["code"])


def test_prompts_that_are_too_long() -> None:
    caller = Caller()
    says = api_error(caller.post(prompt="x" * 90, max_tokens=20), 400, "context_length_exceeded", "prompt")
    assert "maximum context length is 100 tokens; this asks for 110 (90 in the prompt, 20 for the answer)" in says
    says = api_error(
        caller.post(CHAT, messages=[{"role": "user", "content": "x" * 100}]), 400, "context_length_exceeded", "messages"
    )
    assert "asks for 101" in says
    assert caller.engine.requests == []
