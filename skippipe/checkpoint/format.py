"""Checkpoints: weights and optimizer state of every stage on disk, or nothing.

A checkpoint is a folder. Every stage has two safetensors files, one with its weights under the names they have in the
whole model and one with Adam's two means under the same names, so that another plan with other stages can take it up.
The manifest names every file with its size and SHA-256 and is written last, after everything else has reached the
disk: a folder without one, or with a file that does not match, is no checkpoint, and the one before is used.

    checkpoints/000100/stage-0.weights.safetensors     after 100 iterations
    checkpoints/000100/stage-0.optimizer.safetensors
    checkpoints/000100/manifest.json

The manifest also has the id of the run: a checkpoint of another run in the same folder, however it came there, is
neither gone on from nor removed.

Pieces come in as the nodes send them and go to disk at once: in safetensors, data lies in the order of its header, and
a stage's flat tensor has that very order.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from skippipe.codecs import Buffer
from skippipe.errors import UserError
from skippipe.json_fields import Fields, json_text, read_as
from skippipe.model.flat_params import ParamSlot
from skippipe.model.model_files import check_plain_name
from skippipe.runs.tail import checkpoint_run_id, is_of, run_id_of

log = logging.getLogger(__name__)

FORMAT, VERSION = "skippipe-checkpoint", 1
MANIFEST = "manifest.json"
UNFINISHED = "unfinished"
PARTS = ("weights", "mean", "square")
"""What a node sends, one after another, each as long as the stage's flat tensor."""
MEANS = {"mean": "exp_avg", "square": "exp_avg_sq"}
BYTES = 4


@dataclass(frozen=True)
class StoredFile:
    name: str
    size: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint holds, and what it belongs to."""

    iterations: int
    """So many steps were taken; training goes on with the iteration of this number."""
    layers: tuple[int, ...]
    """Of each stage."""
    steps: tuple[int, ...]
    """Of each stage's optimizer."""
    seed: int
    data: str
    """Fingerprint of the token file."""
    config: dict[str, Any]
    """Of the model."""
    files: tuple[StoredFile, ...]
    run: str = ""
    """The id of the run; empty: it was made before runs had one."""

    def to_json(self) -> dict[str, Any]:
        fields = {name: value for name, value in vars(self).items() if name != "run" or value}
        return {"format": FORMAT, "version": VERSION, **fields, "files": [vars(file) for file in self.files]}

    @classmethod
    def from_json(cls, value: Any) -> Manifest:
        fields = Fields(value, "")
        fields.header(FORMAT, VERSION)
        files = []
        for each in fields.objects("files"):
            files.append(StoredFile(each.text("name"), each.integer("size"), each.text("sha256")))
            check_plain_name(files[-1].name, each.at("name"))
            each.close()
        config = fields.take("config")
        if not isinstance(config, dict):
            raise UserError("config: expected an object")
        manifest = cls(
            iterations=fields.integer("iterations"),
            layers=tuple(fields.items("layers")),
            steps=tuple(fields.items("steps")),
            seed=fields.integer("seed"),
            data=fields.text("data"),
            config=config,
            files=tuple(files),
            run=fields.text("run") if fields.mentions("run") else "",
        )
        fields.close()
        return manifest


class StageWriter:
    """Takes the parts of one stage in order, piece by piece, and puts them on disk as they come."""

    def __init__(self, folder: Path, stage: int, places: Sequence[ParamSlot], run_id: str = "") -> None:
        self._values = sum(place.size for place in places)
        weights = [(place.name, place) for place in places]
        means = [(f"{MEANS[part]}.{place.name}", place) for part in PARTS[1:] for place in places]
        self._files = [
            _Growing(folder / f"stage-{stage}.weights.safetensors", weights, run_id),
            _Growing(folder / f"stage-{stage}.optimizer.safetensors", means, run_id),
        ]
        self._written = 0

    def write(self, piece: Buffer) -> None:
        """A piece may hold the end of the weights and the beginning of the means."""
        whole = memoryview(piece)
        weights = max(0, min(len(whole), self._values * BYTES - self._written))
        for file, part in zip(self._files, (whole[:weights], whole[weights:]), strict=True):
            if len(part):
                file.write(part)
        self._written += len(whole)

    def finish(self) -> list[StoredFile]:
        expected = self._values * BYTES * len(PARTS)
        if self._written != expected:
            raise UserError(f"{self._written:,} bytes of a stage came instead of {expected:,}")
        return [file.finish() for file in self._files]

    def abandon(self) -> None:
        for file in self._files:
            file.close()


