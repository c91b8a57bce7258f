"""The OpenAI request schema: what a request to /v1/completions or /v1/chat/completions may ask for.

Nothing is passed over in silence: a field that is unknown or not supported is refused by name, and every error names
the field, what was found there and what to do.
"""

from __future__ import annotations

import difflib
import json
import secrets
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, NoReturn, Self, TypeVar, cast

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    ModelWrapValidatorHandler,
    Tag,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from skippipe.inference.request import MAX_LOGPROBS, SamplingParams
from skippipe.serving.grammar import ANY_OBJECT
from skippipe.web import ApiSettings, found, no_such_model, short, too_long, wrong

SEEDS = 2**53  # seeds that the messages to nodes can carry
SEED_STRIDE = 0x9E3779B97F4A7C15  # from the seed of one choice to the next; odd, so that no seed comes twice
LARGEST_SEED = 2**63 - 1
LARGEST_TOP_K = 2**31 - 1
NO_PLACE = ("", "[key]")  # the latter is what pydantic says of the names in an object
MAX_BIASES = 1024  # tokens that a request may name
_ERRORS = {
    "missing": ("missing_required_parameter", "missing; add it"),
    "string_type": ("invalid_type", "expected a text, found {found}"),
    "bool_type": ("invalid_type", "expected true or false, found {found}"),
    "int_type": ("invalid_type", "expected a whole number, found {found}"),
    "float_type": ("invalid_type", "expected a number, found {found}"),
    "dict_type": ("invalid_type", "expected an object {{…}}, found {found}"),
    "list_type": ("invalid_type", "expected a list, found {found}"),
    "model_type": ("invalid_type", "expected an object {{…}}, found {found}"),
    "string_unicode": ("invalid_value", "half a character (a surrogate without the other)"),
    "literal_error": ("unsupported_value", "expected {expected}, found {found}"),
}
"""Pydantic's types of errors whose wording is ours → the error's code and message."""
CODES = {code for code, _ in _ERRORS.values()} | {"unsupported_parameter", "unknown_parameter"}


@dataclass(frozen=True)
class ServedModel:
    """The model and the limits that a request is checked against: the context of validation."""

    model: str
    vocabulary: int
    settings: ApiSettings


Validation = ValidationInfo[ServedModel]


def _range(least: float, most: float | Callable[[ServedModel], int]) -> AfterValidator:
    """Both ends belong to the range; the upper one may depend on what is served."""

    def check(value: float, info: Validation) -> float:
        end = most(info.context) if callable(most) else most
        if not least <= value <= end:
            context = {"least": least, "most": end, "found": found(value)}
            raise PydanticCustomError("range", "expected a number from {least} to {most}, found {found}", context)
        return value

    return AfterValidator(check)


def _is_token(key: str, info: Validation) -> str:
    if not (key.isascii() and key.isdecimal() and len(key) < 10 and int(key) < info.context.vocabulary):
        context = {"most": info.context.vocabulary - 1, "found": found(key)}
        raise PydanticCustomError("range", "expected a token id from 0 to {most}, found {found}", context)
    return key


def _few_biases(value: Any) -> Any:
    """Looks at their number before anything is read of them."""
    if isinstance(value, dict) and len(value) > MAX_BIASES:
        context = {"most": MAX_BIASES, "count": len(value)}
        raise PydanticCustomError("too_long", "{count} tokens are more than a request may name, {most}", context)
    return value


Element = TypeVar("Element")
ListOf = Annotated[list[Element], Field(fail_fast=True)]
"""A list that is read up to the first error: to collect those of a long one would take seconds, for all clients."""
Text = Annotated[str, Field(min_length=0)]  # a bare str would let half characters pass
Integer = Annotated[
    int, BeforeValidator(lambda value: int(value) if isinstance(value, float) and value.is_integer() else value)
]
MaxTokens = Annotated[Integer, _range(1, lambda served: served.settings.max_tokens)]
Prompt = Annotated[
    Annotated[str, Field(min_length=1), Tag("|text")]
    | Annotated[
        ListOf[Annotated[int, _range(0, lambda served: served.vocabulary - 1)]], Field(min_length=1), Tag("|ids")
    ],
    Discriminator(lambda value: "|ids" if isinstance(value, list) else "|text"),
]
"""A text or token ids. Tags begin with a bar, as they are no part of a field's place."""


