"""The JSON object that a request is: every complaint names the field and the fix.

What a request asks for. Nothing is passed over in silence: what is not supported is refused by name.
"""

from __future__ import annotations

import difflib
import json
import secrets
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NoReturn

from skippipe.inference.request import SamplingParams
from skippipe.web.auth import ApiSettings
from skippipe.web.errors import found, no_such_model, short, too_long, wrong


def read_object(body: bytes) -> RequestFields:
    try:
        value = json.loads(body.decode(), object_pairs_hook=_without_repeats, parse_constant=_no_constant)
    except UnicodeDecodeError as error:
        raise wrong(None, f"the request is not UTF-8 from byte {error.start} on", "invalid_json") from None
    except RecursionError:
        raise wrong(None, "the request nests lists and objects too deeply", "invalid_json") from None
    except json.JSONDecodeError as error:
        place = f"line {error.lineno}, column {error.colno}"
        raise wrong(None, f"the request is not valid JSON: {error.msg} ({place})", "invalid_json") from None
    except ValueError:  # Python refuses to read such a number
        raise wrong(None, "the request has a number of thousands of digits", "invalid_json") from None
    return RequestFields(value)


class RequestFields:
    """One object, taken field by field; `close` then refuses what nobody asked for. null is as good as nothing."""

    def __init__(self, value: Any, place: str = "") -> None:
        if not isinstance(value, dict):
            raise wrong(place or None, f"expected an object {{…}}, found {found(value)}", "invalid_type")
        self._left: dict[str, Any] = dict(value)
        self._known: list[str] = []
        self._place = place

    def at(self, name: str) -> str:
        return f"{self._place}.{name}" if self._place else name

    def take(self, name: str) -> Any:
        self._known.append(name)
        return self._left.pop(name, None)

    def need(self, name: str) -> Any:
        value = self.take(name)
        if value is None:
            raise wrong(self.at(name), "missing; add it", "missing_required_parameter")
        return value

    def text(self, name: str) -> str:
        return as_text(self.need(name), self.at(name))

    def flag(self, name: str) -> bool:
        """False if it is not there."""
        value = self.take(name)
        if value is not None and not isinstance(value, bool):
            raise wrong(self.at(name), f"expected true or false, found {found(value)}", "invalid_type")
        return bool(value)

    def number(self, name: str, otherwise: float, least: float, most: float) -> float:
        value = self.take(name)
        return otherwise if value is None else as_number(value, self.at(name), least, most)

    def integer(self, name: str, least: int, most: int) -> int | None:
        value = self.take(name)
        if value is None:
            return None
        number = as_number(value, self.at(name), least, most)
        if number != int(number):
            raise wrong(self.at(name), f"expected a whole number, found {found(value)}", "invalid_type")
        return int(value)

    def objects(self, name: str) -> Iterator[RequestFields]:
        """At least one."""
        value = self.need(name)
        if not isinstance(value, list) or not value:
            raise wrong(self.at(name), f"expected a list of objects, found {found(value) if value else 'an empty one'}")
        for index, each in enumerate(value):
            yield RequestFields(each, f"{self.at(name)}[{index}]")

    def ignore(self, *names: str) -> None:
        """That make no difference to an answer."""
        for name in names:
            self.take(name)

    def refuse(self, name: str, *neutral: Any) -> None:
        """Not supported, but for values that ask for nothing."""
        value = self.take(name)
        # 0 == False in Python, but not in a request
        if value is not None and not any(type(value) is type(each) and value == each for each in neutral):
            raise wrong(self.at(name), "not supported here; leave it out", "unsupported_parameter")

    def close(self) -> None:
        for name in self._left:
            near = difflib.get_close_matches(short(name), self._known, n=1)
            hint = f"did you mean '{near[0]}'?" if near else "leave it out"
            raise wrong(self.at(short(name)), f"unknown parameter; {hint}", "unknown_parameter")


def as_text(value: Any, place: str) -> str:
    if not isinstance(value, str):
        raise wrong(place, f"expected a text, found {found(value)}", "invalid_type")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise wrong(place, f"half a character at place {error.start} (a surrogate without the other)") from None
    return value


def as_number(value: Any, place: str, least: float, most: float) -> float | int:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise wrong(place, f"expected a number, found {found(value)}", "invalid_type")
    if not least <= value <= most:
        raise wrong(place, f"expected a number from {least} to {most}, found {found(value)}")
    return value


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        twice, _ = Counter(name for name, _ in pairs).most_common(1)[0]
        raise wrong(None, f"field '{short(twice)}' is given twice in one object: keep one of them", "invalid_json")
    return values


