"""TOML files into frozen dataclasses, and back into an example with every field explained.

A field's type says what it takes, its default what happens without it, the text under it what it is for. Unknown
fields and wrong types are one line that names the place.
"""

from __future__ import annotations

import ast
import difflib
import inspect
import json
import sys
import textwrap
import tomllib
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from types import UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from skippipe.errors import UserError

Tree = TypeVar("Tree")
WORDS: dict[Any, str] = {
    int: "a whole number",
    float: "a number",
    str: "a text in quotes",
    bool: "true or false",
}


def read_toml(kind: type[Tree], path: Path) -> Tree:
    try:
        with path.open("rb") as file:
            found = tomllib.load(file)
    except FileNotFoundError:
        raise UserError(f"{path}: no such file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read: {error}") from None
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"{path}: not valid TOML: {error}") from None
    try:
        return from_table(kind, found)
    except UserError as error:
        raise UserError(f"{path}: {error}") from None


def from_table(kind: type[Tree], table: Any, place: str = "") -> Tree:
    """An object of a dataclass from a table; what is not said keeps its default."""
    if not isinstance(table, dict):
        raise UserError(f"{place}: expected a table, written [{place}]")
    hints = get_type_hints(kind)
    for name in table:
        if name not in hints:
            near = difflib.get_close_matches(name, hints, 1)
            meant = f"; did you mean '{near[0]}'?" if near else f"; there are {', '.join(hints)}"
            raise UserError(f"{_at(place, name)}: no such field{meant}")
    return kind(**{name: _value(hints[name], value, _at(place, name)) for name, value in table.items()})


def _at(place: str, name: str) -> str:
    return f"{place}.{name}" if place else name


def _value(hint: Any, value: Any, at: str) -> Any:
    if is_dataclass(hint):
        return from_table(hint, value, at)  # type: ignore[arg-type]
    if get_origin(hint) in (Union, UnionType):  # an optional field: TOML has no null, so it is said or left out
        (hint,) = (each for each in get_args(hint) if each is not type(None))
    if get_origin(hint) is Literal:
        if value not in get_args(hint):
            raise UserError(f"{at}: {value!r} is none of {', '.join(get_args(hint))}")
        return value
    if hint is float and isinstance(value, (int, float)) and not isinstance(value, bool):
        if not abs(value) <= sys.float_info.max:  # nor is a whole number of a thousand digits
            raise UserError(f"{at}: {value} is not a finite number")
        return float(value)
    if get_origin(hint) is list:
        (kind,) = get_args(hint)
        if kind is str and isinstance(value, str):
            value = [value]
        if not isinstance(value, list):
            raise UserError(f"{at}: expected a list, found {value!r}")
        return [_value(kind, each, f"{at}[{index}]") for index, each in enumerate(value)]
    if not isinstance(value, hint) or (hint is int and isinstance(value, bool)):
        raise UserError(f"{at}: expected {WORDS[hint]}, found {value!r}")
    return value


def example(kind: type[Any], place: str = "") -> str:
    """All fields with their defaults and what they are for; those without a default are left out as comments."""
    hints, texts = get_type_hints(kind), field_texts(kind)
    plain, tables = [], []
    for field in fields(kind):
        at = _at(place, field.name)
        if is_dataclass(hints[field.name]):
            about = textwrap.fill(texts.get(field.name, ""), 100, initial_indent="# ", subsequent_indent="# ")
            tables.append(f"\n{about}\n[{at}]\n{example(hints[field.name], at)}")
            continue
        default = field.default_factory() if field.default_factory is not MISSING else field.default
        if get_origin(hints[field.name]) is Literal:
            choices = " | ".join(f'"{each}"' for each in get_args(hints[field.name]))
            texts[field.name] = f"{choices}. {texts.get(field.name, '')}"
        about = textwrap.fill(texts.get(field.name, ""), 100, initial_indent="# ", subsequent_indent="# ")
        line = f"# {field.name} =" if default in (None, MISSING) else f"{field.name} = {_written(default)}"
        plain.append("\n".join(part for part in (about if texts.get(field.name) else "", line) if part))
    return "\n".join(plain) + "\n" + "".join(tables)


def _written(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)  # TOML has the same escapes
    if isinstance(value, list):
        return f"[{', '.join(_written(each) for each in value)}]"
    return repr(value)


def field_texts(kind: type[Any]) -> dict[str, str]:
    """The texts that stand under the fields of a dataclass."""
    (body,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    assert isinstance(body, ast.ClassDef)
    texts: dict[str, str] = {}
    name = ""
    for statement in body.body:
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            name = statement.target.id
        elif isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant) and name:
            texts[name] = " ".join(str(statement.value.value).split())
            name = ""
        else:
            name = ""
    return texts
