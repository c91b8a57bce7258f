"""The output folder of a run: its id, its lock, and what becomes of an earlier run in it.

    run/run.json    the id of the run, written before all else; every file of the run repeats it
    run/run.lock    locked (flock) by the process that trains there, whatever its engine; the lock ends with the process

A folder that holds a run is not trained into, unless the run is resumed or set aside. To set it aside, the whole folder
is renamed: nothing is ever deleted or mixed.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from skippipe.checkpoint.format import Checkpoints
from skippipe.errors import UserError
from skippipe.json_fields import json_text, write_text
from skippipe.runs.records import metrics_of
from skippipe.runs.tail import RUN_FILE, checkpoint_run_id, parse_object, read_object, run_id_of
from skippipe.runs.wal import FORMAT as JOURNAL_FORMAT
from skippipe.runs.wal import AlreadyLocked, checked_json, close_in_children, lock_file

FORMAT, VERSION = "skippipe-run", 1
LOCK_FILE = "run.lock"
LOCK_BYTES = 4096
"""Constant size of the lock file, so that a message to a waiting run fits into it even on a full disk."""
ID_BYTES = 8
WRITTEN = ("plan.json", "cluster.json", "metrics.jsonl", "events.jsonl", "journal")
FOLDERS = ("checkpoints", "model", "traces", "tensorboard")


class RunFolder:
    """An output folder that is locked by this process, from before anything is read until the run is over."""

    def __init__(self, path: Path, *, resumed: bool = False, force: bool = False, rescue: Path | None = None) -> None:
        """UserError if another process trains there, or if it holds what must not be overwritten."""
        self.path = path
        self._rescue = rescue
        self._rename_first = False
        make_folder(path)
        self._descriptor = _lock_folder(path)
        close_in_children(self)
        try:
            if resumed:
                self.run_id = run_id_of(path) or _id_without_run_file(path)
            else:
                self._rename_first = _needs_renaming(path, force)
                self.run_id = secrets.token_hex(ID_BYTES)
            if rescue is not None:
                self._check_rescue(rescue)
        except BaseException:
            self.release()
            raise

    def begin(self, reads: Iterable[Path] = ()) -> Path | None:
        """Write the id, before anything else. The new path of an earlier run's folder, if that had to be renamed.

        `reads`: files and folders that the new run needs.
        """
        aside = None
        if self._rename_first:
            aside = _rename_folder(self.path, reads)
            old, self._descriptor = self._descriptor, -1
            os.close(old)
            make_folder(self.path)
            self._descriptor = _lock_folder(self.path)
            self._rename_first = False
        _write_run_file(self.path, self.run_id)
        return aside

    def rescue(self) -> Path | None:
        """Where the model and the last checkpoint go if this folder cannot be written: as the run was started with, or
        as `set_rescue_folder` has set it since. It gets the run's id like this one."""
        found = _read_lock(self.path).get("rescue") or self._rescue
        if not found:
            return None
        folder = Path(found)
        self._check_rescue(folder)
        _write_run_file(folder, self.run_id)
        return folder

    def _check_rescue(self, folder: Path) -> None:
        make_folder(folder, "--rescue")
        if folder.resolve() == self.path.resolve():
            raise UserError(f"--rescue: {folder} is the output folder; name one on another disk")
        if run_id_of(folder) not in (None, self.run_id):
            raise UserError(f"--rescue: {folder} holds another run; name another folder")

    def release(self) -> None:
        """Let other processes train there. If nothing was written, nothing is left behind."""
        with suppress(OSError):
            if self._descriptor >= 0 and not _is_run(self.path):
                (self.path / LOCK_FILE).unlink()
        self.close()

    def close(self) -> None:
        """Close the lock file; if this is a forked child, its parent keeps the lock."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)


@contextmanager
def open_run_folder(
    path: Path, *, resumed: bool = False, force: bool = False, rescue: Path | None = None
) -> Iterator[RunFolder]:
    folder = RunFolder(path, resumed=resumed, force=force, rescue=rescue)
    try:
        yield folder
    finally:
        folder.release()


def set_rescue_folder(path: Path, rescue: Path) -> int | None:
    """Give a running run a rescue folder; its process, None if no run is going on there."""
    try:
        descriptor = lock_file(path / LOCK_FILE) if (path / LOCK_FILE).exists() else -1
    except AlreadyLocked:
        make_folder(rescue, "--rescue")
        content = {**_read_lock(path), "rescue": str(rescue.resolve())}
        with (path / LOCK_FILE).open("r+b", buffering=0) as file:
            file.write(_padded(content))
        return int(content.get("process", 0))
    if descriptor >= 0:
        os.close(descriptor)
    return None


def make_folder(folder: Path, what: str = "output") -> None:
    """Make a folder, if there is none; UserError if that is impossible."""
    try:
        if folder.exists() and not folder.is_dir():
            raise UserError(f"{what}: {folder} is a file; name a folder")
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{what}: {folder} cannot be made: {error.strerror or error}") from None


def _lock_folder(folder: Path) -> int:
    try:
        descriptor = lock_file(folder / LOCK_FILE)
        os.pwrite(descriptor, _padded({"process": os.getpid(), "machine": socket.gethostname()}), 0)
    except AlreadyLocked:
        found = _read_lock(folder)
        who = f" (process {found['process']} of {found.get('machine', '?')})" if "process" in found else ""
        raise UserError(
            f"output: a run is going on in {folder}{who}; wait for its end, or name another output folder"
        ) from None
    except OSError as error:
        raise UserError(f"output: {folder} cannot be written: {error.strerror or error}") from None
    return descriptor


def _padded(content: dict[str, Any]) -> bytes:
    text = json.dumps(content).encode()
    if len(text) >= LOCK_BYTES:
        raise UserError("--rescue: this name is too long")
    return text.ljust(LOCK_BYTES - 1) + b"\n"


def _read_lock(folder: Path) -> dict[str, Any]:
    return read_object(folder / LOCK_FILE) or {}


def _write_run_file(folder: Path, run_id: str) -> None:
    if run_id and run_id_of(folder) != run_id:
        content = {"format": FORMAT, "version": VERSION, "id": run_id, "begun": round(time.time(), 3)}
        write_text(folder / RUN_FILE, json_text(content) + "\n")


def _id_without_run_file(folder: Path) -> str:
    """The id of a resumed run without `run.json`: that of its newest checkpoint, or of its journal; empty for a run
    from before there were ids."""
    for place in Checkpoints(folder / "checkpoints").complete():
        found = checkpoint_run_id(place)
        if found is not None:
            return found
    texts = filter(None, map(checked_json, _lines(folder / "journal")))
    return journal_run_id(filter(None, map(parse_object, texts)))


def journal_run_id(records: Iterable[dict[str, Any]]) -> str:
    """The id of the run that wrote these records; empty: it had none."""
    first = next(iter(records), {})
    return str(first.get("run", ""))


def _lines(path: Path) -> list[bytes]:
    """The lines of a file; none if it cannot be read."""
    try:
        return path.read_bytes().split(b"\n")
    except OSError:
        return []


def _is_run(folder: Path) -> bool:
    """Has a run written to this folder?"""
    journal = next(iter(_lines(folder / "journal")), b"")
    known = journal.startswith(JOURNAL_FORMAT.encode()) or (folder / RUN_FILE).exists() or bool(_iterations(folder))
    return known or bool(Checkpoints(folder / "checkpoints").complete())


def _iterations(folder: Path) -> int:
    """Iterations that metrics.jsonl has."""
    found = map(metrics_of, reversed(_lines(folder / "metrics.jsonl")))
    return next((each.row.iteration + 1 for each in found if each is not None), 0)


def _progress_text(folder: Path) -> str:
    """How far the run in a folder has come, in words; empty: it did nothing that could be lost."""
    checkpoints = Checkpoints(folder / "checkpoints").complete()
    done = max([_iterations(folder), *(int(place.name) for place in checkpoints[:1])])
    if done:
        return f"{done} iteration{'s' * (done > 1)} on"
    return "with a model" if (folder / "model" / "config.json").exists() else ""


def _needs_renaming(folder: Path, force: bool) -> bool:
    """Does the folder hold a run that is to be renamed? UserError if it must not be touched."""
    if not _is_run(folder):
        _check_foreign_files(folder)
        return False
    done = _progress_text(folder)
    if done and not force:
        raise UserError(
            f"output: {folder} holds a run, {done}; --resume goes on with it, --force sets it aside whole and begins "
            "anew; or name another output folder"
        )
    return bool(done)


def _check_foreign_files(folder: Path) -> None:
    """UserError if other files have the names of a run's files."""
    plans = sorted(path.name for path in folder.glob("plan-*.json"))
    taken = [name for name in (*WRITTEN, *plans) if (folder / name).exists()]
    occupied = (path for path in map(folder.joinpath, FOLDERS) if path.exists())
    taken += [path.name for path in occupied if not path.is_dir() or any(path.iterdir())]
    if taken:
        raise UserError(
            f"output: {folder} holds no run, but {', '.join(taken)}, which a run would overwrite; move that away, or "
            "name another output folder"
        )


def _rename_folder(folder: Path, reads: Iterable[Path]) -> Path:
    """Rename the folder, so that it lies beside the new one; gives its new path."""
    whole = folder.resolve()
    for path in (Path.cwd(), *reads):
        if path.resolve().is_relative_to(whole):
            raise UserError(f"--force: {path} lies in {folder}, which is to be set aside; put it elsewhere")
    stamp = time.strftime("%Y%m%d-%H%M%S")
    names = (f"{whole.name}.old-{stamp}{suffix}" for suffix in ("", *(f"-{number}" for number in range(2, 100))))
    aside = next(whole.with_name(name) for name in names if not whole.with_name(name).exists())
    try:
        whole.rename(aside)
    except OSError as error:
        raise UserError(
            f"--force: {folder} cannot be renamed to {aside.name}: {error.strerror or error}; move its content "
            "yourself, or name another output folder"
        ) from None
    return folder.with_name(aside.name) if folder.name == whole.name else aside