def _no_constant(name: str) -> NoReturn:
    raise wrong(None, f"the request is not valid JSON: it has no {name}", "invalid_json")


MOST_STOPS = 4
USUAL_TOKENS = 16  # that OpenAI answers a bare prompt with unless told otherwise
HOTTEST = 2.0
SEEDS = 2**53  # those that our messages to nodes carry
STEP = 0x9E3779B97F4A7C15  # from the seed of one answer to that of the next; odd, so that none comes twice
LARGEST_SEED = 2**63 - 1
LARGEST_TOP_K = 2**31 - 1
HARMLESS = (
    "user",
    "metadata",
    "store",
    "service_tier",
    "safety_identifier",
    "prompt_cache_key",
    "prompt_cache_options",
    "prompt_cache_retention",
)


@dataclass(frozen=True)
class Conversation:
    messages: tuple[dict[str, str], ...]
    """Each has a role and content."""


Prompt = str | tuple[int, ...] | Conversation


@dataclass(frozen=True)
class CompletionRequest:
    prompts: tuple[Prompt, ...]
    n: int
    """Answers to each of them."""
    most: int | None
    """Tokens of an answer; None: that was not said."""
    usual: int
    """Tokens of an answer if that was not said, and if there is room."""
    sampling: SamplingParams
    """Of the first answer."""
    stops: tuple[str, ...]
    stream: bool
    """Piece by piece?"""
    usage: bool
    """Shall a stream end with its usage?"""
    echo: bool = False
    """Shall the prompt stand before the answer?"""

    @property
    def chat(self) -> bool:
        return isinstance(self.prompts[0], Conversation)

    @property
    def param(self) -> str:
        """The field that the prompts came in."""
        return "messages" if self.chat else "prompt"

    def most_after(self, prompt: int, context: int) -> int:
        """Tokens to answer a prompt of so many tokens with."""
        room = context - prompt
        most = max(1, min(self.usual, room)) if self.most is None else self.most
        if most > room:
            raise too_long(self.param, context, prompt, most)
        return most


@dataclass(frozen=True)
class ServedModel:
    """What there is to ask."""

    model: str
    vocabulary: int
    settings: ApiSettings


RequestParser = Callable[[RequestFields, ServedModel], CompletionRequest]


def seed_of(seed: int, answer: int) -> int:
    """For one of n answers: the first has the seed that was asked for."""
    return (seed + answer * STEP) % SEEDS


def parse_completion(fields: RequestFields, served: ServedModel) -> CompletionRequest:
    """The body of a request to /v1/completions."""
    _check_model(fields, served)
    prompts = _prompts(fields.need("prompt"), served.vocabulary)
    most = fields.integer("max_tokens", 1, served.settings.answer_tokens)
    echo = fields.flag("echo")
    fields.refuse("best_of", 1)
    fields.refuse("logprobs")
    fields.refuse("suffix", "")
    return _asked(fields, served, prompts, most, USUAL_TOKENS, echo)


def parse_chat(fields: RequestFields, served: ServedModel) -> CompletionRequest:
    """The body of a request to /v1/chat/completions."""
    _check_model(fields, served)
    conversation = Conversation(tuple(_message(each) for each in fields.objects("messages")))
    most = fields.integer("max_completion_tokens", 1, served.settings.answer_tokens)
    older = fields.integer("max_tokens", 1, served.settings.answer_tokens)
    if most is not None and older is not None:
        raise wrong("max_tokens", "given beside max_completion_tokens, which means the same: keep one of them")
    fields.ignore("parallel_tool_calls")  # there are none
    fields.refuse("tools", [])
    fields.refuse("tool_choice", "none", "auto")
    fields.refuse("functions", [])
    fields.refuse("function_call", "none", "auto")
    fields.refuse("response_format", {"type": "text"})
    fields.refuse("modalities", ["text"])
    fields.refuse("logprobs", False)
    fields.refuse("top_logprobs", 0)
    for name in ("audio", "prediction", "reasoning_effort", "verbosity", "web_search_options", "moderation"):
        fields.refuse(name)
    most = older if most is None else most
    return _asked(fields, served, (conversation,), most, served.settings.answer_tokens, echo=False)


def _asked(
    fields: RequestFields, served: ServedModel, prompts: tuple[Prompt, ...], most: int | None, usual: int, echo: bool
) -> CompletionRequest:
    """The fields that both have."""
    n = fields.integer("n", 1, served.settings.answers) or 1
    most_answers = served.settings.answers
    if n * len(prompts) > most_answers:
        what = f"{len(prompts)} prompts × {n} answers each"
        raise wrong("prompt" if n == 1 else "n", f"{what} are more than a request may ask for, {most_answers}")
    sampling = _sampling(fields)
    stops = _stops(fields.take("stop"))
    stream = fields.flag("stream")
    usage = _includes_usage(fields, stream)
    fields.refuse("logit_bias", {})
    fields.refuse("presence_penalty", 0, 0.0)
    fields.refuse("frequency_penalty", 0, 0.0)
    fields.ignore(*HARMLESS)
    fields.close()
    return CompletionRequest(
        prompts, n, most, min(usual, served.settings.answer_tokens), sampling, stops, stream, usage, echo
    )