class _Object(BaseModel):
    """A JSON object, read strictly; null counts as a field that is not there."""

    model_config = ConfigDict(strict=True)
    IGNORED: ClassVar[tuple[str, ...]] = ()
    """Fields that make no difference to an answer."""
    UNSUPPORTED: ClassVar[dict[str, tuple[Any, ...]]] = {}
    """Fields that are refused → values that ask for nothing and pass."""

    @model_validator(mode="wrap")
    @classmethod
    def _refuse_others(cls, value: Any, validate: ModelWrapValidatorHandler[Self]) -> Self:
        """Fields that are not supported or unknown are refused last: what is wrong with the others says more."""
        if not isinstance(value, dict):
            return validate(value)
        fields = {name: each for name, each in value.items() if each is not None}
        names = {field.alias or name for name, field in cls.model_fields.items()}
        known = validate({name: each for name, each in fields.items() if name in names})
        for name, each in fields.items():
            if name in cls.UNSUPPORTED:
                # 0 == False in Python, but not in a request
                if not any(type(each) is type(other) and each == other for other in cls.UNSUPPORTED[name]):
                    message = "not supported here; leave it out"
                    raise PydanticCustomError("unsupported_parameter", message, {"field": name})
            elif name not in names and name not in cls.IGNORED:
                near = difflib.get_close_matches(short(name), (*names, *cls.UNSUPPORTED, *cls.IGNORED), n=1)
                hint = f"did you mean '{near[0]}'?" if near else "leave it out"
                context = {"field": short(name), "hint": hint}
                raise PydanticCustomError("unknown_parameter", "unknown parameter; {hint}", context)
        return known


class StreamOptions(_Object):
    IGNORED = ("include_obfuscation",)  # against eavesdroppers who count bytes; none are added here
    include_usage: bool = False


class ContentPart(_Object):
    type: Literal["text"]
    text: Text


class FunctionCall(_Object):
    name: Text
    arguments: Text

    def for_template(self) -> dict[str, Any]:
        """Templates expect the arguments as an object; what is none stays as it is."""
        try:
            arguments = json.loads(self.arguments)
        except (ValueError, RecursionError):
            arguments = None
        return {"name": self.name, "arguments": arguments if isinstance(arguments, dict) else self.arguments}


class ToolCall(_Object):
    id: Text
    type: Literal["function"] = "function"
    function: FunctionCall


class FunctionSpec(_Object):
    IGNORED = ("strict",)  # calls are text here, whatever their shape
    name: Annotated[Text, Field(min_length=1)]
    description: Text = ""
    parameters: dict[str, Any] = {}


class Tool(_Object):
    type: Literal["function"]
    function: FunctionSpec


class ChatMessage(_Object):
    IGNORED = ("name",)
    UNSUPPORTED = {**dict.fromkeys(("refusal", "audio", "function_call"), ()), "annotations": ([],)}
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: (
        Annotated[
            Annotated[Text, Tag("|text")] | Annotated[ListOf[ContentPart], Tag("|parts")],
            Discriminator(lambda value: "|parts" if isinstance(value, list) else "|text"),
        ]
        | None
    ) = None
    tool_calls: ListOf[ToolCall] = []
    tool_call_id: Text | None = None

    @model_validator(mode="after")
    def _makes_sense(self) -> Self:
        if self.content is None and not self.tool_calls:
            raise PydanticCustomError("missing_required_parameter", "missing; add it", {"field": "content"})
        for name, role in (("tool_calls", "assistant"), ("tool_call_id", "tool")):
            if getattr(self, name) and self.role != role:
                message = "only for the role {role}; leave it out"
                raise PydanticCustomError("invalid_value", message, {"field": name, "role": f"'{role}'"})
        return self

    def for_template(self) -> dict[str, Any]:
        """A message as chat templates know it; the parts of a content are joined as they are."""
        parts = self.content or ""
        text = parts if isinstance(parts, str) else "".join(part.text for part in parts)
        found: dict[str, Any] = {"role": "system" if self.role == "developer" else self.role, "content": text}
        if self.tool_calls:
            found["tool_calls"] = [
                {"id": call.id, "type": call.type, "function": call.function.for_template()} for call in self.tool_calls
            ]
        return found if self.tool_call_id is None else {**found, "tool_call_id": self.tool_call_id}


class JsonSchema(_Object):
    IGNORED = ("name", "description", "strict")  # an answer always fits the schema
    schema_: dict[str, Any] = Field(alias="schema")


class ResponseFormat(_Object):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _makes_sense(self) -> Self:
        context = {"field": "json_schema"}
        if self.type == "json_schema" and self.json_schema is None:
            message = "missing; add an object that has the schema in its field 'schema'"
            raise PydanticCustomError("missing_required_parameter", message, context)
        if self.type != "json_schema" and self.json_schema is not None:
            message = "only for the type 'json_schema': make it that, or leave this out"
            raise PydanticCustomError("invalid_value", message, context)
        return self

    @property
    def schema_wanted(self) -> dict[str, Any] | None:
        """The schema that the answer has to fit; None: it is any text."""
        if self.json_schema is not None:
            return self.json_schema.schema_
        return ANY_OBJECT if self.type == "json_object" else None


