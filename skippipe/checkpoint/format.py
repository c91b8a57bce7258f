"""Checkpoints: weights and optimizer state of every stage on disk, or nothing.

A checkpoint is a folder. Every stage has two safetensors files, one with its weights under the names they have in the
whole model and one with the optimizer's tensors under the same names, so that a plan with other stages can resume from
it. A run that trains adapters stores those alone; the weights that they are for lie beside (`adapters`).
The manifest names every file with its size and SHA-256 and is written last, after everything else has reached the
disk: a folder without one, or with a file that does not match, is no checkpoint, and the one before is used.

    checkpoints/000100/stage-0.weights.safetensors     after 100 iterations
    checkpoints/000100/stage-0.optimizer.safetensors
    checkpoints/000100/manifest.json

The manifest also has the id of the run: a checkpoint of another run in the same folder, however it came there, is
neither resumed from nor removed.

Chunks go to disk as soon as nodes send them: in safetensors, data lies in the order of its header, and a stage's flat
tensors have that very order.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import logging
import os
import re
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from hashlib import file_digest, sha256
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, BinaryIO

from skippipe.codecs import Buffer
from skippipe.errors import UserError
from skippipe.json_fields import Fields, fsync_path, json_text, read_as
from skippipe.model.lora import LoraConfig
from skippipe.model.model_files import check_plain_name
from skippipe.optim import DEFAULT, OPTIMIZERS
from skippipe.optim.interface import STORED_BYTES, Optimizer, ParamSlot
from skippipe.runs.tail import belongs_to, checkpoint_run_id, run_id_of
from skippipe.toml_config import from_table
from skippipe.value_ranges import COUNT, SEED

if TYPE_CHECKING:
    from torch import Tensor

log = logging.getLogger(__name__)

FORMAT, VERSION = "skippipe-checkpoint", 1
MANIFEST = "manifest.json"
UNFINISHED = "unfinished"
REMOVAL_TIMEOUT_S = 10.0  # for a checkpoint that is being removed to be gone
REMOVAL_POLL_S = 0.02


def run_field(run_id: str) -> dict[str, str]:
    """The id of a run as a field of its files; none for a run from before there were ids."""
    return {"run": run_id} if run_id else {}


def save_tensors(tensors: Mapping[str, Tensor], path: Path, metadata: Mapping[str, str]) -> None:
    """Write a safetensors file, whole and down to the disk, with the rights that any new file has: the library makes it
    readable by its owner alone. OSError if it cannot be written; then one that was there stays as it is."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    partial = path.with_name(path.name + ".partial")
    try:
        partial.touch()
        mode = partial.stat().st_mode
        save_file(dict(tensors), partial, dict(metadata))
        if partial.stat().st_mode != mode:  # where all files have the same rights, they cannot be changed either
            partial.chmod(mode)
        fsync_path(partial)
        partial.replace(path)
    except (SafetensorError, OSError) as error:
        partial.unlink(missing_ok=True)  # others need the room
        if isinstance(error, OSError):
            raise
        number = re.search(r"os error (\d+)", str(error))  # of the system, in the words of the library
        code = int(number[1]) if number else 0
        raise OSError(code, os.strerror(code) if code else str(error), str(path)) from None


@dataclass(frozen=True)
class StoredFile:
    """A file of a checkpoint, as it was written."""

    name: str
    size: Annotated[int, COUNT]
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint holds, and the run and model that it is of."""

    iterations: Annotated[int, COUNT]
    """Iterations that are done, and so the number of the one that training resumes with."""
    layers: tuple[int, ...]
    """Layers of each stage."""
    steps: tuple[int, ...]
    """Steps that each stage's optimizer has taken."""
    seed: Annotated[int, SEED]
    data: str
    """Fingerprint of the token file."""
    config: dict[str, Any]
    """Configuration of the model, as Hugging Face writes it."""
    files: tuple[StoredFile, ...]
    run: str = ""
    """The id of the run; empty: it was made before runs had one."""
    optimizer: str = DEFAULT
    """The name of the optimizer whose state it holds."""
    validation_loss: float | None = None
    """The held-out loss of these weights; None: it was not evaluated."""
    lora: LoraConfig = field(default_factory=LoraConfig)
    """LoRA's adapters: with a rank, they are all that it holds of the model."""
    bridges: Annotated[int, COUNT] = 0
    """Rank of the bridges that were trained with the stages; 0: there are none."""
    adapters: Annotated[int, COUNT] = 0
    """Rank of the adapters for missing stages: with one, they and the bridges are all that it holds of the model."""
    repeats: Annotated[int, COUNT] = 0
    """Stages that a stage takes the place of at most, of those that are missing after it."""

    @property
    def trains_adapters(self) -> bool:
        """Whether the model's own weights are not trained, and lie beside the checkpoints."""
        return self.lora.rank > 0 or self.adapters > 0

    def to_json(self) -> dict[str, Any]:
        """A run without an id, the default optimizer, an unknown loss, no adapters and no bridges are left out, as
        earlier versions wrote none of them."""
        left_out = {
            "run": "", "optimizer": DEFAULT, "validation_loss": None, "lora": asdict(LoraConfig()), "bridges": 0,
            "adapters": 0, "repeats": 0,
        }  # fmt: skip
        found = {**vars(self), "lora": asdict(self.lora)}
        fields = {name: value for name, value in found.items() if name not in left_out or left_out[name] != value}
        return {"format": FORMAT, "version": VERSION, **fields, "files": [vars(file) for file in self.files]}

    @classmethod
    def from_json(cls, value: Any) -> Manifest:
        fields = Fields(value, "")
        fields.header(FORMAT, VERSION)
        manifest = from_table(cls, fields.rest())
        for file in manifest.files:
            check_plain_name(file.name, "files")
        return manifest


