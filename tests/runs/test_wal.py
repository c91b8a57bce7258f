"""The journal: wherever it is cut off, what was written before is there; what is not as it was written is no record.

A real power loss cannot be had here; a file cut off at every length stands for it. A real kill can.
"""

from __future__ import annotations

import errno
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from skippipe.errors import UserError
from skippipe.runs.wal import HEADER, WriteAheadLog

RECORDS: list[dict[str, Any]] = [
    {"say": "hired", "node": 3, "name": "Zürich\n"},
    {},
    {"loss": 1.5, "path": [0, 2, 1], "none": None, "text": "a3a6bf43 2 {}"},  # a record, if it ended its line
    {"last": True},
]
DEADLINE_S = 60


def unsynced(_: int) -> None:
    """Where no power is lost."""


@contextmanager
def opened(path: Path, sync: Callable[[int], None] = unsynced) -> Iterator[WriteAheadLog]:
    wal = WriteAheadLog(path, sync=sync)
    try:
        yield wal
    finally:
        wal.close()


def filled(path: Path, records: list[dict[str, Any]] = RECORDS) -> bytes:
    with opened(path) as wal:
        assert wal.records == []
        for record in records:
            wal.write(record)
    return path.read_bytes()


def found(path: Path) -> list[dict[str, Any]]:
    with opened(path) as wal:
        return wal.records


def test_layout(tmp_path: Path) -> None:
    content = filled(tmp_path / "journal", [{"a": "ü"}, {}])
    assert content == b'skippipe-journal 1\ne9d90f38 15 {"a": "\\u00fc"}\na3a6bf43 2 {}\n'


def test_cut_off_at_every_length(tmp_path: Path) -> None:
    whole = filled(tmp_path / "whole")
    ends = [at + 1 for at, byte in enumerate(whole) if byte == ord("\n")]
    path = tmp_path / "journal"
    for length in range(len(whole) + 1):
        path.write_bytes(whole[:length])
        there = sum(end <= length for end in ends[1:])
        with opened(path) as wal:
            assert wal.records == RECORDS[:there]
            wal.write({"more": length})
        assert found(path) == [*RECORDS[:there], {"more": length}]


def test_zeros_where_a_record_was_to_be(tmp_path: Path) -> None:
    """Some file systems remember the length of what was written before they have the bytes."""
    path = tmp_path / "journal"
    whole = filled(path)
    for room in (1, 100, 5000):
        path.write_bytes(whole + bytes(room))
        assert found(path) == RECORDS
        assert path.read_bytes() == whole
    path.write_bytes(bytes(len(HEADER)))
    assert found(path) == []
    path.write_bytes(bytes(len(whole)))  # that was no header
    with pytest.raises(UserError, match="no journal, or its first line is damaged"):
        found(path)


def test_every_flipped_bit_is_noticed(tmp_path: Path) -> None:
    whole = filled(tmp_path / "whole")
    path = tmp_path / "journal"
    last = whole.rindex(b"\n", 0, -1) + 1
    refused = 0
    for at in range(len(whole)):
        for bit in range(8):
            damaged = whole[:at] + bytes([whole[at] ^ 1 << bit]) + whole[at + 1 :]
            path.write_bytes(damaged)
            try:
                records = found(path)
            except UserError as error:
                refused += 1
                line = whole.count(b"\n", 0, at) + 1
                assert str(path) in str(error) and (line == 1 or f"line {line} is damaged" in str(error))
                assert path.read_bytes() == damaged  # for a person to look at
            else:
                assert at >= last and records == RECORDS[:-1]
    assert refused == 8 * last