def _check_model(fields: RequestFields, served: ServedModel) -> None:
    model = fields.text("model")
    if model != served.model:
        raise no_such_model(model, served.model)


def _sampling(fields: RequestFields) -> SamplingParams:
    top_p = fields.number("top_p", 1.0, 0.0, 1.0)
    if top_p == 0:
        raise wrong("top_p", "0 leaves no token to choose from; for the most likely one always, give temperature 0")
    seed = fields.integer("seed", -LARGEST_SEED - 1, LARGEST_SEED)
    return SamplingParams(
        temperature=float(fields.number("temperature", 1.0, 0.0, HOTTEST)),
        top_k=fields.integer("top_k", 0, LARGEST_TOP_K) or 0,
        top_p=float(top_p),
        seed=secrets.randbelow(SEEDS) if seed is None else seed,
    )


def _stops(value: Any) -> tuple[str, ...]:
    if value is None:
        return ()
    given = value if isinstance(value, list) else [value]
    if len(given) > MOST_STOPS:
        raise wrong("stop", f"{len(given)} texts are given; {MOST_STOPS} at most")
    stops = tuple(as_text(each, "stop") for each in given)
    if "" in stops:
        raise wrong("stop", "an empty text would stop every answer before it begins; leave it out")
    return stops


def _includes_usage(fields: RequestFields, stream: bool) -> bool:
    value = fields.take("stream_options")
    if value is None:
        return False
    if not stream:
        raise wrong("stream_options", "only for streams: leave it out, or set stream to true")
    options = RequestFields(value, "stream_options")
    usage = options.flag("include_usage")
    options.ignore("include_obfuscation")  # against eavesdroppers who count bytes; we add none
    options.close()
    return usage


def _prompts(value: Any, vocabulary: int) -> tuple[Prompt, ...]:
    """A text, several, token ids, or several lists of these."""
    if isinstance(value, str):
        return (_prompt(value, "prompt", vocabulary),)
    if not isinstance(value, list) or not value:
        what = "an empty list" if value == [] else found(value)
        raise wrong("prompt", f"expected a text, a list of texts, token ids or a list of such lists, found {what}")
    if isinstance(value[0], (str, list)):
        return tuple(_prompt(each, f"prompt[{index}]", vocabulary) for index, each in enumerate(value))
    return (_prompt(value, "prompt", vocabulary),)


def _prompt(value: Any, place: str, vocabulary: int) -> str | tuple[int, ...]:
    if value in ("", []):
        raise wrong(place, "empty: say something")
    if not isinstance(value, list):
        return as_text(value, place)
    for index, token in enumerate(value):
        if type(token) is not int:
            raise wrong(f"{place}[{index}]", f"expected a token id, found {found(token)}", "invalid_type")
        if not 0 <= token < vocabulary:
            raise wrong(f"{place}[{index}]", f"{found(token)} is no token id: they go from 0 to {vocabulary - 1}")
    return tuple(value)


def _message(fields: RequestFields) -> dict[str, str]:
    role = fields.text("role")
    if role in ("tool", "function"):
        raise wrong(fields.at("role"), f"'{role}' is not supported here: there are no tools", "unsupported_value")
    if role not in ("system", "developer", "user", "assistant"):
        raise wrong(fields.at("role"), f"{found(role)} is none of system, developer, user, assistant")
    content = _content(fields.need("content"), fields.at("content"))
    for name in ("name", "refusal", "audio", "function_call", "tool_call_id"):
        fields.refuse(name)
    for name in ("tool_calls", "annotations"):
        fields.refuse(name, [])
    fields.close()
    return {"role": "system" if role == "developer" else role, "content": content}


def _content(value: Any, place: str) -> str:
    """A text, or parts of one that are put together as they are."""
    if not isinstance(value, list):
        return as_text(value, place)
    return "".join(_part(RequestFields(each, f"{place}[{index}]")) for index, each in enumerate(value))


def _part(fields: RequestFields) -> str:
    kind = fields.text("type")
    if kind != "text":
        raise wrong(fields.at("type"), f"{found(kind)} is not supported here: only 'text' is", "unsupported_value")
    text = fields.text("text")
    fields.close()
    return text