@dataclass(frozen=True)
class CheckpointOrigin:
    """A checkpoint to resume from."""

    place: Path
    manifest: Manifest


class StageWriter:
    """Writes the weights and the optimizer state of one stage, in order and piece by piece as they come."""

    def __init__(
        self,
        folder: Path,
        stage: int,
        weights: Sequence[ParamSlot],
        optimizer: type[Optimizer] = OPTIMIZERS[DEFAULT],
        run_id: str = "",
    ) -> None:
        slots = optimizer.state_slots(weights)
        self._weights_bytes = STORED_BYTES * sum(slot.size for slot in weights)
        self._bytes = STORED_BYTES * sum(slot.size for slot in slots)
        self._files = [
            _StreamedFile(folder / f"stage-{stage}.weights.safetensors", weights, run_id),
            _StreamedFile(folder / f"stage-{stage}.optimizer.safetensors", slots[len(weights) :], run_id),
        ]
        self._written = 0

    def write(self, piece: Buffer) -> None:
        """Write the next piece, which may hold the end of the weights and the beginning of the optimizer state."""
        whole = memoryview(piece)
        weights = max(0, min(len(whole), self._weights_bytes - self._written))
        for file, part in zip(self._files, (whole[:weights], whole[weights:]), strict=True):
            if len(part):
                file.write(part)
        self._written += len(whole)

    def finish(self) -> list[StoredFile]:
        if self._written != self._bytes:
            raise UserError(f"{self._written:,} bytes of a stage came instead of {self._bytes:,}")
        return [file.finish() for file in self._files]

    def abandon(self) -> None:
        for file in self._files:
            file.close()


class _StreamedFile:
    """A safetensors file whose header is known and whose data is still coming."""

    def __init__(self, path: Path, slots: Sequence[ParamSlot], run_id: str) -> None:
        header: dict[str, Any] = {"__metadata__": {"format": "pt", **run_field(run_id)}}
        start = 0
        for slot in slots:
            end = start + STORED_BYTES * slot.size
            header[slot.name] = {"dtype": "F32", "shape": list(slot.shape), "data_offsets": [start, end]}
            start = end
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        self._path = path
        self._hash = sha256()
        self._size = 0
        self._file = path.open("wb")
        self.write(len(text).to_bytes(8, "little") + text)

    def write(self, block: Buffer) -> None:
        self._file.write(block)
        self._hash.update(block)
        self._size += len(block)

    def finish(self) -> StoredFile:
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        return StoredFile(self._path.name, self._size, self._hash.hexdigest())

    def close(self) -> None:
        self._file.close()