def test_lost_bytes_in_the_middle_are_noticed(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    whole = filled(path)
    last = whole.rindex(b"\n", 0, -1) + 1
    for start in range(len(HEADER), last):
        path.write_bytes(whole[:start] + whole[start + 1 :])
        with pytest.raises(UserError, match=r"damaged.*keep its first \d+ lines only"):
            found(path)


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"skippipe-journal 2\n{}\n", "this is a 'skippipe-journal 2'; this release reads version 1"),
        (b"a shopping list, and a long one\n", "this is no journal"),
    ],
)
def test_other_files_are_left_alone(tmp_path: Path, content: bytes, complaint: str) -> None:
    path = tmp_path / "journal"
    path.write_bytes(content)
    with pytest.raises(UserError, match=complaint):
        found(path)
    assert path.read_bytes() == content


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=10,
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow], deadline=None)
@given(st.lists(st.dictionaries(st.text(), json_values, max_size=4), max_size=4))
def test_any_records_and_back(tmp_path: Path, records: list[dict[str, Any]]) -> None:
    path = tmp_path / "journal"
    path.unlink(missing_ok=True)
    filled(path, records)
    assert found(path) == records


def test_what_json_cannot_say_is_not_written(tmp_path: Path) -> None:
    with opened(tmp_path / "journal") as wal:
        wal.write({"a": 1})
        with pytest.raises(ValueError, match="not JSON compliant"):
            wal.write({"loss": float("nan")})
        with pytest.raises(ValueError, match="not JSON compliant"):
            wal.rewrite([{"loss": float("inf")}])
        wal.write({"b": 2})
    assert found(tmp_path / "journal") == [{"a": 1}, {"b": 2}]


# Durability


def test_synced_before_write_returns(tmp_path: Path) -> None:
    path, seen = tmp_path / "deep" / "er" / "journal", list[bytes]()
    with opened(path, lambda _: seen.append(path.read_bytes())) as wal:
        assert seen == [HEADER]
        wal.write({"a": 1})
        assert len(seen) == 2 and seen[-1].endswith(b'{"a": 1}\n')
    with opened(path, lambda _: seen.append(path.read_bytes())):
        assert len(seen) == 3  # a killed predecessor may have written what it did not sync


WRITER = """
import sys
from pathlib import Path
from skippipe.runs.wal import WriteAheadLog
journal = WriteAheadLog(Path(sys.argv[1]))
for number in range(10**9):
    journal.write({"number": number, "padding": "x" * (number * 37 % 5000)})
    print(number, flush=True)
"""