class GenerationFields(_Object):
    """The fields that both endpoints have."""

    IGNORED: ClassVar[tuple[str, ...]] = (
        "user",
        "metadata",
        "store",
        "service_tier",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_options",
        "prompt_cache_retention",
    )
    param: ClassVar[str]
    """The field that the prompts come in."""
    default_tokens: ClassVar[int] = 2**62
    """Tokens of a choice where the request names no number, if there is room."""
    model: Text
    max_tokens: MaxTokens | None = None
    """Tokens of a choice at most; None: the endpoint's default, or as many as there is room for."""
    n: Annotated[Integer, _range(1, lambda served: served.settings.max_choices)] = 1
    """Choices for each prompt."""
    temperature: Annotated[float, _range(0.0, 2.0)] = 1.0
    top_p: Annotated[float, _range(0.0, 1.0)] = 1.0
    top_k: Annotated[Integer, _range(0, LARGEST_TOP_K)] = 0
    seed: Annotated[Integer, _range(-LARGEST_SEED - 1, LARGEST_SEED)] = Field(
        default_factory=lambda: secrets.randbelow(SEEDS)
    )
    min_p: Annotated[float, _range(0.0, 1.0)] = 0.0
    presence_penalty: Annotated[float, _range(-2.0, 2.0)] = 0.0
    frequency_penalty: Annotated[float, _range(-2.0, 2.0)] = 0.0
    repetition_penalty: Annotated[float, _range(0.01, 100.0)] = 1.0
    logit_bias: Annotated[
        dict[Annotated[str, AfterValidator(_is_token)], Annotated[float, _range(-100.0, 100.0)]],
        BeforeValidator(_few_biases),
    ] = {}
    """Token ids, in decimal, and what is added to their logits."""
    ignore_eos: bool = False
    """Does the answer go on after a token that ends a text?"""
    response_format: ResponseFormat | None = None
    stop: Annotated[
        ListOf[Annotated[Text, Field(min_length=1)]],
        Field(max_length=4),
        BeforeValidator(lambda value: [value] if isinstance(value, str) else value),
    ] = []
    stream: bool = False
    stream_options: StreamOptions | None = None

    @field_validator("model")
    @classmethod
    def _is_served(cls, model: str, info: Validation) -> str:
        if model != info.context.model:
            raise no_such_model(model, info.context.model)
        return model

    @model_validator(mode="after")
    def _makes_sense(self) -> Self:
        if self.top_p == 0:
            raise wrong("top_p", "0 leaves no token to choose from; for the most likely one always, give temperature 0")
        if self.stream_options is not None and not self.stream:
            raise wrong("stream_options", "only for streams: leave it out, or set stream to true")
        return self

    def max_new_tokens(self, prompt_tokens: int, context: int, limit: int) -> int:
        """Tokens to answer a prompt of so many tokens with, where no answer may have more than `limit`."""
        room = context - prompt_tokens
        most = self.max_tokens or max(1, min(self.default_tokens, limit, room))
        if most > room:
            raise too_long(self.param, context, prompt_tokens, most)
        return most

    @property
    def include_usage(self) -> bool:
        """Does a stream end with its usage?"""
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    @abstractmethod
    def num_logprobs(self) -> int | None:
        """How many of the likeliest tokens are reported beside the chosen one; None: not even that one."""

    def sampling(self, choice: int) -> SamplingParams:
        """Parameters of one of n choices: the first has the seed that was asked for."""
        seed = (self.seed + choice * SEED_STRIDE) % SEEDS
        return SamplingParams(
            self.temperature,
            self.top_k,
            self.top_p,
            seed,
            self.min_p,
            self.repetition_penalty,
            self.presence_penalty,
            self.frequency_penalty,
            tuple((int(token), bias) for token, bias in self.logit_bias.items()),
            self.num_logprobs,
        )


