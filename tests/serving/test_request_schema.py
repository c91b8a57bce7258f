"""The request schema: what can be asked for over HTTP, and the errors for everything else."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pydantic import ValidationError

from skippipe.serving.http.request_schema import ChatCompletionRequest, CompletionRequest, ServedModel
from tests.helpers.echo_engine import CHAT, COMPLETIONS, MODEL, OPEN, Caller, api_error, events, valid
from tests.helpers.openai_corpus import CORPUS, body, check


@pytest.mark.parametrize(
    "entry",
    [entry for entry in CORPUS if entry.get("only") != "model"],
    ids=lambda entry: json.dumps(entry["fields"])[:70],
)
def test_corpus(entry: dict[str, Any]) -> None:
    path = CHAT if entry["to"] == "chat" else COMPLETIONS
    headers = {"Content-Type": "application/json"}
    response = Caller()("POST", path, content=body(entry, MODEL), headers=headers)
    check(entry, response.status_code, response.text)


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


# What is wrong


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


@pytest.mark.parametrize(
    ("schema", "fields", "where"),
    [
        (CompletionRequest, {"prompt": [-1] * 50}, "prompt[0]"),
        (CompletionRequest, {"prompt": [[]] * 50}, "prompt[0]"),
        (CompletionRequest, {"stop": [1] * 50}, "stop[0]"),
        (ChatCompletionRequest, {"messages": [{}] * 50}, "messages[0].role"),
        (ChatCompletionRequest, {"messages": [{"role": "user", "content": [{}] * 50}]}, "messages[0].content[0].type"),
        (ChatCompletionRequest, {"tools": [{}] * 50}, "tools[0].type"),
        (CompletionRequest, {"logit_bias": {str(number): "much" for number in range(2000)}}, "logit_bias"),
    ],
)
def test_a_long_list_is_read_up_to_its_first_error(
    schema: type[CompletionRequest | ChatCompletionRequest], fields: dict[str, Any], where: str
) -> None:
    """All other clients wait while a request is read: the errors of a list of 1 MiB would take seconds."""
    path = COMPLETIONS if schema is CompletionRequest else CHAT
    request = {**valid(path), **fields}
    with pytest.raises(ValidationError) as raised:
        schema.model_validate(request, context=ServedModel(MODEL, 300, OPEN))
    assert raised.value.error_count() <= 2, "of one element"
    response = Caller().post(path, **fields)
    api_error(response, 400, response.json()["error"]["code"], where)
