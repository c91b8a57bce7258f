"""Writing to a disk that may be full: nothing of a run is lost because of it, and each warning is given once.

Lines wait in memory until they can be written. The model goes to the output folder; if it cannot, to the rescue folder;
if there is none, the coordinator keeps the weights and tries again. Before a run starts, there must be room for all
that it will write.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from skippipe.errors import UserError
from skippipe.report.summary import scaled
from skippipe.runtime.coordinator.interfaces import WriteFailed

if TYPE_CHECKING:
    from skippipe.checkpoint.hf_export import ModelFolder  # and with it torch

log = logging.getLogger(__name__)

Rescue = Callable[[], Path | None]
"""The folder to write to if the output folder cannot be written; None: there is none."""


class WriteFailures:
    """Warns once of each file that cannot be written, with advice, and once more when it can be written again."""

    def __init__(self) -> None:
        self._failing: set[str] = set()

    @contextmanager
    def tolerated(self, what: object, meanwhile: str) -> Iterator[None]:
        """Log a failure to write instead of raising it; `meanwhile` says what it means for the run."""
        try:
            yield
        except (OSError, UserError) as error:
            self.failed(what, error, meanwhile)
        else:
            self.works(what)

    def failed(self, what: object, error: Exception, meanwhile: str) -> None:
        if str(what) not in self._failing:
            self._failing.add(str(what))
            log.warning("%s: cannot be written: %s; %s; make room, or mend it", what, reason(error), meanwhile)

    def works(self, what: object) -> None:
        if str(what) in self._failing:
            self._failing.discard(str(what))
            log.warning("%s: can be written again", what)


def reason(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


class LineFile:
    """A file that grows by lines. Lines that cannot be written wait in memory, and are written in order later."""

    def __init__(self, path: Path, kept_bytes: int = 0) -> None:
        """The file is cut off after `kept_bytes`."""
        self.path = path
        self._failures = WriteFailures()
        self._file: FileIO | None = None
        self._written = kept_bytes
        self._waiting = b""
        self._write()

    @property
    def size(self) -> int:
        """Bytes of the file, with the lines that wait."""
        return self._written + len(self._waiting)

    def add(self, line: str) -> None:
        self._waiting += line.encode() + b"\n"
        self._write()

    def cut(self, size: int) -> None:
        """Cut the file to this size; it takes effect with the next line."""
        self._waiting = self._waiting[: max(0, size - self._written)]
        if size < self._written:
            self._written, self._file = size, None  # opened anew, and cut, when there is something to write

    def _write(self) -> None:
        with self._failures.tolerated(self.path, "its lines wait in memory"):
            if self._file is None:
                file = FileIO(os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666), "w")
                file.truncate(self._written)
                file.seek(self._written)
                self._file = file
            while self._waiting:
                count = self._file.write(self._waiting)
                self._written, self._waiting = self._written + count, self._waiting[count:]


@dataclass(frozen=True)
class ModelStore:
    """The folder that the trained model is written to: `model` in the output folder, or in the rescue folder."""

    folder: ModelFolder
    rescue: Rescue
    ways: Callable[[], str]
    """What can still be done if the model cannot be written in the end."""

    @property
    def place(self) -> Path:
        return self.folder.folder

    def store(self, stage: int, number: int, piece: Any) -> None:
        """Take the next chunk of a stage; None ends it, and it is on disk. WriteFailed if not: then end it again."""
        try:
            self.folder.store(stage, number, piece)
        except (OSError, UserError) as error:
            if not self._store_elsewhere(stage, number, piece):
                raise WriteFailed(self._message(error), self.ways()) from None

    def _store_elsewhere(self, stage: int, number: int, piece: Any) -> bool:
        """Move all that there is to the rescue folder; whether that worked."""
        try:
            rescue = self.rescue()
            if rescue is None or rescue / self.place.name == self.place:
                return False
            self.folder.move(rescue / self.place.name)
            self.folder.store(stage, number, piece)
        except (OSError, UserError) as error:
            log.warning("--rescue: %s", error)
            return False
        log.warning("the output folder cannot be written: the model goes to %s", self.place)
        return True

    def _message(self, error: Exception) -> str:
        missing = in_bytes(self.folder.missing_bytes) if self.folder.missing_bytes else "the last files"
        free = free_bytes(self.place)
        there = "" if free is None else f", {in_bytes(free)} are free there"
        return f"{self.place}: {missing} of the model cannot be written: {reason(error)}{there}"


def in_bytes(count: float) -> str:
    number, unit = scaled(count, ("bytes", "kB", "MB", "GB", "TB"))
    return f"{number:.3g} {unit}"


def free_bytes(folder: Path) -> int | None:
    """Free bytes on the disk that a folder is, or will be, on; None: the file system does not say."""
    there = next((path for path in (folder, *folder.resolve().parents) if path.exists()), None)
    if there is None:
        return None
    found = os.statvfs(there)
    return found.f_bavail * found.f_frsize if found.f_blocks else None


def check_room(folder: Path, what: str, model_bytes: int, checkpoint_bytes: int, checkpoints: int) -> None:
    """UserError unless there is room for the model and this many more checkpoints."""
    free = free_bytes(folder)
    needed = model_bytes + checkpoint_bytes * checkpoints
    if free is not None and free < needed:
        kept = f" and {in_bytes(checkpoint_bytes)} for each of {checkpoints} checkpoints" if checkpoints else ""
        raise UserError(
            f"{what}: {folder} has {in_bytes(free)} free; {in_bytes(needed)} are needed, "
            f"{in_bytes(model_bytes)} for the model{kept}; make room, keep fewer checkpoints (checkpoint.keep), "
            "name a folder on another disk, or resume with --rescue DIR"
        )
