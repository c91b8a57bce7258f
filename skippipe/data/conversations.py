"""Conversations: records of chats and instructions as the tokens that a tokenizer's chat template makes of them.

A record is a conversation if it has `messages` (a list of {role, content}), `prompt` and `completion` (texts, or lists
of messages), or `instruction` and `output` (and perhaps `input`, which follows the instruction).

Which tokens are answers: where the template marks them itself (`{% generation %}`), those. Else the template is applied
to the messages before an assistant's, with the prompt for an answer, and to the messages up to it: what the second text
adds to the first is the answer, the end of the turn included. A token belongs to the text that its first character is
in. Some templates write a turn differently once others follow; then every answer becomes a conversation of its own,
with all that was before it, which is what the model sees when it is used.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from skippipe.data.batch_sampler import ANSWER, BEGINS
from skippipe.data.readers import Record
from skippipe.data.tokenizer import EXTRA, TEMPLATE_FIELD, TextTokenizer
from skippipe.errors import UserError, require

FIELDS = ("messages", "prompt", "completion", "instruction", "input", "output")
ASSISTANT = "assistant"
GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
EXPECTED = "expected 'messages' (a list of role and content), 'prompt' and 'completion', or 'instruction' and 'output'"

Messages = list[dict[str, Any]]


class MarkedTokens(NamedTuple):
    """A conversation as tokens, with a mark for each (see `batch_sampler`)."""

    ids: list[int]
    marks: bytes


def is_conversation(record: Record) -> bool:
    found = record.fields.keys()
    return "messages" in found or {"prompt", "completion"} <= found or {"instruction", "output"} <= found


def messages_of(record: Record) -> Messages:
    """The messages of a record; UserError if there are none."""
    fields, place = record.fields, record.place
    if fields.get("messages") is not None:
        return _checked(fields["messages"], place)
    if fields.get("prompt") is not None and fields.get("completion") is not None:
        return _turns(fields["prompt"], "user", place) + _turns(fields["completion"], ASSISTANT, place)
    if fields.get("instruction") is not None and fields.get("output") is not None:
        asked = "\n\n".join(str(each) for each in (fields["instruction"], fields.get("input")) if each)
        return _turns(asked, "user", place) + _turns(fields["output"], ASSISTANT, place)
    raise UserError(f"{place}: no conversation; {EXPECTED}")


def _turns(found: Any, role: str, place: str) -> Messages:
    return _checked([{"role": role, "content": found}] if isinstance(found, str) else found, place)


def _checked(found: Any, place: str) -> Messages:
    messages = [
        {name: value for name, value in each.items() if value is not None}  # rows of Parquet have every field
        for each in (found if isinstance(found, list) else ())
        if isinstance(each, dict)
    ]
    whole = isinstance(found, list) and found and len(messages) == len(found)
    if not whole or not all(isinstance(each.get(name), str) for each in messages for name in ("role", "content")):
        raise UserError(f"{place}: messages are a list of objects, each with a text as role and one as content")
    return messages


class ChatEncoder:
    """Turns conversations into tokens, as transformers does with this tokenizer."""

    def __init__(self, tokenizer: TextTokenizer, *, answers_only: bool) -> None:
        template = tokenizer.settings.get(TEMPLATE_FIELD)
        if not template:
            raise UserError(
                f"{tokenizer.place} has no chat template, which conversations need: use the tokenizer of a model that "
                "was made to chat, or add 'chat_template' to tokenizer_config.json"
            )
        transformers = require("transformers", EXTRA, "applying a chat template")
        tokenizers = require("tokenizers", EXTRA, "turning text into tokens")
        backend = tokenizers.Tokenizer.from_str(tokenizer.text)
        backend.no_truncation()
        backend.no_padding()
        self._tokenizer: Any = transformers.PreTrainedTokenizerFast(tokenizer_object=backend, **tokenizer.settings)
        self._answers_only = answers_only
        self._place = tokenizer.place
        self._has_marks = GENERATION.search(str(template)) is not None

    def encode(self, record: Record) -> Iterator[MarkedTokens]:
        """The conversation of a record; several, if its template leaves no other way to tell answers."""
        messages = messages_of(record)
        try:
            if not self._answers_only:
                yield self._marked(self._text(messages), None)
            elif self._has_marks:
                yield self._marked_by_template(messages)
            else:
                yield from self._marked_by_prefixes(messages)
        except UserError:
            raise
        except Exception as error:  # a template is a program of its own
            reason = " ".join(str(error).split())
            raise UserError(f"{record.place}: the chat template does not take these messages: {reason}") from None

    def _text(self, messages: Messages, *, asks: bool = False) -> str:
        found: str = self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=asks)
        return found

    def _marked_by_template(self, messages: Messages) -> MarkedTokens:
        found = self._tokenizer.apply_chat_template(
            messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
        )
        return _with_marks(found["input_ids"], found["assistant_masks"])

    def _marked_by_prefixes(self, messages: Messages) -> Iterator[MarkedTokens]:
        text = self._text(messages)
        spans: list[tuple[str, int]] = []
        together = True
        for number, message in enumerate(messages):
            if message["role"] != ASSISTANT:
                continue
            asked = self._text(messages[:number], asks=True) if number else ""
            answered = self._text(messages[: number + 1])
            if not answered.startswith(asked):
                raise UserError(
                    f"{self._place}: its chat template does not begin an answer as it asks for one, so answers cannot "
                    "be told: mark them in it with {% generation %}, or say data.loss_on = 'all'"
                )
            together &= text.startswith(answered)
            spans.append((answered, len(asked)))
        if together:
            yield self._marked(text, [(start, len(answered)) for answered, start in spans])
        else:
            yield from (self._marked(answered, [(start, len(answered))]) for answered, start in spans)

    def _marked(self, text: str, spans: Sequence[tuple[int, int]] | None) -> MarkedTokens:
        found = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        begins = [start for start, _ in found["offset_mapping"]]
        counted = [spans is None or any(first <= at < end for first, end in spans) for at in begins]
        return _with_marks(found["input_ids"], counted)


def _with_marks(ids: Sequence[int], counted: Sequence[int | bool]) -> MarkedTokens:
    marks = np.where(np.array(counted, np.bool_), ANSWER, 0).astype(np.uint8)
    marks[:1] |= BEGINS
    return MarkedTokens(list(ids), marks.tobytes())
