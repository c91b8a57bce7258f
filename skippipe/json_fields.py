"""Files that users write, and JSON field by field: every error names the place and the fix."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Collection, Iterator
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_args, get_origin

from skippipe.errors import UserError
from skippipe.value_ranges import COUNT, Choices, Range, did_you_mean, hints_of, number_text, range_of, split_hint

Parsed = TypeVar("Parsed")


def exists(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:  # no file can have this name
        return False


def read_json(path: Path) -> Any:
    """The parsed file; NaN is let through here, so that the reader of the field can say where it stands."""
    return read_file(path, partial(json.loads, object_pairs_hook=_without_repeats), "JSON")


def read_file(path: Path, loads: Callable[[str], Any], language: str) -> Any:
    """The text of a file, parsed by `loads`; errors start with the file's name."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UserError(f"{path}: no such file") from None
    except IsADirectoryError:
        raise UserError(f"{path}: this is a folder; name a file in it") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read as text: {error}") from None
    try:
        return loads(text)
    except UserError as error:
        raise UserError(f"{path}: {error}") from None
    except (ValueError, RecursionError) as error:  # bad syntax, a number of thousands of digits, endless nesting
        raise UserError(f"{path}: not valid {language}: {error}") from None


def read_as(parse: Callable[[Any], Parsed], path: Path, read: Callable[[Path], Any] = read_json) -> Parsed:
    """The file parsed into an object; errors start with the file's name."""
    raw = read(path)
    try:
        return parse(raw)
    except UserError as error:
        raise UserError(f"{path}: {error}") from None


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise UserError(f"field '{twice}' is given twice in one object: keep one of them")
    return found


def check_writable(path: Path, *sources: Path) -> None:
    """Refuse an output file that cannot be written, before hours of work and not after them."""
    if path.is_dir() or not path.name:
        raise UserError(f"{path}: this is a folder; name a file in it")
    if any(source.exists() and path.exists() and path.samefile(source) for source in sources):
        raise UserError(f"{path}: this is the input; write to another file")


def check_output(path: Path, *sources: Path, overwrite: bool = False) -> None:
    """Refuse an output file that cannot be written, or that is there already and is not to be overwritten."""
    check_writable(path, *sources)
    if path.is_file() and not overwrite:
        raise UserError(f"{path}: is there already; --overwrite replaces it; or name another file")


def check_empty(folder: Path, advice: str = "name another folder") -> None:
    """Refuse an output folder that has files in it."""
    if exists(folder) and not folder.is_dir():
        raise UserError(f"{folder}: is a file; name a folder")
    if exists(folder) and any(folder.iterdir()):
        raise UserError(f"{folder}: is not empty, and nothing in it is overwritten; {advice}")


