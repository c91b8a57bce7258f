"""Files and datasets, read in bounded memory: as text in blocks, or as records, which are JSON objects or rows.

A file is what its name says: JSON lines (`.jsonl`, `.ndjson`; `.json`, also as one list), `.parquet`, or else text in
UTF-8. All but Parquet may be compressed (`.gz`, `.bz2`, `.xz`, `.zst`). A dataset of the hub is named
`hf:NAME[:CONFIG][:SPLIT]` and is streamed; `[:N]` after it takes the first N rows. What is none of these is refused.
"""

from __future__ import annotations

import bz2
import codecs
import gzip
import io
import json
import lzma
import re
import zlib
from collections.abc import Callable, Iterable, Iterator
from importlib import import_module
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from skippipe.errors import UserError, require

OnRead = Callable[[int], None]
"""Called with the bytes on disk of every block."""

JSON_FILES = (".jsonl", ".ndjson", ".json")
PARQUET = ".parquet"
COMPRESSED = (".gz", ".bz2", ".xz", ".zst")
TABLES = (".csv", ".tsv")
HUB = "hf:"
HUB_NAME = re.compile(r"hf:([^:\[\]]+)(?::([^:\[\]]*))?(?::([^:\[\]]+))?(?:\[:(\d+)\])?")
FIRST_BYTES = {
    b"\x1f\x8b": "a .gz file",
    b"BZh": "a .bz2 file",
    b"\xfd7zXZ": "an .xz file",
    b"\x28\xb5\x2f\xfd": "a .zst file",
    b"PAR1": "a .parquet file",
    b"PK\x03\x04": "a zip archive",
    b"%PDF": "a PDF",
}
BLOCK_BYTES = 2**20
BATCH_ROWS = 256
MOST_UNPACKED = 1_000  # times the size on disk: text becomes some five times smaller
MOST_UNPACKER_BYTES = 2**30  # xz -9 asks for 65 MiB
MOST_LINE_CHARACTERS = 2**28  # of a record of JSON, or a whole list of them, which must be in memory at once


class Record(NamedTuple):
    """A JSON object, or a row of a table."""

    place: str
    fields: dict[str, Any]


def kind_of(path: Path) -> str:
    """How a file ends, compression aside."""
    suffixes = [each.lower() for each in path.suffixes]
    if suffixes and suffixes[-1] in COMPRESSED:
        suffixes.pop()
    return suffixes[-1] if suffixes else ""


def has_records(path: Path) -> bool:
    """Whether a file holds records, by its name; UserError if it is known to hold what is not read here."""
    kind = kind_of(path)
    if kind in TABLES:
        raise UserError(f"{path}: tables in {', '.join(TABLES)} are not read; write it as JSON lines or Parquet")
    if kind == PARQUET and path.suffix.lower() != PARQUET:
        raise UserError(f"{path}: Parquet is compressed inside; unpack it first")
    return kind == PARQUET or kind in JSON_FILES


def opened(path: Path) -> io.BufferedReader:
    try:
        return path.open("rb")
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from None


def text_blocks(path: Path, on_read: OnRead) -> Iterator[str]:
    """The text of a file, in blocks that may end anywhere."""
    utf8 = codecs.getincrementaldecoder("utf-8-sig")()
    decoder = io.IncrementalNewlineDecoder(utf8, translate=True)
    read_bytes, begins = 0, b""  # of the text, where the file is compressed
    try:
        with opened(path) as file:
            on_disk, most = 0, MOST_UNPACKED * max(BLOCK_BYTES, path.stat().st_size)
            for block in _unpacked(path, file):
                read_bytes, begins = read_bytes + len(block), begins or block[:8]
                if read_bytes > most:
                    raise UserError(
                        f"{path}: is more than {MOST_UNPACKED:,} times as large without compression, which no text is; "
                        "if it is meant so, unpack it first"
                    )
                if b"\0" in block:
                    at = read_bytes - len(block) + block.index(b"\0")
                    raise UserError(f"{path}: not text: a byte 0 at byte {at:,}{_what_it_is(begins)}")
                yield decoder.decode(block)
                on_read(file.tell() - on_disk)
                on_disk = file.tell()
            yield decoder.decode(b"", final=True)
    except UnicodeDecodeError as error:
        at = read_bytes - len(error.object) + error.start
        advice = _what_it_is(begins) or "; convert it, for example with iconv -t UTF-8"
        raise UserError(f"{path}: not UTF-8 text at byte {at:,}{advice}") from None
    except (lzma.LZMAError, zlib.error, EOFError, gzip.BadGzipFile) as error:
        raise UserError(f"{path}: not a whole {path.suffix} file: {error}; compress or copy it again") from None
    except OSError as error:
        if path.suffix.lower() in COMPRESSED and error.errno is None:  # what bz2 and pyarrow raise for bad data
            raise UserError(f"{path}: not a whole {path.suffix} file: {error}; compress or copy it again") from None
        raise UserError(f"{path}: cannot be read: {error.strerror or error}") from None


