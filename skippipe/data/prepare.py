"""Files and datasets of the hub into a token file.

Records of chats and instructions become the tokens that the tokenizer's chat template makes of them. A record is a
conversation if it has `messages` (a list of {role, content}), `prompt` and `completion` (texts, or lists of messages),
or `instruction` and `output` (and perhaps `input`, which follows the instruction).
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from skippipe.data.batch_sampler import ANSWER, BEGINS
from skippipe.data.documents import FIELD, Piece, TextSource, sources
from skippipe.data.readers import Record
from skippipe.data.token_file import HEADER, WIDTHS, Inputs, TokenFile, cache_folder, width
from skippipe.data.tokenizer import EXTRA, FILE, SETTINGS, TEMPLATE_FIELD, TextTokenizer, train_bpe
from skippipe.errors import UserError, require
from skippipe.json_fields import exists

FIELDS = ("messages", "prompt", "completion", "instruction", "input", "output")
ASSISTANT = "assistant"
GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
EXPECTED = "expected 'messages' (a list of role and content), 'prompt' and 'completion', or 'instruction' and 'output'"

Messages = list[dict[str, Any]]
BATCH_CHARACTERS = 2**20  # encoded at a time, and so what is in memory: some hundred bytes for each
ANSWERS, ALL = "answers", "all"
TRAINED_ON_CHARACTERS = 2**26  # more text hardly changes a tokenizer, but takes minutes
PrepareProgress = Callable[[str, float], None]
"""What is being done, and which share of it is behind us (0 throughout for a dataset of the hub)."""


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
    """Turns conversations into tokens, as transformers does with this tokenizer, and marks answers.

    Which tokens are answers: where the template marks them itself (`{% generation %}`), those. Else the template is
    applied to the messages before an assistant's, with the prompt for an answer, and to the messages up to it: what the
    second text adds to the first is the answer, the end of the turn included. A token belongs to the text that its
    first character is in. Some templates write a turn differently once others follow; then every answer becomes a
    conversation of its own, with all that was before it, which is what the model sees when it is used.
    """

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


def prepare(
    texts: str | Path | Sequence[str | Path],
    tokenizer: TextTokenizer | str | Path | int = 2048,
    folder: Path | None = None,
    progress: PrepareProgress = lambda what, share: None,
    *,
    field: str = "",
    loss_on: str | None = None,
    overwrite: bool = False,
) -> TokenFile:
    """The token file of these texts, made unless the folder has it already. UserError if it has the tokens of others,
    and these are not to be overwritten.

    `texts` are files, folders of them, datasets of the hub (see `readers`), "classics" or "classics-val". Of records
    the text is in `field`, which is "text" unless said. If it is not said, records may be conversations (see above),
    with loss on "answers" (or "") or on "all"; None: they are refused. `tokenizer` is one that is there or its folder,
    or the size of a vocabulary to train on the texts. Without a folder it is kept in the cache, under a name made from
    the inputs.
    """
    if loss_on not in (None, "", ANSWERS, ALL):
        raise UserError(f"loss on '{loss_on}': expected '{ANSWERS}' or '{ALL}'")
    if isinstance(tokenizer, (str, Path)):
        tokenizer = TextTokenizer.load(Path(tokenizer))
    names = [texts] if isinstance(texts, (str, Path)) else texts
    for name in names:
        if exists(Path(name) / HEADER):
            raise UserError(f"{name}: holds tokens, not text; name the texts, and in a job this folder as data.folder")
    files = _Files(sources(names), field or FIELD)
    has_records = any(each.has_records for each in files.sources)
    readings = [f"field {field or FIELD}" if has_records else ""]
    if has_records and not field and loss_on is not None and isinstance(tokenizer, TextTokenizer):
        template = sha256(str(tokenizer.settings.get(TEMPLATE_FIELD)).encode()).hexdigest()[:16]
        readings.append(f"conversations, loss on {loss_on or ANSWERS}, template {template}")
    possible = [Inputs.of(files.sources, tokenizer, reading) for reading in readings]
    if folder is None:
        stem = re.sub(r"[^\w.-]+", "-", files.sources[0].name.removesuffix(".xz").removesuffix(".txt"))
        folder = cache_folder(f"{stem}-{sha256(repr(possible).encode()).hexdigest()[:12]}")
    for inputs in possible[bool(loss_on) :]:  # if it is said, text will not do
        found = _reusable(folder, inputs)
        if found is not None:
            return found
    encoder = _chat_encoder(files, tokenizer, loss_on) if not field and files.hold_conversations() else None
    if loss_on and encoder is None:
        raise UserError(f"loss on {loss_on}: is for conversations, and the texts hold none; leave it out")
    inputs = possible[encoder is not None]
    if not overwrite:
        _check_other_tokens(folder, inputs)
    return _make(files, tokenizer, folder, inputs, progress, encoder)


class _Files:
    def __init__(self, sources: list[TextSource], field: str) -> None:
        if not sources:
            raise UserError("no text to prepare: name a text file, or 'classics'")
        self.sources = sources
        self._field = field

    def hold_conversations(self) -> bool:
        """Whether records are conversations, by the first one of each file; all are, or none."""
        found = {each.place: each.has_records and _begins_with_conversation(each) for each in self.sources}
        if len(set(found.values())) > 1:
            one, other = (
                next(place for place, is_one in found.items() if is_one is wanted) for wanted in (True, False)
            )
            raise UserError(f"{one}: holds conversations, and {other} none; prepare and train on them apart")
        return any(found.values())

    def records(self, on_share: Callable[[float], None]) -> Iterator[Record]:
        """All of them, if they are conversations."""
        on_read = self._counted(on_share)
        for each in self.sources:
            yield from each.records(on_read, FIELDS)

    def sample(self) -> Iterator[str]:
        """An equal share from the start of every file."""
        for each in self.sources:
            yield from _first(each.pieces(field=self._field), TRAINED_ON_CHARACTERS // len(self.sources))

    def pieces(self, on_share: Callable[[float], None]) -> Iterator[Piece]:
        on_read = self._counted(on_share)
        for each in self.sources:
            yield from each.pieces(on_read, self._field)

    def _counted(self, on_share: Callable[[float], None]) -> Callable[[int], None]:
        done, total = 0, sum(each.size_bytes for each in self.sources)

        def on_read(count: int) -> None:
            nonlocal done
            done += count
            on_share(min(1.0, done / total) if total else 0.0)

        return on_read


def _begins_with_conversation(source: TextSource) -> bool:
    first = next(source.records(columns=FIELDS), None)
    return first is not None and is_conversation(first)


def _chat_encoder(files: _Files, tokenizer: TextTokenizer | int, loss_on: str | None) -> ChatEncoder:
    place = files.sources[0].place
    if loss_on is None:
        raise UserError(f"{place}: holds conversations, which only training takes; name a plain text")
    if isinstance(tokenizer, int):
        raise UserError(
            f"{place}: holds conversations, which need a tokenizer with a chat template: name that of a model that "
            "was made to chat (--tokenizer; data.tokenizer, or model.weights)"
        )
    return ChatEncoder(tokenizer, answers_only=loss_on != ALL)


def _first(pieces: Iterable[Piece], characters: int) -> Iterator[str]:
    for piece in pieces:
        yield piece.text
        characters -= len(piece.text)
        if characters <= 0:
            return


def _reusable(folder: Path, inputs: Inputs) -> TokenFile | None:
    try:
        found = TokenFile.open(folder)
        if found.inputs != inputs:
            return None
        found.check_content()
    except (UserError, OSError):  # whatever is wrong with it, it is about to be made anew
        return None
    return found


def _check_other_tokens(folder: Path, inputs: Inputs) -> None:
    """UserError if the folder has the tokens of other texts, or made by another tokenizer."""
    try:
        there = TokenFile.open(folder).inputs != inputs
    except (UserError, OSError):  # no tokens
        return
    if there:
        raise UserError(
            f"{folder}: holds the tokens of other texts, or of another tokenizer; 'skippipe prepare --overwrite' "
            "replaces them; or name another folder"
        )


def _make(
    texts: _Files,
    tokenizer: TextTokenizer | int,
    folder: Path,
    inputs: Inputs,
    progress: PrepareProgress,
    encoder: ChatEncoder | None,
) -> TokenFile:
    if isinstance(tokenizer, int):
        progress(f"training a tokenizer of {tokenizer:,} tokens", 0.0)
        tokenizer = train_bpe(texts.sample(), tokenizer)
    made = TokenFile(
        folder, "", width(tokenizer.size), 0, tokenizer.size, tokenizer.end_id, "", tokenizer.fingerprint, inputs
    )

    def on_share(share: float) -> None:
        progress("turning text into tokens", share)

    parts: Iterator[MarkedTokens]
    if encoder is not None:
        parts = (part for record in texts.records(on_share) for part in encoder.encode(record))
    else:
        parts = _encoded(texts.pieces(on_share), tokenizer)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".partial-", dir=folder) as name:  # of its own: others may do the same
            partial = Path(name)
            made = _written(parts, made, partial, marked=encoder is not None)
            # what ends a document is what a model ends a text with; that of a chat is the template's affair
            tokenizer.save(partial, **({} if encoder else {"eos_token": tokenizer.end}))
            (partial / HEADER).write_text(made.header_text() + "\n", encoding="utf-8")
            files = [file for file in (made.data, made.marks_data, FILE, SETTINGS) if file]
            for file in (*files, HEADER):  # the header last: it vouches for the others
                (partial / file).replace(folder / file)
        for old in (*folder.glob("tokens-*.bin"), *folder.glob("marks-*.bin")):
            if old.name not in files:
                old.unlink(missing_ok=True)
    except OSError as error:
        raise UserError(f"{folder}: the tokens cannot be written: {error.strerror or error}") from None
    return TokenFile.open(folder, tokenizer)


def _encoded(pieces: Iterator[Piece], tokenizer: TextTokenizer) -> Iterator[MarkedTokens]:
    for batch in _batches(pieces):
        for piece, ids in zip(batch, tokenizer.encode_pieces([piece.text for piece in batch]), strict=True):
            yield MarkedTokens([*ids, tokenizer.end_id] if piece.last else ids, b"")


def _written(parts: Iterator[MarkedTokens], made: TokenFile, folder: Path, *, marked: bool) -> TokenFile:
    digest, marks_digest, tokens = sha256(), sha256(), 0
    with (folder / "ids").open("wb") as file, (folder / "marks").open("wb") as marks_file:
        for ids, marks in parts:
            content = np.array(ids, WIDTHS[made.type]).tobytes()
            digest.update(content)
            file.write(content)
            marks_digest.update(marks)
            marks_file.write(marks)
            tokens += len(ids)
    if not tokens:
        raise UserError("the texts hold no tokens: no document, or only empty ones")
    name = f"tokens-{digest.hexdigest()[:16]}.bin"
    (folder / "ids").rename(folder / name)
    made = replace(made, data=name, tokens=tokens, content_sha256=digest.hexdigest())
    if not marked:
        return made
    marks_name = f"marks-{marks_digest.hexdigest()[:16]}.bin"
    (folder / "marks").rename(folder / marks_name)
    return replace(made, marks_data=marks_name, marks_sha256=marks_digest.hexdigest())


def _batches(pieces: Iterator[Piece]) -> Iterator[list[Piece]]:
    batch: list[Piece] = []
    characters = 0
    for piece in pieces:
        batch.append(piece)
        characters += len(piece.text)
        if characters >= BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch
