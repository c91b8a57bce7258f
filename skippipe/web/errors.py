"""Answers that are errors, in OpenAI's shape."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

RATE_LIMITED, FIRST_OF_OURS = 429, 500  # statuses
LARGE = 10**15  # beyond it a number is not repeated to whoever sent it


@dataclass(eq=False)
class APIError(Exception):
    status: int
    message: str
    """For people: what is wrong, and what to do."""
    code: str
    """For programs."""
    param: str | None = None
    """The field that is wrong."""
    headers: Mapping[str, str] = field(default_factory=dict)

    @property
    def type(self) -> str:
        if self.status == RATE_LIMITED:
            return "requests"
        return "server_error" if self.status >= FIRST_OF_OURS else "invalid_request_error"

    @property
    def body(self) -> dict[str, Any]:
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}


def wrong(param: str | None, message: str, code: str = "invalid_value") -> APIError:
    """A field that cannot be taken as it is."""
    return APIError(400, f"{param}: {message}" if param else message, code, param)


def no_such_model(asked: str, there: str) -> APIError:
    return APIError(404, f"model: '{short(asked)}' is not served here; ask for '{there}'", "model_not_found", "model")


def too_long(param: str, context: int, prompt: int, answer: int) -> APIError:
    """The first words are OpenAI's: there are clients that look for them."""
    return wrong(
        param,
        f"This model's maximum context length is {context} tokens; this asks for {prompt + answer} "
        f"({prompt} in the prompt, {answer} for the answer): shorten the prompt or ask for a shorter answer",
        "context_length_exceeded",
    )


def not_let_in(message: str) -> APIError:
    return APIError(401, message, "invalid_api_key", headers={"WWW-Authenticate": "Bearer"})


def too_large(most_bytes: int) -> APIError:
    """What has not been read of the request is not wanted any more, so the connection ends."""
    message = f"the request has more than the {most_bytes:,} bytes that are taken here: send less at once"
    return APIError(413, message, "request_too_large", headers={"Connection": "close"})


def too_often(message: str, wait_s: float) -> APIError:
    return APIError(RATE_LIMITED, message, "rate_limit_exceeded", headers=_retry_after(wait_s))


def unavailable(reason: str, wait: timedelta) -> APIError:
    message = f"no answer can be given now: {reason}; try again later"
    return APIError(503, message, "unavailable", headers=_retry_after(wait.total_seconds()))


def too_slow(most: timedelta) -> APIError:
    """OpenAI's clients repeat what failed unless they are told not to; this would only take as long once more."""
    message = f"the answer was not complete after {most.total_seconds():g} s: ask for a shorter one"
    return APIError(504, message, "timeout", headers={"x-should-retry": "false"})


def our_fault(request: str) -> APIError:
    message = f"the server failed; whoever runs it finds the reason in its log under {request}"
    return APIError(500, message, "internal_error")


def found(value: Any) -> str:
    """What somebody sent, in few words."""
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


def short(text: str, most: int = 40) -> str:
    """What somebody sent, so that it can be shown: what could play tricks on a terminal becomes a space."""
    shown = "".join(each if each.isprintable() else " " for each in text[:most])
    return shown if len(text) <= most else f"{shown}…"


def _retry_after(wait_s: float) -> dict[str, str]:
    return {"Retry-After": str(max(1, math.ceil(wait_s)))}
