"""Ranges of the numbers in files and on the command line.

A range stands where the number does, in its type: `iterations: Annotated[int, ITERATIONS]`. The readers of job, study,
cluster and plan files and the command line look it up there and refuse what lies outside, before anything else is done;
`skippipe job` and `--help` show it, and docs/formats.md has them all.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Collection
from dataclasses import dataclass, is_dataclass
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

from skippipe.errors import UserError

LARGEST = 2**53  # beyond this JSON readers disagree about whole numbers
MAX_SHOWN_DIGITS = 30  # of a number that is refused
_hints: dict[type[Any], dict[str, Any]] = {}  # found once, as workloads and clusters are made by the thousand


@dataclass(frozen=True)
class Range:
    least: float
    most: float
    above: bool = False
    """`least` itself lies outside."""
    below: bool = False
    """`most` itself lies outside."""

    def __contains__(self, value: float) -> bool:
        """Whether the value lies in the range; NaN lies in none."""
        enough = self.least < value if self.above else self.least <= value
        return enough and (value < self.most if self.below else value <= self.most)

    def __str__(self) -> str:
        above, below = "above " * self.above, "below " * self.below
        return f"{above}{number_text(self.least)} to {below}{number_text(self.most)}"

    def check(self, value: float, place: str) -> None:
        if value not in self:
            raise UserError(f"{place}: {number_text(value)} is out of range; give {self}")


def did_you_mean(name: str, known: Collection[str], otherwise: str = "") -> str:
    """The end of an error about a name that is not known: the nearest one, if it is near; or else `otherwise`."""
    near = difflib.get_close_matches(name, known, 1)
    return f"; did you mean '{near[0]}'?" if near else otherwise


@dataclass(frozen=True)
class Choices:
    """The names that a text may be, noted beside its type like a range beside a number's."""

    names: Collection[str]

    def __str__(self) -> str:
        return " | ".join(f'"{name}"' for name in self.names)

    def check(self, value: str, place: str) -> None:
        if value not in self.names:
            raise UserError(f"{place}: '{value}' is none of {', '.join(self.names)}{did_you_mean(value, self.names)}")


COUNT = Range(0, LARGEST)
POSITIVE = Range(1, LARGEST)
SEED = Range(0, LARGEST)
PORT = Range(0, 65_535)
ITERATIONS = Range(1, 10**9)
ITERATIONS_OR_NONE = Range(0, 10**9)
SEQUENCE = Range(1, 10**7)
SAMPLES = Range(1, 10**6)
MICROBATCHES = Range(1, 10**5)
SLOTS = Range(1, 10**6)
STAGES = Range(1, 10_000)
LAYERS = Range(1, 10_000)
WIDTH = Range(1, 10**7)
THREADS = Range(1, 1024)
DEVICES = Range(1, 64)  # of a node
VOCABULARY = Range(257, 10**7)  # the bytes, so that any text can be spelled, and the end of a document
TOKENS = Range(1, 10**15)
DRAWS = Range(1, 10**6)
NATS = Range(0, 100)
CONTEXT = Range(2, 10**7)
NODES = Range(1, 10_000)
BUDGET_S = Range(0.001, 7 * 86_400)
HEARTBEAT_S = Range(0.1, 3_600)
WAIT_S = Range(0, 365 * 86_400)
CENTURY_S = Range(0, 3.2e9)
RESIDUAL_SCALE = Range(0, 1_000, above=True)
SHARE = Range(0, 1)
BELOW_ONE = Range(0, 1, below=True)


def number_text(value: float) -> str:
    """A number for display; one of a thousand digits only by their number, as Python writes no more than some."""
    if isinstance(value, int) and abs(value) >= 10**MAX_SHOWN_DIGITS:
        return f"a number of some {int(value.bit_length() * math.log10(2)) + 1:,} digits"
    if value in (math.inf, -math.inf) or value != value:
        return str(value)
    if isinstance(value, int) or (value == int(value) and abs(value) < 10**16):
        return f"{int(value):,}"
    return f"{value:g}"


def hints_of(dataclass_type: type[Any]) -> dict[str, Any]:
    """Types of a dataclass's fields, with their annotations."""
    if dataclass_type not in _hints:
        _hints[dataclass_type] = get_type_hints(dataclass_type, include_extras=True)
    return _hints[dataclass_type]


def split_hint(hint: Any) -> tuple[Any, Range | Choices | None]:
    """A type without its notes, and the range or the choices noted beside it; of an optional one, what it is if it is
    given."""
    within = None
    if get_origin(hint) is Annotated:
        hint, *notes = get_args(hint)
        within = next((note for note in notes if isinstance(note, (Range, Choices))), None)
    if get_origin(hint) in (Union, UnionType):
        (hint,) = (each for each in get_args(hint) if each is not type(None))
        inner, noted = split_hint(hint)
        return inner, within or noted
    return hint, within


def range_of(dataclass_type: type[Any], name: str) -> Range:
    """The range of a field."""
    within = split_hint(hints_of(dataclass_type)[name])[1]
    assert isinstance(within, Range), f"{dataclass_type.__name__}.{name} has no range"
    return within


def check_ranges(found: Any, place: str = "") -> None:
    """Check that every number in an object of a dataclass, and in those inside it, lies in the range of its field."""
    for name, hint in hints_of(type(found)).items():
        _check(hint, getattr(found, name), f"{place}.{name}" if place else name)


def _check(hint: Any, value: Any, at: str) -> None:
    inner, within = split_hint(hint)
    if value is None:
        return
    if is_dataclass(inner):
        check_ranges(value, at)
    elif within is not None:
        within.check(value, at)
    elif get_origin(inner) is list:
        for index, each in enumerate(value):
            _check(get_args(inner)[0], each, f"{at}[{index}]")