class _Growing:
    """A safetensors file of which the header is known and the data is still coming."""

    def __init__(self, path: Path, tensors: Sequence[tuple[str, ParamSlot]], run_id: str) -> None:
        header: dict[str, Any] = {"__metadata__": {"format": "pt", **({"run": run_id} if run_id else {})}}
        start = 0
        for name, place in tensors:
            end = start + place.size * BYTES
            header[name] = {"dtype": "F32", "shape": list(place.shape), "data_offsets": [start, end]}
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


class Checkpoints:
    """The checkpoints of a run, in one folder; the newest few are kept."""

    def __init__(self, folder: Path, keep: int = 2, run_id: str | None = None) -> None:
        """Of the run with this id: others are neither read nor removed. None: of any."""
        self.folder = folder
        self.keep = keep
        self.run_id = run_id

    @classmethod
    def of_run(cls, output: Path) -> Checkpoints:
        """Of the run whose output folder this is."""
        return cls(output / "checkpoints", run_id=run_id_of(output))

    def begin(self) -> Path:
        """An empty folder for a new one; remains of an earlier attempt go."""
        place = self.folder / UNFINISHED
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir(parents=True)
        return place

    def commit(self, unfinished: Path, manifest: Manifest) -> None:
        """From here on it counts; older ones of the run that are no longer wanted go."""
        place = self.folder / f"{manifest.iterations:06d}"
        if place in self.others():
            raise FileExistsError(errno.EEXIST, "is a checkpoint of another run; move it away", str(place))
        with (unfinished / MANIFEST).open("w", encoding="utf-8") as file:
            file.write(json_text(manifest.to_json()) + "\n")
            file.flush()
            os.fsync(file.fileno())
        _fsync_folder(unfinished)
        shutil.rmtree(place, ignore_errors=True)
        unfinished.rename(place)
        _fsync_folder(self.folder)
        for old in self.complete()[self.keep :]:
            (old / MANIFEST).unlink()  # first it stops being a checkpoint
            shutil.rmtree(old, ignore_errors=True)

    def complete(self) -> list[Path]:
        """Those of the run that have a manifest, newest first."""
        return [place for place in self._all() if is_of(self.run_id, checkpoint_run_id(place))]

    def others(self) -> list[Path]:
        """Those of other runs, newest first."""
        return [place for place in self._all() if not is_of(self.run_id, checkpoint_run_id(place))]

    def warn_of_others(self) -> None:
        """Say what is passed over: whoever put it there may count on it."""
        for place in self.others():
            log.warning("%s: is of another run than %s, and is passed over", place, self.folder.parent)

    def _all(self) -> list[Path]:
        if not self.folder.is_dir():
            return []
        found = [path for path in self.folder.iterdir() if path.name.isdigit() and (path / MANIFEST).is_file()]
        return sorted(found, key=lambda path: int(path.name), reverse=True)

    def newest_sound(self) -> Iterator[tuple[Path, Manifest | UserError]]:
        """Checkpoints, newest first, until one is sound; the others with what is wrong with them."""
        self.warn_of_others()
        for place in self.complete():
            try:
                manifest = verified(place)
            except UserError as error:
                yield place, error
                continue
            yield place, manifest
            return


def verified(place: Path) -> Manifest:
    """The manifest, if every file is as it was written."""
    manifest = read_as(Manifest.from_json, place / MANIFEST)
    for file in manifest.files:
        check_file(place, file)
    return manifest


def check_file(place: Path, file: StoredFile) -> None:
    """UserError unless it is as it was written."""
    path = place / file.name
    if Path(file.name).name != file.name or not path.is_file():
        raise UserError(f"{path}: missing")
    if path.stat().st_size != file.size:
        raise UserError(f"{path}: {path.stat().st_size:,} bytes instead of {file.size:,}")
    digest = sha256()
    with path.open("rb") as opened:
        while block := opened.read(2**20):
            digest.update(block)
    if digest.hexdigest() != file.sha256:
        raise UserError(f"{path}: its content is not what was written")


def _fsync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
