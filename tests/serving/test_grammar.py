"""Answers in JSON: whatever a model chooses among the tokens that are allowed, the answer fits the schema."""

from __future__ import annotations

import json
import random
import sys
from typing import Any

import jsonschema
import pytest

from skippipe.errors import UserError
from skippipe.inference.request import FinishReason
from skippipe.serving.grammar import ANY_OBJECT, GrammarCompiler
from tests.helpers.model_folders import TOKENIZER
from tests.helpers.staged_models import TEXT

END = 0
COMPILER = GrammarCompiler(TEXT, TOKENIZER.size + 3, frozenset({END}))  # as models have more rows than tokens
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 5},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "moods": {"type": "array", "items": {"enum": ["glad", "sad", None]}, "maxItems": 3},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("schema", [PERSON, {"type": "array", "items": {"type": "boolean"}}, {"const": "é 😀"}])
def test_every_answer_fits(schema: dict[str, Any]) -> None:
    constraint = COMPILER.json_schema(schema)
    texts = set()
    for seed in range(8):
        rate, matcher, tokens = random.Random(seed), constraint(), list[int]()
        reason: FinishReason | None = None
        while reason is None:
            mask = matcher.allowed()
            choices = [token for token in range(8 * len(mask)) if mask[token // 8] >> token % 8 & 1]
            assert choices and max(choices) < TOKENIZER.size, "rows of no token never come"
            assert not matcher.accepts(next(token for token in range(TOKENIZER.size) if token not in choices))
            tokens.append(rate.choice(choices))
            assert matcher.accepts(tokens[-1])
            reason = matcher.append(tokens[-1])
        assert reason is FinishReason.STOP
        texts.add(TEXT.decode([token for token in tokens if token != END]))
    for text in texts:
        jsonschema.validate(json.loads(text), schema)
    assert len(texts) > 1 or "const" in schema


def test_blanks_come_to_an_end() -> None:
    matcher, blank = COMPILER.json_schema(ANY_OBJECT)(), TOKENIZER.encode(" ")[0]
    matcher.append(TOKENIZER.encode("{")[0])
    count = 0
    while matcher.accepts(blank):
        assert matcher.append(blank) is None
        count += 1
    assert count == 32


@pytest.mark.parametrize(
    ("schema", "why"),
    [
        ({"type": "nonsense"}, "Invalid type: nonsense"),
        ({"$ref": "http://127.0.0.1/schema"}, "not present in a registry"),
        ({"properties": {f"p{number}": {"type": "string"} for number in range(20_000)}}, "too large"),
        ({"$ref": "#"}, "no answer can begin"),
        (json.loads('{"not": ' * 400 + "{}" + "}" * 400), "recursion limit"),
    ],
)
def test_schemas_that_cannot_be_used(schema: dict[str, Any], why: str) -> None:
    with pytest.raises(UserError, match=f"the schema cannot be used: .*{why}"):
        COMPILER.json_schema(schema)


def test_a_schema_that_becomes_too_complex_ends_the_answer() -> None:
    schema = {"type": "object", "properties": {f"p{number}": {"type": "string"} for number in range(800)}}
    matcher = COMPILER.json_schema(schema)()
    assert matcher.append(TOKENIZER.encode("{")[0]) is FinishReason.TOO_COMPLEX


def test_what_is_missing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="a token that ends a text"):
        GrammarCompiler(TEXT, TOKENIZER.size, frozenset()).json_schema(ANY_OBJECT)
    with pytest.raises(UserError, match="does not allow answers in JSON: Only fast tokenizers"):
        GrammarCompiler(object(), TOKENIZER.size, frozenset({END})).json_schema(ANY_OBJECT)
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(UserError, match=r"pip install 'skippipe\[json\]'"):
        COMPILER.json_schema(ANY_OBJECT)