def test_killed_writer_loses_nothing_it_reported(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    for reports in (1, 40, 200):
        path.unlink(missing_ok=True)
        with subprocess.Popen([sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE) as writer:
            assert writer.stdout is not None
            for _ in range(reports):
                writer.stdout.readline()
            writer.send_signal(signal.SIGKILL)
            *_, last = [reports - 1, *map(int, writer.stdout.read().split())]  # what it said before it died
            writer.wait(DEADLINE_S)
        numbers = [record["number"] for record in found(path)]
        assert numbers == list(range(len(numbers))) and last < len(numbers) <= last + 2


def in_child(task: Callable[[], None]) -> int:
    """The exit status of a forked process in which the task ends well or not."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            task()
            status = 0
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_full_disk_leaves_what_was_written(tmp_path: Path) -> None:
    path = tmp_path / "journal"

    def fill() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))  # a write across it is cut short, the next one fails
        with opened(path) as wal:
            for number in range(3):
                wal.write({"number": number})
            before = path.read_bytes()
            too_long = {"long": "x" * 2000}
            changes = (partial(wal.write, too_long), partial(wal.rewrite, [too_long]))
            for change in changes:
                with pytest.raises(OSError) as caught:
                    change()
                assert caught.value.errno == errno.EFBIG
                assert path.read_bytes() == before and list(tmp_path.iterdir()) == [path]
            wal.write({"number": 3})

    assert in_child(fill) == 0
    assert [record["number"] for record in found(path)] == [0, 1, 2, 3]


def test_a_failed_sync_takes_the_record_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, failing = tmp_path / "journal", list[bool]()

    def sync(_: int) -> None:
        if failing:
            raise OSError(errno.EIO, "broken")

    def truncate(_: int, __: int) -> None:
        raise OSError(errno.EIO, "broken")

    with opened(path, sync) as wal:
        wal.write({"a": 1})
        before = path.read_bytes()
        failing.append(True)
        with pytest.raises(OSError, match="broken"):
            wal.write({"b": 2})
        assert path.read_bytes() == before
        with monkeypatch.context() as patched:  # and if it cannot be taken back, nothing goes behind it
            patched.setattr(os, "ftruncate", truncate)
            for _ in range(2):
                with pytest.raises(OSError, match="broken"):
                    wal.write({"c": 3})
                assert path.read_bytes().count(b'{"c"') == 1
        failing.clear()
        wal.write({"d": 4})
    assert found(path) == [{"a": 1}, {"d": 4}]


# Rewriting


def test_rewrite(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    filled(path)
    with opened(path) as wal:
        wal.rewrite([*RECORDS[:1], {"rest": 3}])
        wal.write({"more": 1})
        with pytest.raises(UserError, match="another coordinator"):
            WriteAheadLog(path)
    assert found(path) == [*RECORDS[:1], {"rest": 3}, {"more": 1}]


@pytest.mark.parametrize("step", ["write", "sync", "rename", "folder"])
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_rewrite_killed_at_each_step(tmp_path: Path, step: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path, new = tmp_path / "journal", [{"new": 1}]
    filled(path)

    def die(*_: Any) -> Any:
        os.kill(os.getpid(), signal.SIGKILL)

    def rewrite() -> None:
        with opened(path, unsynced) as wal:
            if step == "sync":
                wal._sync = die
            elif step == "rename":
                monkeypatch.setattr(Path, "replace", die)
            else:
                monkeypatch.setattr(os, {"write": "pwrite", "folder": "fsync"}[step], die)
            wal.rewrite(new)

    assert in_child(rewrite) == -signal.SIGKILL
    assert (tmp_path / "journal.partial").exists() == (step != "folder")
    assert found(path) == (new if step == "folder" else RECORDS)
    assert not (tmp_path / "journal.partial").exists()


def test_rewrite_follows_a_link(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "journal")
    filled(tmp_path / "link")
    with opened(tmp_path / "link") as wal:
        wal.rewrite([{"a": 1}])
    assert (tmp_path / "link").is_symlink() and found(tmp_path / "journal") == [{"a": 1}]


# The lock


def test_one_at_a_time(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    with opened(path) as wal:
        wal.write({"a": 1})
        with pytest.raises(UserError, match=rf"{path}: another coordinator has it open; end that one first"):
            WriteAheadLog(path)
        wal.write({"b": 2})
    with pytest.raises(OSError, match="Bad file descriptor"):
        wal.write({"c": 3})
    assert found(path) == [{"a": 1}, {"b": 2}]


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_child_does_not_keep_the_lock(tmp_path: Path) -> None:
    """Nodes that a dead coordinator has left behind must not keep the next one out."""
    path = tmp_path / "journal"
    waits, says = os.pipe()
    is_up, comes_up = os.pipe()
    with opened(path) as wal:
        wal.write({"a": 1})
        child = os.fork()
        if child == 0:
            os.close(says)
            os.write(comes_up, b"!")
            os.read(waits, 1)  # until the parent ends or closes its end
            os._exit(0)
        os.read(is_up, 1)
    try:
        assert found(path) == [{"a": 1}]
    finally:
        for end in (says, waits, is_up, comes_up):
            os.close(end)
        assert os.waitpid(child, 0)[1] == 0


def test_a_journal_that_was_taken_away_is_not_written_to(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    with opened(path) as wal:
        path.rename(tmp_path / "elsewhere")
        for _ in range(2):
            with pytest.raises(OSError, match="moved or replaced"):
                wal.write({"a": 1})
            path.write_bytes(HEADER)
    assert found(tmp_path / "elsewhere") == []


def test_bad_places(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path in (tmp_path, tmp_path / "file" / "journal"):
        with pytest.raises(UserError, match=rf"^{path}: cannot be opened: "):
            WriteAheadLog(path)
