"""TOML files into frozen dataclasses, and back into an example with every field explained.

A field's type says what it takes, the range beside it which numbers, its default what happens without it, the text
under it what it is for. Unknown fields, wrong types and numbers out of range are one line that names the place.
"""

from __future__ import annotations

import ast
import inspect
import json
import sys
import textwrap
import tomllib
from collections.abc import Collection, Iterator, Mapping
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args, get_origin

from skippipe.errors import UserError
from skippipe.json_fields import read_as, read_file
from skippipe.value_ranges import did_you_mean, hints_of, number_text, split_hint

Tree = TypeVar("Tree")
TYPE_NAMES: dict[Any, str] = {
    int: "a whole number",
    float: "a number",
    str: "a text in quotes",
    bool: "true or false",
}


def read_toml(dataclass_type: type[Tree], path: Path) -> Tree:
    return read_as(lambda table: from_table(dataclass_type, table), path, read_table)


def read_table(path: Path) -> Any:
    return read_file(path, tomllib.loads, "TOML")


def from_table(dataclass_type: type[Tree], table: Any, place: str = "") -> Tree:
    """An object of a dataclass from a table; fields that are not given keep their default."""
    if not isinstance(table, dict):
        raise UserError(f"{place}: expected a table, written [{place}]")
    hints = hints_of(dataclass_type)
    for name in table:
        if name not in hints:
            meant = did_you_mean(name, hints, f"; there are {', '.join(hints)}")
            raise UserError(f"{_at(place, name)}: no such field{meant}")
    for field in fields(dataclass_type):  # type: ignore[arg-type]
        if field.name not in table and field.default is field.default_factory is MISSING:
            raise UserError(f"{_at(place, field.name)}: missing; add it")
    return dataclass_type(**{name: _value(hints[name], value, _at(place, name)) for name, value in table.items()})


def _at(place: str, name: str) -> str:
    return f"{place}.{name}" if place else name


def _value(hint: Any, value: Any, at: str) -> Any:
    if value is None and type(None) in get_args(hint):  # in JSON; TOML has no null
        return None
    hint, within = split_hint(hint)
    found = _typed(hint, value, at)
    if within is not None:
        within.check(found, at)
    return found


def _typed(hint: Any, value: Any, at: str) -> Any:
    if is_dataclass(hint):
        return hint.from_json(value) if hasattr(hint, "from_json") else from_table(hint, value, at)  # type: ignore[arg-type]
    if get_origin(hint) is Literal:
        if value not in get_args(hint):
            raise UserError(f"{at}: {value!r} is none of {', '.join(get_args(hint))}")
        return value
    if hint is float and isinstance(value, (int, float)) and not isinstance(value, bool):
        if not abs(value) <= sys.float_info.max:  # nor is a whole number of a thousand digits
            raise UserError(f"{at}: {number_text(value)} is not a finite number")
        return float(value)
    if get_origin(hint) in (list, tuple):
        item_hint = get_args(hint)[0]
        if item_hint is str and isinstance(value, str):
            value = [value]
        if not isinstance(value, list):
            raise UserError(f"{at}: expected a list, found {value!r}")
        return get_origin(hint)(_value(item_hint, each, f"{at}[{index}]") for index, each in enumerate(value))
    if get_origin(hint) is dict:
        if not isinstance(value, dict):
            raise UserError(f"{at}: expected an object, found {value!r}")
        return {name: _value(get_args(hint)[1], each, _at(at, name)) for name, each in value.items()}
    if hint is Any:
        return value
    if not isinstance(value, hint) or (hint is int and isinstance(value, bool)):
        found = number_text(value) if type(value) is int else repr(value)
        raise UserError(f"{at}: expected {TYPE_NAMES[hint]}, found {found}")
    if isinstance(value, str) and "\0" in value:
        raise UserError(f"{at}: {value!r} has a NUL character, which no name of a file has; leave it out")
    return value


def example(
    dataclass_type: type[Any],
    place: str = "",
    advised: Mapping[str, Any] | None = None,
    omitted: Collection[str] = (),
) -> str:
    """An example file: all fields with their defaults and docstrings; those without a default are left as comments.
    `advised`: fields that have another value than their default, which is named. `omitted`: fields to leave out."""
    advised = advised or {}
    hints, texts = hints_of(dataclass_type), field_texts(dataclass_type)
    plain, tables = [], []
    for field in fields(dataclass_type):
        at = _at(place, field.name)
        if at in omitted:
            continue
        hint, within = split_hint(hints[field.name])
        if is_dataclass(hint):
            table = example(hint, at, advised, omitted)  # type: ignore[arg-type]
            if table.strip():
                tables.append(f"\n{_comment(texts.get(field.name, ''))}\n[{at}]\n{table}")
            continue
        if get_origin(hint) is list:
            within = within or split_hint(get_args(hint)[0])[1]
        default = field.default_factory() if field.default_factory is not MISSING else field.default
        text = texts.get(field.name, "")
        if get_origin(hint) is Literal:
            choices = " | ".join(f'"{each}"' for each in get_args(hint))
            text = f"{choices}. {text}"
        elif within is not None:
            text = f"{within}. {text}"
        if at in advised:
            text += f" Left out: {_literal(default)}."
            default = advised[at]
        if text:
            plain.append(_comment(text))
        plain.append(f"# {field.name} =" if default in (None, MISSING) else f"{field.name} = {_literal(default)}")
    return "\n".join(plain) + "\n" + "".join(tables)


def field_places(dataclass_type: type[Any], place: str = "") -> Iterator[str]:
    """All fields that are no tables, as in "model.config"."""
    hints = hints_of(dataclass_type)
    for field in fields(dataclass_type):
        hint, at = split_hint(hints[field.name])[0], _at(place, field.name)
        if is_dataclass(hint):
            yield from field_places(hint, at)  # type: ignore[arg-type]
        else:
            yield at


def _comment(text: str) -> str:
    return textwrap.fill(text, 100, initial_indent="# ", subsequent_indent="# ")


def _literal(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)  # TOML has the same escapes
    if isinstance(value, list):
        return f"[{', '.join(_literal(each) for each in value)}]"
    return repr(value)


def field_texts(dataclass_type: type[Any]) -> dict[str, str]:
    """The docstrings of the fields of a dataclass."""
    (body,) = ast.parse(textwrap.dedent(inspect.getsource(dataclass_type))).body
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
