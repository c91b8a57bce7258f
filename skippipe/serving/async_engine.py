"""The engine of the HTTP interface: text in, text out. Requests go to the gateway, their outputs come as asynchronous
iterators; `EngineClient` is all that the interface knows of it."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple, Protocol

from skippipe.errors import UserError
from skippipe.inference.request import Detokenizer, FinishReason, SamplingParams, TokenLogprobs
from skippipe.serving.gateway_thread import GatewayThread
from skippipe.serving.grammar import GrammarCompiler
from skippipe.serving.sequence import SequenceRequest, SequenceState, TokenConstraint

TEMPLATE_S = 5.0
"""Deadline of a chat template: it is a program that comes with the model, and may loop for ever."""
TEMPLATE_CHARACTERS = 2**24
MAX_TOKEN_TEXTS = 2**16  # that are kept
Constraint = Callable[[], TokenConstraint]
REFUSALS = {
    FinishReason.UNAVAILABLE: "too few stages of the model are there",
    FinishReason.FAILED: "no node could compute it",
    FinishReason.CANCELLED: "the server is being stopped",
}


@dataclass(frozen=True)
class EngineRequest:
    """What is to be generated."""

    prompt: tuple[int, ...]
    max_tokens: int
    sampling: SamplingParams
    stop: tuple[str, ...] = ()
    """Texts before which the answer ends."""
    ignore_eos: bool = False
    """Does the answer go on after a token that ends a text?"""
    constraint: Constraint | None = None
    """What the answer has to look like; None: anything."""


@dataclass(frozen=True)
class TextLogprob:
    """A token as text and its log-probability by the model."""

    text: str
    logprob: float
    top: tuple[TextLogprob, ...] = ()
    """The likeliest tokens at its position, if they were asked for."""


@dataclass(frozen=True)
class RequestOutput:
    """New text of an answer, and the answer's counts so far."""

    text: str
    """May be empty: a token need not end a character, and what could begin a stop string is held back."""
    num_tokens: int
    num_stages: int
    """Stages of the shortest route by which a token of the answer was computed."""
    finish_reason: FinishReason | None = None
    """STOP or LENGTH with the last output; None: there is more."""
    missing: tuple[int, ...] = ()
    """Stages without which a token of the answer was computed."""
    logprobs: tuple[TextLogprob, ...] = ()
    """Log-probabilities of the new tokens, if they were asked for."""
    queue_s: float = 0.0
    """Seconds that the request waited for a place."""


class _Update(NamedTuple):
    """A sequence at the moment when it has another token or ends."""

    tokens: list[int]
    """Those that have come since the update before: what waits for a client that reads slowly is no more than these."""
    logprobs: list[TokenLogprobs]
    """Log-probabilities of these, if they were asked for."""
    num_stages: int
    missing: tuple[int, ...]
    queue_s: float
    finish_reason: FinishReason | None

    @classmethod
    def of(cls, sequence: SequenceState, known: int) -> _Update:
        """An update for a client that knows so many tokens of the answer."""
        return cls(
            sequence.tokens[len(sequence.request.prompt) + known :],
            sequence.logprobs[known:],
            sequence.num_stages,
            tuple(sorted(sequence.missing)),
            (sequence.queue_ns or 0) / 1e9,
            sequence.finish_reason,
        )


@dataclass(frozen=True)
class StageCoverage:
    """How many of the model's stages are there, or computed something, and which are not."""

    stages: int
    total: int
    missing: tuple[int, ...] = ()
    """Numbers of the stages that are not there, or without which something was computed."""

    broken_hops: tuple[tuple[int, int], ...] = ()
    """Stages of which no node of the first reaches a node of the second."""

    def __str__(self) -> str:
        return f"{self.stages}/{self.total}"

    def to_json(self) -> dict[str, Any]:
        found = {"stages": self.stages, "of": self.total, "missing": list(self.missing)}
        return found | ({"broken_hops": [list(hop) for hop in self.broken_hops]} if self.broken_hops else {})


class RequestRefused(Exception):
    """The queue is full, or too few stages are left; the argument says which, for people."""


class SchemaTooComplex(UserError):
    """An answer could not be held to its schema to the end."""


class UnknownTools(UserError):
    """Tools, for a model whose chat template knows none."""


class EngineClient(Protocol):
    """The engine. Text is encoded and decoded on threads of their own, which need not be the one that generates."""

    model: str
    """The model's name, to clients."""
    created: int
    """When the model was loaded, in seconds since 1970."""
    context: int
    """Tokens of prompt and answer at most."""
    vocabulary: int
    """Number of the model's tokens: ids are below it."""

    def coverage(self) -> StageCoverage:
        """The stages that are there; none where nothing can be answered."""

    def stage_nodes(self) -> Sequence[int]:
        """How many live nodes hold each stage."""

    def stats(self) -> dict[str, float]:
        """Values for Prometheus by their names, which end in _total if they only grow."""

    def encode(self, text: str) -> list[int]: ...

    def decode(self, tokens: Sequence[int]) -> str: ...

    def encode_chat(self, messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]] = ()) -> list[int]:
        """A conversation as a prompt: each message has a role and content. UserError if there is no way to write it."""

    def json_constraint(self, schema: dict[str, Any]) -> Constraint:
        """What holds an answer to a JSON schema; UserError if that cannot be done."""

    def generate(self, request: EngineRequest) -> AsyncGenerator[RequestOutput, None]:
        """Output by output; the last one has a finish reason. Closing the iterator cancels. Raises RequestRefused, or
        SchemaTooComplex."""


