"""Answers in JSON: which tokens may follow, by a JSON schema, so that an answer that is complete fits it.

The gateway follows every answer and sends nodes the tokens that they may choose from; nodes need neither the tokenizer
nor the library, llguidance, which has no dependencies of its own and is what vLLM, SGLang and llama.cpp use.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from skippipe.errors import UserError, require
from skippipe.inference.request import FinishReason
from skippipe.serving.sequence import TokenConstraint

ANY_OBJECT = {"type": "object"}
OPTIONS: Any = {"whitespace_pattern": r"[ \n\r\t]{0,32}"}  # bounded: weak models write blanks for ever where they may


class GrammarMatcher:
    """The `TokenConstraint` of one answer."""

    def __init__(self, matcher: Any) -> None:
        self._matcher = matcher

    def allowed(self) -> bytes:
        found: bytes = self._matcher.compute_bitmask()
        return found

    def accepts(self, token: int) -> bool:
        return bool(self._matcher.validate_tokens([token]))

    def append(self, token: int) -> FinishReason | None:
        self._matcher.consume_token(token)
        if self._matcher.is_error():
            return FinishReason.TOO_COMPLEX
        return FinishReason.STOP if self._matcher.is_stopped() else None


@dataclass
class GrammarCompiler:
    """Makes constraints for a tokenizer; to be used by one thread at a time."""

    tokenizer: Any
    """A tokenizer of transformers."""
    vocabulary: int
    end_tokens: frozenset[int]
    _prepared: Any = field(default=None, init=False)
    """The tokenizer as llguidance wants it, made when it is first needed."""

    def json_schema(self, schema: dict[str, Any]) -> Callable[[], TokenConstraint]:
        """Makes a constraint for each answer. UserError says what is wrong with the schema, or missing here."""
        require("llguidance", "json", "answers in JSON")
        from llguidance import LLMatcher

        if self._prepared is None:
            self._prepared = self._prepare()
        try:
            grammar = LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=OPTIONS)
        except (ValueError, RecursionError) as error:
            raise UserError(f"the schema cannot be used: {error}") from None
        matcher = LLMatcher(self._prepared, grammar, log_level=0)
        if matcher.is_error():
            raise UserError(f"the schema cannot be used: {matcher.get_error().splitlines()[0]}")
        first = matcher.deep_copy()
        first.compute_bitmask()
        if first.is_error():
            raise UserError("the schema cannot be used: no answer can begin as it wants")
        return lambda: GrammarMatcher(matcher.deep_copy())

    def _prepare(self) -> Any:
        from llguidance.hf import from_tokenizer

        if not self.end_tokens:
            raise UserError("answers in JSON need a model with a token that ends a text")
        try:
            return from_tokenizer(self.tokenizer, n_vocab=self.vocabulary, eos_token=sorted(self.end_tokens))
        except Exception as error:  # what it makes of a tokenizer that it does not know is its own affair
            raise UserError(f"the model's tokenizer does not allow answers in JSON: {error}") from None
