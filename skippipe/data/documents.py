"""Text files and streams of documents, read in bounded memory.

A text file is UTF-8, plain or `.xz`, and holds documents that end with `<|endoftext|>`; so does the last one, marked or
not. The line break after the mark belongs to the mark. Line ends are read as "\\n" and a byte order mark is dropped.

A long document comes in pieces, since a tokenizer wants all of its input in memory. Where it is cut depends on its
text alone, not on how it was read, and is a place where the usual tokenizers part words anyway: the ids are as good as
always those of the uncut document.
"""

from __future__ import annotations

import codecs
import io
import lzma
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from hashlib import file_digest
from importlib import resources
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from skippipe.errors import UserError, require
from skippipe.json_fields import exists

EXTRA = "datasets"
READERS = {".json": "json", ".jsonl": "json", ".parquet": "parquet", ".csv": "csv"}
END = "<|endoftext|>"
BUILT_IN = {"classics": "classics-train.txt.xz", "classics-val": "classics-val.txt.xz"}
PIECE_CHARACTERS = 2**16
LOOK_BACK = 2**12  # characters of a piece to look for a good end in
BLOCK_BYTES = 2**20
MOST_UNPACKED = 1_000  # times the size on disk: text becomes some five times smaller
MOST_UNPACKER_BYTES = 2**30  # xz -9 asks for 65 MiB


class Piece(NamedTuple):
    """A part of a document."""

    text: str
    last: bool
    """The document ends with it."""


@dataclass(frozen=True)
class TextSource:
    """A text file as it was when it was opened."""

    path: Path
    size_bytes: int
    sha256: str

    def pieces(self, on_read: Callable[[int], None] = lambda count: None) -> Iterator[Piece]:
        """The documents of the file; `on_read` is called with the bytes on disk of every block."""
        empty = True
        for piece in cut(_blocks(self.path, on_read)):
            empty = False
            yield piece
        if empty:
            raise UserError(f"{self.path}: there is no text in it; name another file")


def source(name: str | Path) -> TextSource:
    """A file that the package carries, by its name ("classics"), or any other, by its path."""
    path = Path(name)
    if name in BUILT_IN:
        path = Path(str(resources.files("skippipe").joinpath("data", BUILT_IN[str(name)])))
    with _opened(path) as file:
        digest, size = file_digest(file, "sha256").hexdigest(), file.tell()
    if not size:
        raise UserError(f"{path}: the file is empty; name one with text in it")
    return TextSource(path, size, digest)


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


def _opened(path: Path) -> io.BufferedReader:
    try:
        return path.open("rb")
    except FileNotFoundError:
        known = ", ".join(f"'{name}'" for name in BUILT_IN)
        raise UserError(f"{path}: no such text file; name one that is there, or one of {known}") from None
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from None


def _unpacked(file: BinaryIO) -> Iterator[bytes]:
    """What an .xz file holds, block by block, in bounded memory whatever its headers ask for."""
    left = b""
    while True:
        decoder = lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=MOST_UNPACKER_BYTES)
        while not decoder.eof:
            if decoder.needs_input and not left and not (left := file.read(BLOCK_BYTES)):
                raise EOFError("it ends in the middle")
            block, left = decoder.decompress(left, BLOCK_BYTES), b""
            if block:
                yield block
        left = decoder.unused_data.lstrip(b"\0") or file.read(BLOCK_BYTES).lstrip(b"\0")  # streams may be padded
        if not left:
            return


def _blocks(path: Path, on_read: Callable[[int], None]) -> Iterator[str]:
    utf8 = codecs.getincrementaldecoder("utf-8-sig")()
    decoder = io.IncrementalNewlineDecoder(utf8, translate=True)
    read_bytes = 0  # of the text, where the file is compressed
    try:
        with _opened(path) as file:
            on_disk, most = 0, MOST_UNPACKED * max(BLOCK_BYTES, path.stat().st_size)
            for block in _unpacked(file) if path.suffix == ".xz" else iter(lambda: file.read(BLOCK_BYTES), b""):
                read_bytes += len(block)
                if read_bytes > most:
                    raise UserError(
                        f"{path}: is more than {MOST_UNPACKED:,} times as large without compression, which no text is; "
                        "if it is meant so, unpack it first"
                    )
                yield decoder.decode(block)
                on_read(file.tell() - on_disk)
                on_disk = file.tell()
            yield decoder.decode(b"", final=True)
    except UnicodeDecodeError as error:
        at = read_bytes - len(error.object) + error.start
        raise UserError(f"{path}: not UTF-8 text at byte {at:,}; convert it, for example with iconv -t UTF-8") from None
    except (lzma.LZMAError, EOFError) as error:
        raise UserError(f"{path}: not a whole .xz file: {error}; compress or copy it again") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror or error}") from None


def stream_text(
    name_or_path: str | Path,
    split: str = "train",
    field: str = "text",
    subset: str | None = None,
    documents: int | None = None,
) -> Iterator[str]:
    """The texts in one field of a dataset: its name on the hub, a folder with one, or a file (see `READERS`).

    The documents come one after another, without having all of them on disk:

        prepare(stream_text("HuggingFaceFW/fineweb-edu", documents=100_000), 32_000, folder)

    The order is the dataset's. Reading starts when the first document is taken.
    """
    datasets = require("datasets", EXTRA, f"streaming '{name_or_path}'")
    path = Path(name_or_path)
    if path.suffix in READERS and not exists(path):
        raise UserError(f"{path}: no such file to stream from")
    if exists(path) and path.is_file():
        if path.suffix not in READERS:
            raise UserError(f"{path}: streams come from {', '.join(READERS)}; give a text file to 'prepare' as it is")
        source: dict[str, Any] = {"path": READERS[path.suffix], "data_files": {split: str(path)}}
    else:
        source = {"path": str(name_or_path), "name": subset}
    return islice(_texts(datasets, str(name_or_path), field, {**source, "split": split, "streaming": True}), documents)


def _texts(datasets: Any, name: str, field: str, options: dict[str, Any]) -> Iterator[str]:
    try:  # a dataset that is a script is refused with a RuntimeError: from version 4 on the library runs none
        for row in datasets.load_dataset(**options):
            if not isinstance(row.get(field), str):
                known = ", ".join(key for key, value in row.items() if isinstance(value, str))
                raise UserError(f"{name}: no text in field '{field}'; fields with text: {known or 'none'}")
            yield row[field]
    except (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError) as error:
        reason = " ".join(str(error).split())
        raise UserError(f"{name}: the dataset cannot be read: {reason}") from None
