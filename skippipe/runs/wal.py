"""The coordinator's journal, a write-ahead log: its decisions are on disk before any node hears of them.

Text, to be read with `less`: a line that says what this is, then one line for every record.

    skippipe-journal 1
    2f0b2a92 27 {"commit": 7, "rate": 0.01}        CRC-32 of the JSON, its length in bytes, the JSON (ASCII)

Only the record that was being written when the coordinator died can be damaged by that, and nothing stands behind it:
such a torn tail is cut off when the file is opened. A damaged line with a valid one behind it is no torn tail: the file
was changed by something else, and a person must decide what to do.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import re
import weakref
import zlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Protocol

from skippipe.errors import UserError
from skippipe.json_fields import fsync_path

FORMAT, VERSION = "skippipe-journal", 1
HEADER = f"{FORMAT} {VERSION}\n".encode()
START = re.compile(rb"(?=[0-9a-f]{8} (0|[1-9][0-9]{0,15}) )")  # of a record; looks ahead, so that they may overlap


class WriteAheadLog:
    """Records on disk, in order. What `write` has returned for survives a crash and a power loss.

    One process at a time has it open; its forked children do not count.
    """

    def __init__(self, path: Path, *, sync: Callable[[int], None] = os.fdatasync) -> None:
        """`sync` takes a descriptor and returns when what was written to it is on the disk."""
        self.path = path.resolve()
        self.records: list[dict[str, Any]] = []
        """Found when it was opened."""
        self._sync = sync
        self._size = 0
        self._ragged = False  # there may be something behind the last record
        self._moved = False  # the folder may still name the file that was replaced
        self._descriptor = -1
        try:
            _make_folder(self.path.parent)
            self._descriptor = lock_file(self.path)
            close_in_children(self)
            self._partial.unlink(missing_ok=True)
            self._take_up()
        except OSError as error:
            self.close()
            raise UserError(f"{path}: cannot be opened: {error.strerror or error}") from None
        except BaseException:
            self.close()
            raise

    @property
    def _partial(self) -> Path:
        return self.path.with_name(self.path.name + ".partial")

    def _take_up(self) -> None:
        with open(self._descriptor, "rb", closefd=False) as file:
            content = file.read()
        if _is_new(content):
            os.ftruncate(self._descriptor, 0)
            _put(self._descriptor, HEADER, 0)
            self._size = len(HEADER)
        else:
            self.records, self._size = _parsed(content, self.path)
            os.ftruncate(self._descriptor, self._size)
        self._sync(self._descriptor)  # also what a killed predecessor wrote and we now count on
        fsync_path(self.path.parent)

    def write(self, record: dict[str, Any]) -> None:
        """Add a record. After an OSError it is not there, and all that were written before are."""
        line = _line(record)
        self._settle()
        self._ragged = True
        try:
            _put(self._descriptor, line, self._size)
            self._sync(self._descriptor)
            self._size += len(line)
            self._ragged = False
        except BaseException:  # an interrupt, too: the caller does not know it as written
            with contextlib.suppress(OSError):
                self._settle()
                self._sync(self._descriptor)
            raise

    def rewrite(self, records: Iterable[dict[str, Any]]) -> None:
        """Replace all records by these, or none: whenever it ends, the file has either the old ones or the new ones."""
        content = HEADER + b"".join(_line(record) for record in records)
        descriptor = -1
        try:
            descriptor = lock_file(self._partial)  # before it has the journal's name: no process comes in between
            os.ftruncate(descriptor, 0)
            _put(descriptor, content, 0)
            self._sync(descriptor)
            self._partial.replace(self.path)
        except BaseException:
            if descriptor >= 0:
                os.close(descriptor)
            with contextlib.suppress(OSError):
                self._partial.unlink()
            raise
        self._descriptor, old = descriptor, self._descriptor
        self._size, self._ragged, self._moved = len(content), False, True
        os.close(old)
        self._settle()

    def _settle(self) -> None:
        """Finish what an earlier failure has left undone: what comes next would not count otherwise."""
        if not _is_named(self._descriptor, self.path):
            raise OSError(errno.ESTALE, "this file has been moved or replaced", str(self.path))
        if self._ragged:
            os.ftruncate(self._descriptor, self._size)
            self._ragged = False
        if self._moved:
            fsync_path(self.path.parent)
            self._moved = False

    def close(self) -> None:
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)


class Closable(Protocol):
    def close(self) -> None: ...


_held: weakref.WeakSet[Closable] = weakref.WeakSet()


def close_in_children(held: Closable) -> None:
    """A forked child would share its lock, and keep it when the coordinator is dead and ought to be started again."""
    _held.add(held)


def _close_held() -> None:
    for each in list(_held):
        each.close()


os.register_at_fork(after_in_child=_close_held)


def _line(record: dict[str, Any]) -> bytes:
    text = json.dumps(record, allow_nan=False).encode()  # escapes line ends, so that a record is one line
    return b"%08x %d %s\n" % (zlib.crc32(text), len(text), text)


def _is_new(content: bytes) -> bool:
    """The file is empty but for a torn header: a part of it, or zeros in its place."""
    if len(content) > len(HEADER) or content == HEADER:
        return False
    return HEADER.startswith(content) or not content.strip(b"\0")


def _parsed(content: bytes, path: Path) -> tuple[list[dict[str, Any]], int]:
    """The records, and the offset of their end."""
    if not content.startswith(HEADER):
        first = content[: len(HEADER) + 8].partition(b"\n")[0].decode(errors="replace")
        if first.startswith(f"{FORMAT} "):
            raise UserError(f"{path}: this is a {first!a}; this release reads version {VERSION}")
        raise UserError(f"{path}: this is no journal, or its first line is damaged; restore it, or name another file")
    records: list[dict[str, Any]] = []
    at = len(HEADER)
    while (end := content.find(b"\n", at)) >= 0 and (text := checked_json(content[at:end])) is not None:
        try:
            records.append(json.loads(text))
        except (ValueError, RecursionError) as error:
            raise UserError(f"{path}: line {len(records) + 2} cannot be read: {error}") from None
        at = end + 1
    *lines, _ = content[at:].split(b"\n")
    if any(checked_json(line, match.start()) is not None for line in lines for match in START.finditer(line)):
        number = len(records) + 2
        raise UserError(
            f"{path}: line {number} is damaged, and sound ones follow, so no crash has done this; restore the file, "
            f"or keep its first {number - 1} lines only and lose all that was decided after them"
        )
    return records, at


def checked_json(line: bytes, start: int = 0) -> bytes | None:
    """The JSON in a line, if its checksum and length are right from `start` on."""
    found = START.match(line, start)
    if found is None or int(found[1]) != len(line) - found.end(1) - 1:
        return None
    text = line[found.end(1) + 1 :]
    return text if line[start : start + 8] == b"%08x" % zlib.crc32(text) else None


class AlreadyLocked(UserError):
    """Another process has locked the file."""


def lock_file(path: Path) -> int:
    """Open and lock a file, new or not; AlreadyLocked if another process has locked it."""
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_named(descriptor, path):
                return descriptor
        except BlockingIOError:
            os.close(descriptor)
            raise AlreadyLocked(
                f"{path}: another coordinator has it open; end that one first, or name another"
            ) from None
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)  # replaced while we were at it: the lock is on a file that has no name any more


def _is_named(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _put(descriptor: int, content: bytes, at: int) -> None:
    while content:
        written = os.pwrite(descriptor, content, at)
        content, at = content[written:], at + written


def _make_folder(folder: Path) -> None:
    if not folder.is_dir():
        _make_folder(folder.parent)
        folder.mkdir(exist_ok=True)
        fsync_path(folder.parent)