@dataclass(frozen=True)
class Checkpoints:
    """The checkpoints of a run, in one folder; the newest few are kept, and the one with the lowest held-out loss."""

    folder: Path
    keep: int = 2
    run_id: str | None = None
    """Checkpoints of other runs than this are neither read nor removed; None: those of any run are."""

    @classmethod
    def of_run(cls, output: Path) -> Checkpoints:
        """The checkpoints of the run whose output folder this is."""
        return cls(output / "checkpoints", run_id=run_id_of(output))

    def begin(self) -> Path:
        """An empty folder for a new checkpoint; what is left of an earlier attempt is removed."""
        place = self.folder / UNFINISHED
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir(parents=True)
        return place

    def commit(self, unfinished: Path, manifest: Manifest) -> None:
        """Make it a checkpoint in place of one with as many iterations, and remove the oldest ones of the run beyond
        those that are kept. OSError if a process holds the one with as many iterations: that one stays."""
        place = self.folder / f"{manifest.iterations:06d}"
        if place in self.others():
            raise FileExistsError(errno.EEXIST, "is a checkpoint of another run; move it away", str(place))
        (unfinished / MANIFEST).write_text(json_text(manifest.to_json()) + "\n", encoding="utf-8")
        fsync_path(unfinished / MANIFEST)
        fsync_path(unfinished)
        if not _remove(place):
            raise OSError(errno.EBUSY, f"{place.name} is there already, and another process reads it", str(place))
        unfinished.rename(place)
        fsync_path(self.folder)
        best = self.best()
        for old in self.complete()[self.keep :]:
            if best is None or old != best.place:
                _remove(old)

    def hold_newest(self) -> Path | None:
        """The newest checkpoint of the run, which is not removed until this process ends; None: there is none."""
        return _held_one(lambda: next(iter(self.complete()), None))

    def hold_best(self) -> CheckpointOrigin | None:
        """`best`, which is not removed until this process ends."""
        place = _held_one(lambda: best.place if (best := self.best()) else None)
        return CheckpointOrigin(place, read_manifest(place)) if place else None

    def complete(self) -> list[Path]:
        """Checkpoints of the run that have a manifest, newest first."""
        return [place for place in self._all() if belongs_to(self.run_id, checkpoint_run_id(place))]

    def best(self) -> CheckpointOrigin | None:
        """The checkpoint with the lowest held-out loss, the newest of several; None: no loss is known of any."""
        found: list[tuple[float, CheckpointOrigin]] = []
        for place in self.complete():
            with contextlib.suppress(UserError):  # one that cannot be read is reported where it is needed
                manifest = read_manifest(place)
                if manifest.validation_loss is not None:
                    found.append((manifest.validation_loss, CheckpointOrigin(place, manifest)))
        return min(found, key=lambda each: each[0])[1] if found else None

    def others(self) -> list[Path]:
        """Checkpoints of other runs in the folder, newest first."""
        return [place for place in self._all() if not belongs_to(self.run_id, checkpoint_run_id(place))]

    def warn_of_others(self) -> None:
        """Name the checkpoints that are ignored: the user may have put them there on purpose."""
        for place in self.others():
            log.warning("%s: is of another run than %s, and is ignored", place, self.folder.parent)

    def _all(self) -> list[Path]:
        if not self.folder.is_dir():
            return []
        found = [path for path in self.folder.iterdir() if path.name.isdigit() and (path / MANIFEST).is_file()]
        return sorted(found, key=lambda path: int(path.name), reverse=True)

    def newest_sound(self) -> CheckpointOrigin | None:
        """The newest checkpoint of the run whose files are as they were written; a warning for each that is not."""
        self.warn_of_others()
        for place in self.complete():
            try:
                return CheckpointOrigin(place, verified(place))
            except UserError as error:
                log.warning("%s; the checkpoint before it is used", error)
        return None


_held: dict[Path, BinaryIO] = {}
"""Checkpoints that this process reads → their manifests, which it has locked."""


def hold(place: Path) -> bool:
    """Keep a run that is going on from removing the checkpoint until this process ends. False: it is removed, or a
    process is about to."""
    if place in _held:
        return True
    try:
        manifest = (place / MANIFEST).open("rb")
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(manifest, fcntl.LOCK_SH | fcntl.LOCK_NB)
        found = os.fstat(manifest.fileno()).st_nlink > 0
    except BlockingIOError:
        found = False
    except OSError:  # a file system without locks
        found = True
    if found:
        _held[place] = manifest
    else:
        manifest.close()
    return found


def _held_one(choose: Callable[[], Path | None]) -> Path | None:
    """The checkpoint that is chosen, and held; if it is removed just then, another is chosen. None: there is none."""
    deadline = time.monotonic() + REMOVAL_TIMEOUT_S
    while (place := choose()) is not None and not hold(place):
        if time.monotonic() > deadline:
            raise UserError(
                f"{place}: a process has been removing it for {REMOVAL_TIMEOUT_S:g} s; see whether the run there "
                "hangs, or name another checkpoint"
            )
        time.sleep(REMOVAL_POLL_S)  # the end of a removal is not reported
    return place


def _remove(place: Path) -> bool:
    """Remove a checkpoint, or what is left of one; False if a process holds it: then it goes with a later one."""
    with contextlib.suppress(FileNotFoundError), (place / MANIFEST).open("rb") as manifest:
        try:
            fcntl.flock(manifest, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError:  # a file system without locks
            pass
        (place / MANIFEST).unlink()  # first it stops being a checkpoint
    shutil.rmtree(place, ignore_errors=True)
    return True


def read_manifest(place: Path) -> Manifest:
    return read_as(Manifest.from_json, place / MANIFEST)


def verified(place: Path) -> Manifest:
    """The manifest of a checkpoint; UserError unless every file is as it was written."""
    manifest = read_manifest(place)
    with ThreadPoolExecutor(os.cpu_count()) as threads:  # nodes wait for it where a run goes on or its model grows
        for _ in threads.map(lambda file: check_file(place, file), manifest.files):
            pass
    return manifest


def check_file(place: Path, file: StoredFile) -> None:
    """UserError unless it is as it was written."""
    path = place / file.name
    if Path(file.name).name != file.name or not path.is_file():
        raise UserError(f"{path}: missing")
    if path.stat().st_size != file.size:
        raise UserError(f"{path}: {path.stat().st_size:,} bytes instead of {file.size:,}")
    with path.open("rb") as opened:
        digest = file_digest(opened, "sha256").hexdigest()
    if digest != file.sha256:
        raise UserError(f"{path}: its content is not what was written")
