"""Checkpoints that another process reads are neither removed nor replaced meanwhile."""

from __future__ import annotations

import fcntl
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path

import pytest

from skippipe.checkpoint import format
from skippipe.checkpoint.format import MANIFEST, Checkpoints, Manifest, StoredFile, hold, verified
from skippipe.errors import UserError
from tests.helpers.processes import END_S, ProcessOutput

HOLDS = """
import sys
from pathlib import Path
from skippipe.checkpoint import format
from skippipe.checkpoint.format import MANIFEST, Checkpoints
print("holds", Checkpoints(Path(sys.argv[1])).hold_newest(), flush=True)
sys.stdin.read()
"""


@contextmanager
def newest_held_by_another_process(checkpoints: Checkpoints) -> Iterator[Path]:
    reader = subprocess.Popen(
        [sys.executable, "-c", HOLDS, str(checkpoints.folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert reader.stdout is not None
        yield Path(ProcessOutput(reader.stdout).says(r"holds (.+)")[1])
    finally:
        assert reader.stdin is not None
        reader.stdin.close()  # then it ends, and its locks with it
        reader.wait(END_S)


def commit(checkpoints: Checkpoints, iterations: int, content: bytes = b"weights") -> Path:
    place = checkpoints.begin()
    (place / "stage-0.weights.safetensors").write_bytes(content)
    file = StoredFile("stage-0.weights.safetensors", len(content), sha256(content).hexdigest())
    checkpoints.commit(place, Manifest(iterations, (1,), (iterations,), 0, "0" * 64, {}, (file,)))
    return checkpoints.folder / f"{iterations:06d}"


def content_of(place: Path) -> bytes:
    verified(place)
    return (place / "stage-0.weights.safetensors").read_bytes()


def names(checkpoints: Checkpoints) -> list[str]:
    return [each.name for each in checkpoints.complete()]


def test_one_that_is_read_is_removed_with_a_later_one(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=1)
    commit(checkpoints, 2)
    with newest_held_by_another_process(checkpoints) as place:
        commit(checkpoints, 4)
        assert names(checkpoints) == ["000004", "000002"]
        assert content_of(place) == b"weights"
    commit(checkpoints, 6)
    assert names(checkpoints) == ["000006"]
    assert not hold(place), "it is removed"


def test_one_with_as_many_iterations_is_replaced_unless_it_is_read(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    commit(checkpoints, 6, b"old")
    with newest_held_by_another_process(checkpoints) as place:
        with pytest.raises(OSError, match="000006 is there already, and another process reads it"):
            commit(checkpoints, 6, b"new")
        assert content_of(place) == b"old"
        assert commit(checkpoints, 8) == checkpoints.complete()[0], "the next one is not in the way"
    commit(checkpoints, 6, b"newer")
    assert content_of(place) == b"newer"
    assert names(checkpoints) == ["000008", "000006"]


def test_what_is_left_of_a_checkpoint_is_not_in_the_way(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    (tmp_path / "000006").mkdir()
    (tmp_path / "000006" / "stage-1.weights.safetensors").write_bytes(b"torn")
    place = commit(checkpoints, 6)
    assert [each.name for each in sorted(place.iterdir())] == ["manifest.json", "stage-0.weights.safetensors"]


def test_one_that_is_being_removed_is_waited_for_without_a_busy_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints = Checkpoints(tmp_path)
    commit(checkpoints, 2)
    manifest = commit(checkpoints, 4) / MANIFEST
    with manifest.open("rb") as removing:
        fcntl.flock(removing, fcntl.LOCK_EX)
        monkeypatch.setattr(format, "REMOVAL_TIMEOUT_S", 1.0)
        began_s = time.process_time()
        with pytest.raises(UserError, match=r"000004: a process has been removing it for 1 s"):
            checkpoints.hold_newest()
        assert time.process_time() - began_s < 0.5
        monkeypatch.setattr(format, "REMOVAL_TIMEOUT_S", END_S)
        with ThreadPoolExecutor(1) as pool:
            found = pool.submit(checkpoints.hold_newest)
            assert not wait([found], 0.2).done, "it waits for the end of the removal"
            manifest.unlink()
            assert found.result(END_S) == tmp_path / "000002"
