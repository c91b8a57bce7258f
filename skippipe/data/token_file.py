"""The token file: a text as ids on disk, made once, memory-mapped by the nodes that train on it.

It is a folder:

    tokens.json              the header, written last
    tokens-<content>.bin     the ids, nothing else: little-endian, 2 bytes each (up to 65,536 tokens) or 4
    tokenizer.json           the tokenizer that made them, with
    tokenizer_config.json    its settings, in the form of Hugging Face
    marks-<content>.bin      of conversations: a byte for every id, see `batch_sampler`

The fields of the header are in docs/formats.md. Two machines have the same data if they have the same fingerprint;
where the text came from does not enter into it. A new file of ids has a new name and the header is replaced in one
step, so that a reader sees the old or the new.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from hashlib import file_digest, sha256
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from skippipe.data.batch_sampler import ANSWER, BEGINS
from skippipe.data.documents import TextSource
from skippipe.data.tokenizer import FILE, TextTokenizer
from skippipe.errors import UserError
from skippipe.json_fields import Fields, json_text, read_as
from skippipe.value_ranges import COUNT, POSITIVE

HEADER, FORMAT, VERSIONS = "tokens.json", "skippipe-tokens", (1, 2)
WIDTHS = {"uint16": "<u2", "uint32": "<u4"}
AGAIN = "prepare the text again"

Ids = npt.NDArray[np.uint16] | npt.NDArray[np.uint32]


def cache_folder(name: str) -> Path:
    """The default place of prepared text."""
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser())
    return root / "skippipe" / "tokens" / name


def width(vocabulary: int) -> str:
    return "uint16" if vocabulary <= 2**16 else "uint32"


@dataclass(frozen=True)
class Inputs:
    """What a token file is made from: the same inputs need no second making."""

    tokenizer: str
    """The requested tokenizer: "bpe 2048" to train one on the text, or the fingerprint of an existing one."""
    sources: tuple[tuple[str, int, str], ...]
    """Name, size in bytes and SHA-256 of every file; the name alone of a dataset on the hub; none for a stream."""
    reading: str = ""
    """What was read of records, as in "field text", and how; empty if all is plain text."""

    @classmethod
    def of(cls, sources: Iterable[TextSource], tokenizer: TextTokenizer | int, reading: str = "") -> Inputs:
        requested = f"bpe {tokenizer}" if isinstance(tokenizer, int) else tokenizer.fingerprint
        return cls(requested, tuple((each.name, each.size_bytes, each.sha256) for each in sources), reading)


@dataclass(frozen=True)
class TokenFile:
    """A prepared text; `ids` maps it into memory."""

    folder: Path
    data: str
    type: str
    tokens: int
    vocabulary: int
    end_id: int
    content_sha256: str
    tokenizer_sha256: str
    inputs: Inputs
    marks_data: str = ""
    """The file of marks, if the text is conversations."""
    marks_sha256: str = ""

    def __len__(self) -> int:
        return self.tokens

    @property
    def fingerprint(self) -> str:
        """Equal on two machines if ids, marks and tokenizer are."""
        marks = f" {self.marks_sha256}" if self.marks_data else ""
        return sha256(f"{self.content_sha256} {self.tokenizer_sha256}{marks}".encode()).hexdigest()

    @cached_property
    def ids(self) -> Ids:
        mapped: Ids = np.memmap(self.folder / self.data, WIDTHS[self.type], mode="r", shape=(self.tokens,))
        return mapped

    @cached_property
    def marks(self) -> npt.NDArray[np.uint8] | None:
        """The marks of conversations; None: it is plain text."""
        if not self.marks_data:
            return None
        mapped: npt.NDArray[np.uint8] = np.memmap(self.folder / self.marks_data, np.uint8, "r", shape=(self.tokens,))
        return mapped

    @property
    def summary(self) -> str:
        """How much it holds, in a few words."""
        if self.marks is None:
            return f"{self.tokens:,} tokens"
        conversations, counted = (int(np.count_nonzero(self.marks & bit)) for bit in (BEGINS, ANSWER))
        return f"{conversations:,} conversations of {self.tokens:,} tokens, {counted:,} of which the loss is taken of"

    def check_plain(self) -> TokenFile:
        """Itself; UserError if it holds conversations, where running text is needed."""
        if self.marks_data:
            raise UserError(f"{self.folder}: holds conversations, which only training takes; name a plain text")
        return self

    def tokenizer(self) -> TextTokenizer:
        return TextTokenizer.load(self.folder)

    def check_content(self) -> None:
        """UserError unless the ids are those that were written; reads all of them."""
        for file, expected in ((self.data, self.content_sha256), (self.marks_data, self.marks_sha256)):
            if file and _sha256(self.folder / file) != expected:
                raise UserError(f"{self.folder / file}: the ids are not those that were written; {AGAIN}")

    @classmethod
    def open(cls, folder: Path, tokenizer: TextTokenizer | None = None) -> TokenFile:
        """Open a token file and check it without reading the ids. With a tokenizer: that the ids are from that one."""
        header = folder / HEADER
        if not header.is_file():
            raise UserError(
                f"{folder}: no token file here ({HEADER} is missing); prepare a text into this folder first"
            )
        found = read_as(lambda raw: cls._parse(folder, raw), header)
        if tokenizer and tokenizer.fingerprint != found.tokenizer_sha256:
            raise UserError(
                f"{folder}: made with another tokenizer ({found.tokenizer_sha256[:12]}, "
                f"not {tokenizer.fingerprint[:12]}); {AGAIN} with this one"
            )
        found._check_files()
        return found

    @classmethod
    def _parse(cls, folder: Path, raw: Any) -> TokenFile:
        fields = Fields(raw, "")
        version = fields.header(FORMAT, *VERSIONS)
        conversations = version > 1 and fields.has("marks")
        sources = []
        for each in fields.objects("sources"):
            sources.append((each.text("name"), each.integer("bytes", COUNT), each.text("sha256")))
            each.close()
        found = cls(
            folder=folder,
            data=fields.text("data"),
            type=fields.text("type", tuple(WIDTHS)),
            tokens=fields.integer("tokens", POSITIVE),
            vocabulary=fields.integer("vocabulary", POSITIVE),
            end_id=fields.integer("end_id"),
            content_sha256=fields.text("content_sha256"),
            tokenizer_sha256=fields.text("tokenizer_sha256"),
            inputs=Inputs(fields.text("tokenizer"), tuple(sources), fields.text("reading") if version > 1 else ""),
            marks_data=fields.text("marks") if conversations else "",
            marks_sha256=fields.text("marks_sha256") if conversations else "",
        )
        stated = fields.text("fingerprint")
        fields.close()
        if stated != found.fingerprint:
            raise UserError(f"fingerprint: not the one of content_sha256 and tokenizer_sha256; {AGAIN}")
        if found.type != width(found.vocabulary) or found.end_id >= found.vocabulary:
            raise UserError(f"vocabulary: {found.vocabulary} does not go with {found.type} and end_id {found.end_id}")
        for name, file in (("data", found.data), ("marks", found.marks_data)):
            if Path(file).name != file:
                raise UserError(f"{name}: '{file}' is not the name of a file in this folder")
        return found

    def _check_files(self) -> None:
        for name, each_bytes in ((self.data, np.dtype(WIDTHS[self.type]).itemsize), (self.marks_data, 1)):
            data, expected = self.folder / name, self.tokens * each_bytes
            if not name:
                continue
            if not data.is_file():
                raise UserError(f"{data}: missing; {AGAIN}, or copy the whole folder")
            if data.stat().st_size != expected:
                raise UserError(f"{data}: {data.stat().st_size:,} bytes instead of {expected:,}; copy it or {AGAIN}")
        if not (self.folder / FILE).is_file():
            raise UserError(f"{self.folder / FILE}: missing; {AGAIN}, or copy the whole folder")
        if _sha256(self.folder / FILE) != self.tokenizer_sha256:
            raise UserError(f"{self.folder / FILE}: another tokenizer than the one that made the ids; {AGAIN}")

    def header_text(self) -> str:
        more = {"reading": self.inputs.reading} if self.inputs.reading else {}
        if self.marks_data:
            more |= {"marks": self.marks_data, "marks_sha256": self.marks_sha256}
        return json_text(
            {
                "format": FORMAT,
                "version": VERSIONS[bool(more)],
                "data": self.data,
                "type": self.type,
                "tokens": self.tokens,
                "vocabulary": self.vocabulary,
                "end_id": self.end_id,
                "content_sha256": self.content_sha256,
                "tokenizer_sha256": self.tokenizer_sha256,
                "fingerprint": self.fingerprint,
                "tokenizer": self.inputs.tokenizer,
                "sources": [{"name": name, "bytes": size, "sha256": sha} for name, size, sha in self.inputs.sources],
                **more,
            }
        )


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return file_digest(file, "sha256").hexdigest()
