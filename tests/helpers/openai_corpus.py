"""The corpus of requests in tests/serving/openai_requests.json, and checks of the answers to them.

An entry has the fields that are added to a plain request (null: left out), the status that is documented, and either
the error (code, field, words of the message) or the shape of the answer and what it has:

- `choices`, `prompt_tokens`, `completion_tokens`: their number; `most_tokens`: tokens of each choice at most
- `logprobs`: every token has its log-probability, and those of so many likeliest ones
- `usage`: the stream ends with it; `json`: the text is JSON that fits the schema which was asked for; `json_begun`: or
  the beginning of an object
- `only`: an entry for the stand-in of the tests (`echo`), or for a real model (`model`), alone
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema

CORPUS: list[dict[str, Any]] = json.loads(
    (Path(__file__).parents[1] / "serving" / "openai_requests.json").read_text(encoding="utf-8")
)
TEXT, COUNT = {"type": "string"}, {"type": "integer", "minimum": 0}
LOGPROB = {"type": "number", "maximum": 0}


def exactly(**properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


def optional(shape: dict[str, Any]) -> dict[str, Any]:
    return {"anyOf": [shape, {"type": "null"}]}


def listed(shape: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": shape}


USAGE = exactly(prompt_tokens=COUNT, completion_tokens=COUNT, total_tokens=COUNT)
SHARE = exactly(stages=COUNT, of=COUNT, missing=listed(COUNT))
FINISH = {"enum": ["stop", "length"]}
ONE_LOGPROB = {"token": TEXT, "logprob": LOGPROB, "bytes": optional(listed({"type": "integer", "maximum": 255}))}
CHAT_LOGPROBS = exactly(
    content=listed(exactly(**ONE_LOGPROB, top_logprobs=listed(exactly(**ONE_LOGPROB)))), refusal={"type": "null"}
)
TEXT_LOGPROBS = exactly(
    tokens=listed(TEXT),
    token_logprobs=listed(LOGPROB),
    top_logprobs=listed({"type": "object", "additionalProperties": LOGPROB}),
    text_offset=listed(COUNT),
)
MESSAGE = exactly(role={"const": "assistant"}, content=TEXT, refusal={"type": "null"})
DELTA = {"type": "object", "properties": {"role": TEXT, "content": TEXT}, "additionalProperties": False}


def head(kind: str) -> dict[str, Any]:
    return {"id": TEXT, "object": {"const": kind}, "created": COUNT, "model": TEXT, "system_fingerprint": TEXT}


def choice(logprobs: dict[str, Any], finish: dict[str, Any], **content: Any) -> dict[str, Any]:
    return exactly(index=COUNT, logprobs=optional(logprobs), finish_reason=finish, **content)


def chunk(kind: str, logprobs: dict[str, Any], **content: Any) -> dict[str, Any]:
    shape = exactly(**head(kind), choices=listed(choice(logprobs, optional(FINISH), **content)))
    shape["properties"] |= {"usage": optional(USAGE), "skippipe": SHARE}
    return shape


def whole(kind: str, logprobs: dict[str, Any], **content: Any) -> dict[str, Any]:
    choices = listed(choice(logprobs, FINISH, **content))
    return exactly(**head(kind), choices=choices, usage=USAGE, skippipe=SHARE)


SHAPES = {
    "completion": whole("text_completion", TEXT_LOGPROBS, text=TEXT),
    "completion_chunk": chunk("text_completion", TEXT_LOGPROBS, text=TEXT),
    "chat": whole("chat.completion", CHAT_LOGPROBS, message=MESSAGE),
    "chat_chunk": chunk("chat.completion.chunk", CHAT_LOGPROBS, delta=DELTA),
}


def body(entry: dict[str, Any], model: str, **more: Any) -> str:
    plain = {"messages": [{"role": "user", "content": "hello"}]} if entry["to"] == "chat" else {"prompt": "hello"}
    return json.dumps({"model": model, **plain, **more, **entry["fields"]})


def check(entry: dict[str, Any], status: int, text: str) -> None:
    assert status == entry["status"], text
    if status != 200:
        error = json.loads(text)["error"]
        assert error["param"] == entry["param"] and error["code"] == entry["code"], error
        assert entry["says"] in error["message"], error
        return
    stream = entry["fields"].get("stream")
    events = [line.removeprefix("data: ") for line in text.split("\n\n") if line] if stream else [text]
    assert not stream or events.pop() == "[DONE]"
    answers = [json.loads(event) for event in events]
    for answer in answers:
        jsonschema.validate(answer, SHAPES[entry["shape"]])
    assert "skippipe" in answers[-1]
    _check_has(entry, answers)


def _check_has(entry: dict[str, Any], answers: list[dict[str, Any]]) -> None:
    has: dict[str, Any] = entry.get("has", {})
    usage: Any = answers[-1].get("usage")
    choices = [one for answer in answers for one in answer["choices"]]
    numbers = {one["index"] for one in choices}
    assert numbers == set(range(has.get("choices", len(numbers)))) or "choices" not in has
    for name in ("prompt_tokens", "completion_tokens"):
        assert name not in has or usage[name] == has[name]
    assert "most_tokens" not in has or usage["completion_tokens"] <= has["most_tokens"] * len(numbers)
    assert "usage" not in has or usage is not None
    logprobs = [one["logprobs"] for one in choices if one["logprobs"] is not None]
    assert bool(logprobs) == ("logprobs" in has)
    if logprobs:
        assert _num_logprobs(entry["to"] == "chat", logprobs, has["logprobs"]) >= 1
        assert (
            usage is None
            or _num_logprobs(entry["to"] == "chat", logprobs, has["logprobs"]) == usage["completion_tokens"]
        )
    for one in choices if has.keys() & {"json", "json_begun"} else []:
        _check_json(entry, one.get("text", one.get("message", {}).get("content")), one["finish_reason"])


def _num_logprobs(chat: bool, logprobs: list[dict[str, Any]], most: int) -> int:
    """Tokens that have them; each with as many likeliest ones as were asked for."""
    if chat:
        tokens = [token for each in logprobs for token in each["content"]]
        assert all(len(token["top_logprobs"]) == most for token in tokens)
        return len(tokens)
    for each in logprobs:
        assert len(each["tokens"]) == len(each["token_logprobs"]) == len(each["text_offset"])
        for token, chosen, top in zip(each["tokens"], each["token_logprobs"], each["top_logprobs"], strict=True):
            assert top[token] >= chosen
            assert 1 <= len(top) <= most + 1
    return sum(len(each["tokens"]) for each in logprobs)


def _check_json(entry: dict[str, Any], text: str, finish_reason: str) -> None:
    wanted = entry["fields"]["response_format"]
    if "json" in entry["has"] or finish_reason == "stop":
        assert finish_reason == "stop"
        jsonschema.validate(json.loads(text), wanted.get("json_schema", {}).get("schema", {"type": "object"}))
    else:
        assert text.startswith("{")