def fsync_path(path: Path) -> None:
    """Return when the content of a file or folder is on the disk, and not only in the system's cache."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_text(path: Path, text: str) -> None:
    write_bytes(path, text.encode())


def write_bytes(path: Path, content: bytes, *, private: bool = False) -> None:
    """Write a file whole or not at all: an interrupted run leaves the old one. If it is private, only its owner can
    read it, from its first byte on."""
    check_writable(path)
    partial = path.with_name(path.name + ".partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists() and not path.is_file():  # a pipe or a device
            path.write_bytes(content)
            return
        try:
            if private:
                partial.unlink(missing_ok=True)
                partial.touch(mode=0o600, exist_ok=False)
            partial.write_bytes(content)
            partial.replace(path.resolve())
        finally:
            partial.unlink(missing_ok=True)
    except OSError as error:
        raise UserError(f"{path}: cannot be written: {error.strerror or error}") from None


_NESTED = {dict, list}
_one_line = json.JSONEncoder(allow_nan=False).encode  # `json.dumps` would make an encoder for each of many short lists


def json_text(value: Any, indent: int = 0) -> str:
    """JSON with one line for every list that holds no objects or lists of lists, so that matrices read as rows."""
    pad = " " * (indent + 1)
    if isinstance(value, dict) and value:
        rows = [f"{pad}{json.dumps(str(key))}: {json_text(item, indent + 1)}" for key, item in value.items()]
        return "{\n" + ",\n".join(rows) + "\n" + " " * indent + "}"
    if isinstance(value, list) and not _NESTED.isdisjoint(map(type, value)):
        rows = [pad + json_text(item, indent + 1) for item in value]
        return "[\n" + ",\n".join(rows) + "\n" + " " * indent + "]"
    return _one_line(value)


class Fields:
    """One JSON object, taken field by field; `close` then refuses unknown fields.

    If it becomes an object `of` a dataclass, that says the types of its fields, and the ranges of its numbers.
    """

    def __init__(self, value: Any, place: str, of: type[Any] | None = None) -> None:
        if not isinstance(value, dict):
            raise UserError(f"{place or 'the file'}: expected an object {{…}}, found {_described(value)}")
        self._remaining = dict(value)
        self._known: list[str] = []
        self._of = of
        self.place = place

    def at(self, name: str) -> str:
        return f"{self.place}.{name}" if self.place else name

    def has(self, name: str) -> bool:
        """Whether the field is there, and not null."""
        return self._remaining.get(name) is not None

    def mentions(self, name: str) -> bool:
        return name in self._remaining

    def take(self, name: str) -> Any:
        self._known.append(name)
        if name not in self._remaining:
            raise UserError(f"{self.at(name)}: missing; add it")
        return self._remaining.pop(name)

    def text(self, name: str, choices: tuple[str, ...] = ()) -> str:
        value = self.take(name)
        if not isinstance(value, str) or not value.strip():
            raise UserError(f"{self.at(name)}: expected a text that is not empty, found {_described(value)}")
        if not value.isprintable():
            raise UserError(f"{self.at(name)}: {value!a} has characters that cannot be printed; use plain ones")
        if choices:
            Choices(choices).check(value, self.at(name))
        return value

    def number(self, name: str, within: Range | None = None) -> float:
        return as_number(self.take(name), self.at(name), within or self._range(name))

    def integer(self, name: str, within: Range | None = None) -> int:
        return as_integer(self.take(name), self.at(name), within or self._range(name) or COUNT)

    def _range(self, name: str) -> Range | None:
        return range_of(self._of, name) if self._of else None

    def flag(self, name: str) -> bool:
        value = self.take(name)
        if not isinstance(value, bool):
            raise UserError(f"{self.at(name)}: expected true or false, found {_described(value)}")
        return value

    def items(self, name: str) -> list[Any]:
        value = self.take(name)
        if not isinstance(value, list):
            raise UserError(f"{self.at(name)}: expected a list […], found {_described(value)}")
        return value

    def objects(self, name: str, of: type[Any] | None = None) -> Iterator[Fields]:
        for index, value in enumerate(self.items(name)):
            yield Fields(value, f"{self.at(name)}[{index}]", of)

    def values(self, added: Collection[str] = ()) -> dict[str, Any]:
        """The fields of the dataclass that were not taken yet, each by its type: a text, a number, true or false, or
        null where that may be. Those of `added`, which earlier versions did not write, may be missing."""
        assert self._of is not None
        readers: dict[Any, Callable[[str], Any]] = {str: self.text, bool: self.flag}
        readers |= {int: self.integer, float: self.number}
        found = {}
        for name, hint in hints_of(self._of).items():
            if name in self._known:
                continue
            if name in added and not self.mentions(name):
                self._known.append(name)
                continue
            kind, _ = split_hint(hint)
            nullable = type(None) in get_args(get_args(hint)[0] if get_origin(hint) is Annotated else hint)
            if nullable and name not in added and not self.has(name):
                found[name] = self.take(name)
            elif issubclass(kind, StrEnum):
                found[name] = kind(self.text(name, tuple(kind)))
            else:
                found[name] = readers[kind](name)
        return found

    def header(self, file_format: str, *versions: int) -> int:
        """The version of a file; format and version, which every file of ours starts with, are checked."""
        found = self.text("format")
        if found != file_format:
            raise UserError(f"{self.at('format')}: this is a '{found}' file; a '{file_format}' file is needed here")
        number = self.integer("version", COUNT)
        if number not in versions:
            known = " and ".join(map(str, versions))
            raise UserError(f"{self.at('version')}: version {number} is not known here; this release reads {known}")
        return number

    def rest(self) -> dict[str, Any]:
        """The fields that have not been taken, for a reader of its own."""
        rest, self._remaining = self._remaining, {}
        return rest

    def close(self) -> None:
        for name in self._remaining:
            meant = did_you_mean(name, self._known, f"; known here: {', '.join(self._known)}")
            raise UserError(f"{self.at(name)}: unknown field{meant}")


def as_number(value: Any, place: str, within: Range | None = None) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise UserError(f"{place}: expected a number, found {_described(value)}")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise UserError(f"{place}: {number} is not a finite number; measure it again or give an estimate")
    if within is not None:
        within.check(value, place)
    return number


def as_integer(value: Any, place: str, within: Range = COUNT) -> int:
    number = as_number(value, place)
    if number != int(number):
        raise UserError(f"{place}: expected a whole number, found {number_text(value)}")
    within.check(value, place)
    return int(value)


def _described(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: f"the text '{value}'", type(None): "null", bool: "true or false"}
    return names.get(type(value)) or f"the number {number_text(value)}"
