"""Errors of an HTTP API, in the shape of OpenAI's."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

RATE_LIMITED, SERVER_ERROR = 429, 500  # statuses
LARGE = 10**15  # larger numbers are not repeated in an error
MOST_SHOWN = 40  # characters of a text


@dataclass(eq=False)
class APIError(Exception):
    """An error that the client is answered with."""

    status: int
    message: str
    """What is wrong and what to do, for people."""
    code: str
    """The kind of error, for programs."""
    param: str | None = None
    """The field of the request that is wrong."""
    headers: Mapping[str, str] = field(default_factory=dict)

    @property
    def type(self) -> str:
        if self.status == RATE_LIMITED:
            return "requests"
        return "server_error" if self.status >= SERVER_ERROR else "invalid_request_error"

    @property
    def body(self) -> dict[str, Any]:
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}


def wrong(param: str | None, message: str, code: str = "invalid_value") -> APIError:
    """A request that is invalid because of one field, or as a whole."""
    return APIError(400, f"{param}: {message}" if param else message, code, param)


def no_such_model(requested: str, served: str) -> APIError:
    return APIError(
        404, f"model: '{short(requested)}' is not served here; ask for '{served}'", "model_not_found", "model"
    )


def too_long(param: str, context: int, prompt: int, answer: int) -> APIError:
    """A prompt beyond the context. The first words are OpenAI's: there are clients that look for them."""
    return wrong(
        param,
        f"This model's maximum context length is {context} tokens; this asks for {prompt + answer} "
        f"({prompt} in the prompt, {answer} for the answer): shorten the prompt or ask for a shorter answer",
        "context_length_exceeded",
    )


def unauthorized(message: str) -> APIError:
    return APIError(401, message, "invalid_api_key", headers={"WWW-Authenticate": "Bearer"})


def too_large(max_bytes: int) -> APIError:
    """A body beyond the limit; the connection ends, as the rest of the body is not read."""
    message = f"the request has more than the {max_bytes:,} bytes that are taken here: send less at once"
    return APIError(413, message, "request_too_large", headers={"Connection": "close"})


def rate_limited(message: str, wait_s: float) -> APIError:
    return APIError(RATE_LIMITED, message, "rate_limit_exceeded", headers=_retry_after(wait_s))


def unavailable(reason: str, retry_after: timedelta) -> APIError:
    message = f"no answer can be given now: {reason}; try again later"
    return APIError(503, message, "unavailable", headers=_retry_after(retry_after.total_seconds()))


def timed_out(timeout: timedelta) -> APIError:
    """An answer beyond its deadline. OpenAI's clients would retry, which would take as long: the header forbids it."""
    message = f"the answer was not complete after {timeout.total_seconds():g} s: ask for a shorter one"
    return APIError(504, message, "timeout", headers={"x-should-retry": "false"})


def internal_error(request_id: str) -> APIError:
    message = f"the server failed; its operator finds the reason in its log under {request_id}"
    return APIError(500, message, "internal_error")


def found(value: Any) -> str:
    """A value of a request in few words, for an error."""
    match value:
        case None:
            return "null"
        case bool():
            return str(value).lower()
        case str():
            return f"the text '{short(value)}'"
        case int() | float():
            return f"the number {value}" if abs(value) < LARGE else "a number that is too large"
        case list():
            return "a list"
    return "an object"


def short(text: str) -> str:
    """A text of a request, shortened; characters that could play tricks on a terminal become spaces."""
    shown = "".join(each if each.isprintable() else " " for each in text[:MOST_SHOWN])
    return shown if len(text) <= MOST_SHOWN else f"{shown}…"


def _retry_after(wait_s: float) -> dict[str, str]:
    return {"Retry-After": str(max(1, math.ceil(wait_s)))}
