"""The JSON object that a request is: every complaint names the field and the fix."""

from __future__ import annotations

import difflib
import json
from collections import Counter
from collections.abc import Iterator
from typing import Any, NoReturn

from skippipe.serving.complaints import found, short, wrong


def read_object(body: bytes) -> Fields:
    try:
        value = json.loads(body.decode(), object_pairs_hook=_without_repeats, parse_constant=_no_constant)
    except UnicodeDecodeError as error:
        raise wrong(None, f"the request is not UTF-8 from byte {error.start} on", "invalid_json") from None
    except RecursionError:
        raise wrong(None, "the request nests lists and objects too deeply", "invalid_json") from None
    except json.JSONDecodeError as error:
        place = f"line {error.lineno}, column {error.colno}"
        raise wrong(None, f"the request is not valid JSON: {error.msg} ({place})", "invalid_json") from None
    except ValueError:  # Python refuses to read such a number
        raise wrong(None, "the request has a number of thousands of digits", "invalid_json") from None
    return Fields(value)


class Fields:
    """One object, taken field by field; `close` then refuses what nobody asked for. null is as good as nothing."""

    def __init__(self, value: Any, place: str = "") -> None:
        if not isinstance(value, dict):
            raise wrong(place or None, f"expected an object {{…}}, found {found(value)}", "invalid_type")
        self._left: dict[str, Any] = dict(value)
        self._known: list[str] = []
        self._place = place

    def at(self, name: str) -> str:
        return f"{self._place}.{name}" if self._place else name

    def take(self, name: str) -> Any:
        self._known.append(name)
        return self._left.pop(name, None)

    def need(self, name: str) -> Any:
        value = self.take(name)
        if value is None:
            raise wrong(self.at(name), "missing; add it", "missing_required_parameter")
        return value

    def text(self, name: str) -> str:
        return as_text(self.need(name), self.at(name))

    def flag(self, name: str) -> bool:
        """False if it is not there."""
        value = self.take(name)
        if value is not None and not isinstance(value, bool):
            raise wrong(self.at(name), f"expected true or false, found {found(value)}", "invalid_type")
        return bool(value)

    def number(self, name: str, otherwise: float, least: float, most: float) -> float:
        value = self.take(name)
        return otherwise if value is None else as_number(value, self.at(name), least, most)

    def integer(self, name: str, least: int, most: int) -> int | None:
        value = self.take(name)
        if value is None:
            return None
        number = as_number(value, self.at(name), least, most)
        if number != int(number):
            raise wrong(self.at(name), f"expected a whole number, found {found(value)}", "invalid_type")
        return int(value)

    def objects(self, name: str) -> Iterator[Fields]:
        """At least one."""
        value = self.need(name)
        if not isinstance(value, list) or not value:
            raise wrong(self.at(name), f"expected a list of objects, found {found(value) if value else 'an empty one'}")
        for index, each in enumerate(value):
            yield Fields(each, f"{self.at(name)}[{index}]")

    def ignore(self, *names: str) -> None:
        """That make no difference to an answer."""
        for name in names:
            self.take(name)

    def refuse(self, name: str, *neutral: Any) -> None:
        """Not supported, but for values that ask for nothing."""
        value = self.take(name)
        # 0 == False in Python, but not in a request
        if value is not None and not any(type(value) is type(each) and value == each for each in neutral):
            raise wrong(self.at(name), "not supported here; leave it out", "unsupported_parameter")

    def close(self) -> None:
        for name in self._left:
            near = difflib.get_close_matches(short(name), self._known, n=1)
            hint = f"did you mean '{near[0]}'?" if near else "leave it out"
            raise wrong(self.at(short(name)), f"unknown parameter; {hint}", "unknown_parameter")


def as_text(value: Any, place: str) -> str:
    if not isinstance(value, str):
        raise wrong(place, f"expected a text, found {found(value)}", "invalid_type")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise wrong(place, f"half a character at place {error.start} (a surrogate without the other)") from None
    return value


def as_number(value: Any, place: str, least: float, most: float) -> float | int:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise wrong(place, f"expected a number, found {found(value)}", "invalid_type")
    if not least <= value <= most:
        raise wrong(place, f"expected a number from {least} to {most}, found {found(value)}")
    return value


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        twice, _ = Counter(name for name, _ in pairs).most_common(1)[0]
        raise wrong(None, f"field '{short(twice)}' is given twice in one object: keep one of them", "invalid_json")
    return values


def _no_constant(name: str) -> NoReturn:
    raise wrong(None, f"the request is not valid JSON: it has no {name}", "invalid_json")
