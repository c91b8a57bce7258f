"""Names of nodes: what they may be, since files are named after nodes.

A node's log and its key have its name. So a name is no way to another folder, it is short enough, and no two of a
cluster are the same file on a disk that does not tell upper from lower case.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Mapping

from skippipe.errors import UserError

LONGEST_BYTES = 64  # in UTF-8: as long as the name of a machine on Linux


def check_name(name: str, place: str) -> str:
    if not name:
        raise UserError(f"{place}: is empty; every node needs a name")
    if not name.isprintable() or name != name.strip():
        raise UserError(f"{place}: {name!a} has odd white space or control characters; use a plain name")
    if "/" in name or name in (".", ".."):
        raise UserError(f"{place}: '{name}' would be a way to another folder: files are named after nodes; rename it")
    if (size := len(name.encode())) > LONGEST_BYTES:
        raise UserError(f"{place}: '{name}' has {size} bytes, and a name has at most {LONGEST_BYTES}; shorten it")
    return name


def check_names(names: Mapping[str, str]) -> None:
    """UserError unless all can be names of nodes of one cluster. `names`: where a name is given → the name."""
    first: dict[str, str] = {}
    for place, name in names.items():
        other = first.setdefault(file_identity(check_name(name, place)), place)
        if other == place:
            continue
        if names[other] == name:
            raise UserError(f"{place}: '{name}' is already the name of {other}; rename one of them")
        raise UserError(
            f"{place}: '{name}' and '{names[other]}', the name of {other}, would be one file where a disk does not "
            "tell upper from lower case; rename one of them"
        )


def file_identity(name: str) -> str:
    """The same for two names if their files may be one."""
    return unicodedata.normalize("NFC", unicodedata.normalize("NFC", name).casefold())


def with_ending(name: str, ending: str) -> str:
    """The name with an ending; if that is too long, its own end is left out."""
    room = LONGEST_BYTES - len(ending.encode())
    return name.encode()[:room].decode(errors="ignore").rstrip() + ending