class CompletionRequest(GenerationFields):
    """The body of a request to /v1/completions."""

    param = "prompt"
    default_tokens = 16  # as OpenAI has it
    UNSUPPORTED = {"best_of": (1,), "suffix": ("",)}
    prompt: Annotated[
        Annotated[Prompt, Tag("|one")] | Annotated[ListOf[Prompt], Tag("|several")],
        Discriminator(lambda value: "|several" if _several(value) else "|one"),
    ]
    """A text, several, token ids, or several lists of token ids."""
    echo: bool = False
    """Does the prompt stand before each choice?"""
    logprobs: Annotated[Integer, _range(0, MAX_LOGPROBS)] | None = None

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs

    @property
    def prompts(self) -> list[str | list[int]]:
        return cast(list[str | list[int]], self.prompt if _several(self.prompt) else [self.prompt])

    @model_validator(mode="after")
    def _few_choices(self, info: Validation) -> Self:
        if self.echo and self.logprobs is not None:
            raise wrong("logprobs", "not given for prompts: leave out echo", "unsupported_value")
        count, most = len(self.prompts), info.context.settings.max_choices
        if self.n * count > most:
            what = f"{count} prompts × {self.n} answers each"
            raise wrong("prompt" if self.n == 1 else "n", f"{what} are more than a request may ask for, {most}")
        return self


class ChatCompletionRequest(GenerationFields):
    """The body of a request to /v1/chat/completions."""

    param = "messages"
    IGNORED: ClassVar[tuple[str, ...]] = (*GenerationFields.IGNORED, "parallel_tool_calls")
    UNSUPPORTED = {
        "functions": ([],),
        "function_call": ("none", "auto"),
        "modalities": (["text"],),
        **dict.fromkeys(
            ("audio", "prediction", "reasoning_effort", "verbosity", "web_search_options", "moderation"), ()
        ),
    }
    messages: Annotated[ListOf[ChatMessage], Field(min_length=1)]
    max_completion_tokens: MaxTokens | None = None
    logprobs: bool = False
    top_logprobs: Annotated[Integer, _range(0, MAX_LOGPROBS)] = 0
    tools: ListOf[Tool] = []
    tool_choice: Literal["none", "auto"] = "auto"

    @property
    def num_logprobs(self) -> int | None:
        return self.top_logprobs if self.logprobs else None

    @property
    def tools_for_template(self) -> list[dict[str, Any]]:
        """Without those fields of a function that were not given: some templates look whether they are there."""
        wanted = [] if self.tool_choice == "none" else self.tools
        given = [
            {name: value for name, value in vars(tool.function).items() if name in tool.function.model_fields_set}
            for tool in wanted
        ]
        return [{"type": "function", "function": function} for function in given]

    @model_validator(mode="after")
    def _one_limit(self) -> Self:
        if self.top_logprobs and not self.logprobs:
            raise wrong("top_logprobs", "only with logprobs: set that to true, or leave this out")
        if self.max_completion_tokens is not None:
            if self.max_tokens is not None:
                raise wrong("max_tokens", "given beside max_completion_tokens, which means the same: keep one of them")
            self.max_tokens = self.max_completion_tokens
        return self


AnyRequest = CompletionRequest | ChatCompletionRequest


def parse_request(schema: type[AnyRequest], body: bytes, served: ServedModel) -> AnyRequest:
    """APIError names the first field that is wrong."""
    try:
        return schema.model_validate(_read_json(body), context=served)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
    context = first.get("ctx", {})
    place = [
        each for each in (*first["loc"], context.get("field", "")) if str(each)[:1] != "|" and each not in NO_PLACE
    ]
    param = "".join(f"[{each}]" if isinstance(each, int) else f".{short(each)}" for each in place).removeprefix(".")
    code, message = first["type"], first["msg"]
    if code in _ERRORS:
        code, template = _ERRORS[code]
        message = template.format(found=found(first["input"]), **context)
    raise wrong(param or None, message, code if code in CODES else "invalid_value")


def _several(prompt: Any) -> bool:
    return isinstance(prompt, list) and bool(prompt) and isinstance(prompt[0], (str, list))


def _read_json(body: bytes) -> Any:
    try:
        return json.loads(body.decode(), object_pairs_hook=_without_repeats, parse_constant=_no_constant)
    except UnicodeDecodeError as error:
        reason = f"not UTF-8 from byte {error.start} on"
    except RecursionError:
        reason = "too deep: it nests lists and objects too deeply"
    except json.JSONDecodeError as error:
        reason = f"not valid JSON: {error.msg} (line {error.lineno}, column {error.colno})"
    except ValueError:  # Python refuses to read such a number
        reason = "not valid: it has a number of thousands of digits"
    raise wrong(None, f"the request is {reason}", "invalid_json")


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        twice, _ = Counter(name for name, _ in pairs).most_common(1)[0]
        raise wrong(None, f"field '{short(twice)}' is given twice in one object: keep one of them", "invalid_json")
    return values


def _no_constant(name: str) -> NoReturn:
    raise wrong(None, f"the request is not valid JSON: it has no {name}", "invalid_json")
