"""Names of nodes, which files are named after."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skippipe.errors import UserError
from skippipe.json_fields import Fields
from skippipe.launch.fork_server import log_file
from skippipe.node_names import LONGEST_BYTES, check_name, check_names, file_identity, with_ending
from skippipe.toml_config import from_table
from skippipe.training.job_config import JobConfig
from skippipe.transport.keys import IssuedInvitation, KeyPair, PeerList
from skippipe.transport.members import MemberStore

NO_NAMES = {
    "": "is empty; every node needs a name",
    " ": "odd white space",
    "a ": "odd white space",
    "a\0": "odd white space or control characters",
    "a\nb": "odd white space or control characters",
    "../x": "a way to another folder",
    "a/b": "a way to another folder",
    "/etc/x": "a way to another folder",
    "..": "a way to another folder",
    ".": "a way to another folder",
    "ü" * 33: "has 66 bytes, and a name has at most 64; shorten it",
}
"""What nodes cannot be called → what is said of it."""
PUBLIC = KeyPair.new().public


def invited(name: str) -> IssuedInvitation:
    value = {"name": name, "public": PUBLIC, "made_s": 0, "expires_s": 9, "ended": "", "ended_s": 0, "used_by": ""}
    return IssuedInvitation.from_fields(Fields(value, "invitations[0]"))


GATES: dict[str, Callable[[str, Path], object]] = {
    "a list of peers": lambda name, _: PeerList({name: PUBLIC}),
    "an invitation in a list": lambda name, _: invited(name),
    "an invitation": lambda name, folder: MemberStore.of_folder(folder).invite(name, PUBLIC, 60, ("10.0.0.1:5555",)),
}


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("name", NO_NAMES)
def test_what_no_file_can_be_named_after_is_refused(gate: str, name: str, tmp_path: Path) -> None:
    with pytest.raises(UserError) as caught:
        GATES[gate](name, tmp_path)
    said = str(caught.value)
    assert NO_NAMES[name] in said or "expected a text that is not empty" in said or "cannot be printed" in said
    assert said.isprintable(), "one line, and no tricks on a terminal"


@given(st.text(max_size=70))
def test_a_name_that_is_taken_is_that_of_a_file_in_the_folder(name: str) -> None:
    try:
        check_name(name, "name")
    except UserError:
        return
    path = log_file(Path("logs"), name)
    assert path.parent == Path("logs") and path.name == f"{name}.log"
    assert len(path.name.encode()) < 255 - len(".partial")


@pytest.mark.parametrize("other", ["ann", "Ann", "ANN"])
def test_names_of_one_file_are_refused(other: str, tmp_path: Path) -> None:
    how = "is already the name of" if other == "ann" else "would be one file"
    with pytest.raises(UserError, match=f"second: '{other}' .*{how}|second: '{other}' {how}"):
        check_names({"first": "ann", "second": other})
    store = MemberStore.of_folder(tmp_path)
    store.invite("ann", PUBLIC, 60, ("10.0.0.1:5555",))
    if other == "ann":
        store.invite(other, PUBLIC, 60)  # the earlier invitation holds no more
    else:
        with pytest.raises(UserError, match=f"--name: '{other}' and 'ann', the name of member 'ann', would be one"):
            store.invite(other, PUBLIC, 60)


def test_letters_that_are_written_in_two_ways_are_the_same() -> None:
    assert file_identity("Bj\u00f6rn") == file_identity("bjo\u0308rn") != file_identity("bjorn")


def test_an_ending_fits() -> None:
    assert with_ending("ann", "-twin") == "ann-twin"
    longest = "ü" * (LONGEST_BYTES // 2)
    assert with_ending(longest, "-twin") == "ü" * 29 + "-twin"


def test_a_folder_in_a_job_has_no_nul() -> None:
    with pytest.raises(UserError, match=re.escape("output: 'run\\x00/../x' has a NUL character")):
        from_table(JobConfig, {"output": "run\0/../x"})