@contextmanager
def _bounded(seconds: float) -> Iterator[None]:
    """A deadline for Python code that loops: no thread can be stopped from outside, so this one checks every line."""
    end = time.monotonic() + seconds

    def check(_frame: Any, _event: str, _argument: Any) -> Any:
        if time.monotonic() > end:
            raise TimeoutError(f"it is not done after {seconds:g} s")
        return check

    before = sys.gettrace()
    sys.settrace(check)
    try:
        yield
    finally:
        sys.settrace(before)


@dataclass
class AsyncEngine:
    """The `EngineClient` of a model whose stages are on nodes."""

    gateway: GatewayThread
    tokenizer: Any
    """A tokenizer of transformers."""
    model: str
    context: int
    vocabulary: int
    end_tokens: frozenset[int]
    created: int = field(init=False, default_factory=lambda: int(time.time()))
    _token_texts: dict[int, str] = field(init=False, default_factory=dict)

    def coverage(self) -> StageCoverage:
        gateway = self.gateway
        return StageCoverage(gateway.covered_stages, gateway.stages, gateway.missing, gateway.broken_hops)

    def stage_nodes(self) -> Sequence[int]:
        return self.gateway.stage_nodes

    def stats(self) -> dict[str, float]:
        return self.gateway.stats

    def encode(self, text: str) -> list[int]:
        """Tokens, with the special ones around them that the model was trained with."""
        found: list[int] = self.tokenizer(text)["input_ids"]
        return found

    def decode(self, tokens: Sequence[int]) -> str:
        found: str = self.tokenizer.decode(list(tokens), skip_special_tokens=True)
        return found

    def encode_chat(self, messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]] = ()) -> list[int]:
        if not getattr(self.tokenizer, "chat_template", None):
            raise UserError("the model has no chat template, so it knows no conversations: use /v1/completions")
        given = list(tools) or None
        try:
            if given and "tools" not in self.tokenizer.get_chat_template(tools=given):
                raise UnknownTools("the model's chat template has no place for them: leave them out")
            with _bounded(TEMPLATE_S):
                text = self.tokenizer.apply_chat_template(
                    list(messages), tools=given, tokenize=False, add_generation_prompt=True
                )
        except UserError:
            raise
        except Exception as error:  # a template is a program of its own
            raise UserError(f"the model's chat template does not take them: {error}") from None
        if len(text) > TEMPLATE_CHARACTERS:
            raise UserError(
                f"the model's chat template makes {len(text):,} characters of them; "
                f"{TEMPLATE_CHARACTERS:,} at most are read"
            )
        try:
            text.encode()
        except UnicodeEncodeError:
            raise UserError("half a character (a surrogate without the other) is in them") from None
        found: list[int] = self.tokenizer(text, add_special_tokens=False)["input_ids"]  # the template has them
        return found

    def json_constraint(self, schema: dict[str, Any]) -> Constraint:
        return self._grammars.json_schema(schema)

    @cached_property
    def _grammars(self) -> GrammarCompiler:
        return GrammarCompiler(self.tokenizer, self.vocabulary, self.end_tokens)

    async def generate(self, request: EngineRequest) -> AsyncGenerator[RequestOutput, None]:
        loop = asyncio.get_running_loop()
        updates: asyncio.Queue[_Update | Exception] = asyncio.Queue()
        end_tokens = frozenset[int]() if request.ignore_eos else self.end_tokens

        def put(update: _Update | Exception) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: no request waits any more
                loop.call_soon_threadsafe(updates.put_nowait, update)

        known = 0

        def updated(sequence: SequenceState) -> None:
            nonlocal known
            update = _Update.of(sequence, known)
            known += len(update.tokens)
            put(update)

        wanted = SequenceRequest(request.prompt, request.max_tokens, end_tokens, request.sampling, request.constraint)
        self.gateway.submit(wanted, updated, put)
        detokenizer = Detokenizer(self.tokenizer, request.prompt, request.stop)
        num_tokens, reason = 0, None
        try:
            while reason is None:
                update = await updates.get()
                if isinstance(update, Exception):
                    raise RequestRefused(str(update)) from None
                reason = update.finish_reason
                if reason is FinishReason.TOO_COMPLEX:
                    raise SchemaTooComplex("the schema is too complex to hold an answer to it: make it smaller")
                if reason in REFUSALS:
                    raise RequestRefused(REFUSALS[reason])
                text, before = "", num_tokens
                for token in update.tokens:
                    num_tokens += 1
                    if token in end_tokens or detokenizer.stopped:
                        break
                    text += detokenizer.push(token)
                if detokenizer.stopped:
                    reason = FinishReason.STOP
                if reason is not None:
                    text += detokenizer.flush()
                logprobs = tuple(map(self._as_text, update.logprobs[: num_tokens - before]))
                missing, queue_s = update.missing, update.queue_s
                yield RequestOutput(text, num_tokens, update.num_stages, reason, missing, logprobs, queue_s)
        finally:
            self.gateway.cancel(updated)

    def _as_text(self, pairs: TokenLogprobs) -> TextLogprob:
        texts = [TextLogprob(self._token_text(token), logprob) for token, logprob in pairs]
        return replace(texts[0], top=tuple(texts[1:]))

    def _token_text(self, token: int) -> str:
        """A token's text within a text: some tokenizers drop a space before the first token that they are given."""
        found = self._token_texts.get(token)
        if found is None:
            before = self.tokenizer("a", add_special_tokens=False)["input_ids"]
            first, both, alone = (
                self.tokenizer.decode(tokens, clean_up_tokenization_spaces=False)
                for tokens in (before, [*before, token], [token])
            )
            found = both.removeprefix(first) if both.startswith(first) else alone
            if len(self._token_texts) < MAX_TOKEN_TEXTS:
                self._token_texts[token] = found
        return found