def _what_it_is(begins: bytes) -> str:
    found = next((kind for first, kind in FIRST_BYTES.items() if begins.startswith(first)), None)
    return f"; by its first bytes it is {found}: name it so, or unpack it" if found else ""


def _unpacked(path: Path, file: BinaryIO) -> Iterator[bytes]:
    stream: Any = file
    match path.suffix.lower():
        case ".xz":
            return _unpacked_xz(file)
        case ".gz":
            stream = gzip.GzipFile(fileobj=file)
        case ".bz2":
            stream = bz2.BZ2File(file)
        case ".zst":
            stream = require("pyarrow", "parquet", f"{path}: reading .zst").CompressedInputStream(file, "zstd")
    return iter(lambda: stream.read(BLOCK_BYTES), b"")


def _unpacked_xz(file: BinaryIO) -> Iterator[bytes]:
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


def file_records(path: Path, on_read: OnRead, columns: Iterable[str]) -> Iterator[Record]:
    """The records of a file; of a table with columns, only these, if it has one of them."""
    return _rows(path, on_read, columns) if kind_of(path) == PARQUET else _json_records(path, on_read)


def _json_records(path: Path, on_read: OnRead) -> Iterator[Record]:
    lines = _lines(path, text_blocks(path, on_read))
    for number, line in enumerate(lines, 1):
        if line.lstrip().startswith("["):  # the whole file is one list
            length, parts = 0, [line]
            for each in lines:
                parts.append(each)
                length += len(each)
                _check_length(path, length)
            listed: list[Any] = _parsed("\n".join(parts), str(path))
            yield from (_record(f"{path}: record {place}", each) for place, each in enumerate(listed, 1))
        elif line.strip():
            yield _record(f"{path}: line {number}", _parsed(line, f"{path}: line {number}"))


def _lines(path: Path, blocks: Iterable[str]) -> Iterator[str]:
    parts: list[str] = []
    for block in blocks:
        *whole, rest = block.split("\n")
        for line in whole:
            yield "".join([*parts, line])
            parts.clear()
        parts.append(rest)
        _check_length(path, sum(map(len, parts)))
    yield "".join(parts)


def _check_length(path: Path, characters: int) -> None:
    if characters > MOST_LINE_CHARACTERS:
        raise UserError(
            f"{path}: a line or list of more than {MOST_LINE_CHARACTERS:,} characters; write each record as a line"
        )


def _parsed(text: str, place: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        reason = error.msg if isinstance(error, json.JSONDecodeError) else error
        raise UserError(f'{place}: not JSON ({reason}); every line is one record, as in {{"text": …}}') from None


def _record(place: str, found: Any) -> Record:
    if not isinstance(found, dict):
        raise UserError(f'{place}: not a record but a {type(found).__name__}; expected an object, as {{"text": …}}')
    return Record(place, found)


def _rows(path: Path, on_read: OnRead, columns: Iterable[str]) -> Iterator[Record]:
    pyarrow = require("pyarrow", "parquet", f"{path}: reading Parquet")
    parquet = import_module("pyarrow.parquet")
    try:
        with opened(path) as file:
            table, number = parquet.ParquetFile(file), 0
            each_bytes = path.stat().st_size / max(1, table.metadata.num_rows)
            wanted = [name for name in columns if name in table.schema_arrow.names]
            for batch in table.iter_batches(BATCH_ROWS, columns=wanted or None):
                for row in batch.to_pylist():
                    number += 1
                    yield Record(f"{path}: row {number}", row)
                on_read(int(each_bytes * len(batch)))
    except (pyarrow.ArrowException, OSError) as error:
        reason = " ".join(str(error).split())
        raise UserError(f"{path}: not a whole Parquet file: {reason}; copy or write it again") from None


def check_hub_name(name: str) -> tuple[str, str | None, str, int | None]:
    """Dataset, configuration, split and number of rows."""
    found = HUB_NAME.fullmatch(name)
    if found is None:
        raise UserError(f"{name}: expected hf:NAME[:CONFIG][:SPLIT], as in hf:lab/books, or hf:lab/books::train[:1000]")
    dataset, config, split, rows = found.groups()
    return dataset, config or None, split or "train", int(rows) if rows else None


def hub_records(name: str) -> Iterator[Record]:
    """The rows of a dataset on the hub, in its order, without having all of them on disk."""
    dataset, config, split, rows = check_hub_name(name)
    datasets = require("datasets", "datasets", f"{name}: reading a dataset")
    number = 0
    try:  # a dataset that is a script is refused with a RuntimeError: from version 4 on the library runs none
        for row in islice(datasets.load_dataset(dataset, config, split=split, streaming=True), rows):
            number += 1
            yield Record(f"{name}: row {number}", row)
    except Exception as error:  # it raises those of the network library, too
        if isinstance(error, UserError):
            raise
        reason = " ".join(str(error).split()) or type(error).__name__
        raise UserError(f"{name}: the dataset cannot be read here: {reason[:300]}") from None
