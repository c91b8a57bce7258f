"""Documents of texts: in pieces, in bounded memory.

A text file holds documents that end with `<|endoftext|>`; so does the last one, marked or not. The line break after the
mark belongs to the mark. Line ends are read as "\\n" and a byte order mark is dropped. In files with records (see
`readers`), each is a document, or several if its text has the mark.

A long document comes in pieces, since a tokenizer wants all of its input in memory. Where it is cut depends on its
text alone, not on how it was read, and is a place where the usual tokenizers part words anyway: the ids are as good as
always those of the uncut document.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from hashlib import file_digest
from importlib import resources
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from skippipe.data.readers import (
    HUB,
    OnRead,
    Record,
    check_hub_name,
    file_records,
    has_records,
    hub_records,
    opened,
    text_blocks,
)
from skippipe.errors import UserError
from skippipe.json_fields import exists

END = "<|endoftext|>"
BUILT_IN = {"classics": "classics-train.txt.xz", "classics-val": "classics-val.txt.xz"}
FIELD = "text"
"""The field of a record that has its text, unless another is said."""
PIECE_CHARACTERS = 2**16
LOOK_BACK = 2**12  # characters of a piece to look for a good end in


class Piece(NamedTuple):
    """A part of a document."""

    text: str
    last: bool
    """The document ends with it."""


@dataclass(frozen=True)
class TextSource:
    """A file as it was when it was opened, or a dataset of the hub, which has neither size nor digest here."""

    place: str
    """Its path, or its name on the hub."""
    size_bytes: int = 0
    sha256: str = "streamed"

    @property
    def name(self) -> str:
        return self.place if self.on_hub else Path(self.place).name

    @property
    def on_hub(self) -> bool:
        return self.place.startswith(HUB)

    @property
    def has_records(self) -> bool:
        return self.on_hub or has_records(Path(self.place))

    def records(self, on_read: OnRead = lambda count: None, columns: Iterable[str] = ()) -> Iterator[Record]:
        """Its records, of tables only these columns if they have one of them."""
        return hub_records(self.place) if self.on_hub else file_records(Path(self.place), on_read, columns)

    def pieces(self, on_read: OnRead = lambda count: None, field: str = FIELD) -> Iterator[Piece]:
        """Its documents; of records, the text in this field."""
        blocks: Iterator[str]
        if self.has_records:
            blocks = (text_in(record, field) + END for record in self.records(on_read, [field]))
        else:
            blocks = _without_records(self.place, text_blocks(Path(self.place), on_read))
        empty = True
        for piece in cut(blocks):
            empty = False
            yield piece
        if empty:
            raise UserError(f"{self.place}: there is no text in it; name another file")


def check_found(name: str | Path) -> None:
    """UserError unless this names a text that the package carries, a dataset on the hub, or a file or folder that is
    there."""
    if str(name).startswith(HUB):
        check_hub_name(str(name))
    elif name not in BUILT_IN and not exists(Path(name)):
        known = ", ".join(f"'{each}'" for each in BUILT_IN)
        raise UserError(f"{name}: no such text file; name one that is there, a dataset as {HUB}NAME, or one of {known}")


def source(name: str | Path) -> TextSource:
    """A text that the package carries, by its name ("classics"), a dataset on the hub ("hf:NAME"), or a file."""
    check_found(name)
    if str(name).startswith(HUB):
        return TextSource(str(name))
    path = Path(name)
    if name in BUILT_IN:
        path = Path(str(resources.files("skippipe").joinpath("data", BUILT_IN[str(name)])))
    has_records(path)  # or it is of a kind that is not read
    with opened(path) as file:
        digest, size = file_digest(file, "sha256").hexdigest(), file.tell()
    if not size:
        raise UserError(f"{path}: the file is empty; name one with text in it")
    return TextSource(str(path), size, digest)


def sources(names: Iterable[str | Path]) -> list[TextSource]:
    """The sources of these names; of a folder, all of its files in the order of their names, but hidden ones."""
    found: list[TextSource] = []
    for name in names:
        if name in BUILT_IN or str(name).startswith(HUB) or not Path(name).is_dir():
            found.append(source(name))
            continue
        files = sorted(
            Path(folder, file)
            for folder, _, inside in os.walk(name)
            for file in inside
            if not any(part.startswith(".") for part in Path(folder, file).relative_to(name).parts)
        )
        if not files:
            raise UserError(f"{name}: there is no file in this folder; name another")
        found += map(source, files)
    return found


def text_in(record: Record, field: str) -> str:
    """The text in a field; null is no text. Halves of surrogate pairs, which are no characters, are replaced."""
    found = record.fields.get(field)
    if found is None and field in record.fields:
        return ""
    if not isinstance(found, str):
        known = ", ".join(key for key, value in record.fields.items() if isinstance(value, str))
        raise UserError(f"{record.place}: no text in field '{field}'; fields with text: {known or 'none'}")
    return found.encode("utf-8", "replace").decode() if not found.isascii() else found


def _without_records(place: str, blocks: Iterator[str]) -> Iterator[str]:
    """The blocks; UserError if the text is records of JSON, whose braces nobody wants to train on."""
    first = next(blocks, "")
    line = first.lstrip().partition("\n")[0]
    if line.startswith("{"):
        found: Any = None
        with suppress(ValueError, RecursionError):
            found = json.loads(line)
        if isinstance(found, dict):
            raise UserError(f"{place}: holds records of JSON, by its first line; name it .jsonl")
    return chain([first], blocks)


def cut(blocks: Iterable[str]) -> Iterator[Piece]:
    """Documents in pieces, from text in blocks that may end anywhere. Documents of white space alone are left out."""
    rest, inside = "", False  # inside: a piece of this document was yielded already
    for block in blocks:
        *whole, rest = (rest + block).split(END)
        for document in whole:
            yield from _to_the_end(document, inside)
            inside = False
        while len(rest) > PIECE_CHARACTERS + len(END):  # no mark can begin in the part that is cut off
            if not inside:
                rest = rest.removeprefix("\n")
            place = _place_to_cut(rest)
            yield Piece(rest[:place], last=False)
            rest, inside = rest[place:], True
    yield from _to_the_end(rest, inside)


def _to_the_end(document: str, inside: bool) -> Iterator[Piece]:
    if not inside:
        if not document.strip():
            return
        document = document.removeprefix("\n")
    while len(document) > PIECE_CHARACTERS:
        place = _place_to_cut(document)
        yield Piece(document[:place], last=False)
        document = document[place:]
    yield Piece(document, last=True)


def _place_to_cut(text: str) -> int:
    """Before the last space between two letters, where no common tokenizer joins the sides; else at a line or anywhere.

    Not at a line break if it can be helped: some tokenizers join it to the full stop before it.
    """
    nearest = PIECE_CHARACTERS - LOOK_BACK
    place = text.rfind(" ", nearest, PIECE_CHARACTERS)
    while place > 0 and not (text[place - 1].isalpha() and text[place + 1].isalpha()):
        place = text.rfind(" ", nearest, place)
    if place > 0:
        return place
    line = text.rfind("\n", 1, PIECE_CHARACTERS)
    return line if line > 0 else PIECE_CHARACTERS
