"""Checkpoints of a run as it goes: what nodes send becomes files, and files become what nodes ask for.

Writing happens on a thread of its own, so that training does not wait for a disk. A checkpoint that cannot be written
(a full disk) is given up with a warning; the ones before it stay, and training goes on. What was written of it goes at
once: others need the room.
"""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from skippipe.checkpoint.format import MANIFEST, MEANS, PARTS, Checkpoints, Manifest, StageWriter, StoredFile, verified
from skippipe.checkpoint.hf_export import ModelFolder
from skippipe.checkpoint.storage import Rescue, WriteFailures, in_bytes, reason
from skippipe.codecs import EncodedTensor, encode
from skippipe.data.tokenizer import TextTokenizer
from skippipe.errors import UserError
from skippipe.json_fields import read_as
from skippipe.model.flat_params import ParamSlot, layout_of_stage
from skippipe.model.model_files import CODE_FIELD
from skippipe.model.model_spec import ModelSpec, config_from
from skippipe.model.stage import layer_ranges
from skippipe.runtime.node_config import NodeConfig

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class CheckpointOrigin:
    """A checkpoint to go on from."""

    place: Path
    manifest: Manifest


class CheckpointManager:
    """One for a run. Pieces come stage by stage and in order."""

    def __init__(
        self,
        checkpoints: Checkpoints,
        node_config: NodeConfig,
        spec: ModelSpec,
        tokenizer: TextTokenizer,
        origin: CheckpointOrigin | None = None,
        rescue: Rescue = lambda: None,
    ) -> None:
        self._checkpoints = checkpoints
        self._rescue = rescue
        self._warned = WriteFailures()
        self._node_config = node_config
        self._tokenizer = tokenizer
        self._spec = spec
        self._writing = ThreadPoolExecutor(1, "checkpoint")
        self._place: Path | None = None
        self._writer: StageWriter | None = None
        self._files: list[StoredFile] = []
        self._reader = StateReader(origin, node_config.plan.layers, spec) if origin else None
        self._given_up = False
        """What comes of the checkpoint that is being made is dropped."""
        self.failures: list[str] = []
        self.lacking = ""
        """Why there is none of what was given last; empty if all is well."""

    def save(self, stage: int, number: int, piece: EncodedTensor | None) -> None:
        """A piece of a stage's state, in order, None after the last; number 0 starts the stage over."""
        self._writing.submit(self._save, stage, number, piece)

    def saved(self, iterations: int, steps: Sequence[int]) -> None:
        """All stages were given; `steps` that the optimizer of each has taken."""
        self._writing.submit(self._saved, iterations, tuple(steps))

    def abandon(self) -> None:
        """Whoever sent the checkpoint that is being made is gone; the next one starts clean."""
        self._writing.submit(self._abandon)

    def lack(self) -> str:
        """Why what was given last is not on disk; empty if all is well. Waits for what is being written."""
        return self._writing.submit(lambda: self.lacking).result()

    def move(self) -> None:
        """From now on checkpoints go to the rescue folder, if there is one."""
        self._writing.submit(self._move)

    def newest(self) -> int | None:
        """Of the checkpoints of this run, go on from the newest that is sound: its iterations, None if there is none.

        Waits for what is being written.
        """
        self._reader = self._writing.submit(self._newest).result()
        return None if self._reader is None else self._reader.iterations

    def state(self, stage: int, first: int, count: int) -> EncodedTensor:
        """Of the checkpoint to go on from: numbers of weights, means and squares, one after another."""
        return self._opened.state(stage, first, count)

    def steps(self, stage: int) -> int:
        """That its optimizer had taken by then."""
        return self._opened.steps(stage)

    @property
    def _opened(self) -> StateReader:
        assert self._reader is not None, "there is nothing to go on from"
        return self._reader

    def close(self) -> None:
        """When all that was asked for is on disk."""
        self._writing.shutdown(wait=True)

    def _save(self, stage: int, number: int, piece: EncodedTensor | None) -> None:
        if self._given_up:
            return
        try:
            if self._place is None:
                self._place = self._checkpoints.begin()
                self._tokenizer.save(self._place)
            if number == 0:
                self._stop_stage()
                places = layout_of_stage(self._spec, self._node_config.plan.layers, stage)
                self._writer = StageWriter(self._place, stage, places, self._run_id)
            assert self._writer is not None
            if piece is not None:
                self._writer.write(piece.data)
            else:
                self._files += self._writer.finish()
                self._writer = None
        except Exception as error:  # whatever it is, training goes on
            self._give_up(error)

    def _move(self) -> None:
        try:
            folder = self._rescue()
        except UserError as error:
            log.warning("%s", error)
            return
        if folder is not None:
            self._checkpoints = Checkpoints(folder / "checkpoints", self._checkpoints.keep, self._checkpoints.run_id)

    @property
    def _run_id(self) -> str:
        return self._checkpoints.run_id or ""

    def _saved(self, iterations: int, steps: tuple[int, ...]) -> None:
        place, files = self._place, self._files
        self._place, self._files, self.lacking, self._given_up = None, [], "", False
        if place is None or len(files) != 2 * len(self._node_config.plan.layers):
            self._lack(iterations)
            return
        node_config = self._node_config
        manifest = Manifest(
            iterations=iterations,
            layers=node_config.plan.layers,
            steps=steps,
            seed=node_config.seed,
            data=node_config.data_fingerprint,
            config=node_config.config,
            files=tuple(files),
            run=self._run_id,
        )
        try:
            self._checkpoints.commit(place, manifest)
            self._warned.works(self._checkpoints.folder)
        except OSError as error:
            self._place = place
            self._give_up(error)
            self._given_up = False
            self._lack(iterations)

    def _lack(self, iterations: int) -> None:
        self.lacking = f"none after {iterations} iterations: {'; '.join(self.failures[-1:])}"

    def _give_up(self, error: Exception) -> None:
        self.failures.append(f"{type(error).__name__}: {error}")
        self._warned.failed(self._checkpoints.folder, error, "the checkpoints before stay, and training goes on")
        self._abandon()
        self._given_up = True

    def _abandon(self) -> None:
        self._stop_stage()
        if self._place is not None:
            shutil.rmtree(self._place, ignore_errors=True)
        self._place, self._files, self._given_up = None, [], False

    def _stop_stage(self) -> None:
        if self._writer is not None:
            self._writer.abandon()
        self._writer = None

    def _newest(self) -> StateReader | None:
        for place in self._checkpoints.complete():
            try:
                if self._reader is not None and self._reader.reads(place):
                    return self._reader  # verified before
                reader = StateReader(
                    CheckpointOrigin(place, verified(place)), self._node_config.plan.layers, self._spec
                )
                reader.open()
            except (UserError, OSError) as error:
                log.warning("%s; the checkpoint before it is used", error)
                continue
            return reader
        return None


class StateReader:
    """The state of any stage, whatever stages the checkpoint was made with."""

    def __init__(self, origin: CheckpointOrigin, layers: tuple[int, ...], spec: ModelSpec) -> None:
        """`layers` of each stage that is asked for."""
        self._origin = origin
        self._layers = layers
        self._spec = spec
        self._places: dict[int, list[ParamSlot]] = {}
        self.iterations = origin.manifest.iterations

    def steps(self, stage: int) -> int:
        """That the optimizer had taken; the most of all stages that this one's layers came from."""
        made = self._origin.manifest
        ours = layer_ranges(self._layers)[stage]
        pairs = zip(layer_ranges(made.layers), made.steps, strict=True)
        return max(steps for theirs, steps in pairs if set(theirs) & set(ours))

    def reads(self, place: Path) -> bool:
        """Is this the checkpoint that it was made for?"""
        made = self._origin.manifest
        return place == self._origin.place and read_as(Manifest.from_json, place / MANIFEST) == made

    def open(self) -> None:
        """Once it is open, it can be read even if newer checkpoints take its place."""
        _ = self._files

    @cached_property
    def _files(self) -> dict[str, Any]:
        """Name of a tensor → the open file that holds it; files are mapped, so only what is asked for is read."""
        found: dict[str, Any] = {}
        for file in self._origin.manifest.files:
            opened: Any = safe_open(self._origin.place / file.name, "pt")
            found |= dict.fromkeys(opened.keys(), opened)
        return found

    def state(self, stage: int, first: int, count: int) -> EncodedTensor:
        """Numbers of weights, means and squares, one after another."""
        return encode(torch.cat(list(self._numbers(stage, first, count))), "fp32", share=True)

    def _numbers(self, stage: int, first: int, count: int) -> Iterator[Tensor]:
        places = self._stage(stage)
        whole = len(PARTS) * sum(place.size for place in places)
        if not 0 <= first < first + count <= whole:
            raise ValueError(f"numbers {first} to {first + count} of a state of {whole}")
        for part in PARTS:
            for place in places:
                start, end = max(0, first), min(place.size, first + count)
                if start < end:
                    name = place.name if part == PARTS[0] else f"{MEANS[part]}.{place.name}"
                    yield self._values(name, place, start, end)
                first -= place.size

    def weights(self, stage: int) -> Tensor:
        """Of a stage, without the optimizer's state, as one flat tensor."""
        return torch.cat([self._values(place.name, place, 0, place.size) for place in self._stage(stage)])

    def _stage(self, stage: int) -> list[ParamSlot]:
        if stage not in self._places:
            self._places[stage] = layout_of_stage(self._spec, self._layers, stage)
        return self._places[stage]

    def _values(self, name: str, place: ParamSlot, start: int, end: int) -> Tensor:
        """Of a tensor as if it were flat; only the rows that they lie in are read."""
        if name not in self._files:
            raise UserError(f"{self._origin.place}: has no tensor '{name}'")
        stored = self._files[name].get_slice(name)
        if tuple(stored.get_shape()) != place.shape:
            raise UserError(
                f"{self._origin.place}: '{name}' has the shape {stored.get_shape()}, not {list(place.shape)}"
            )
        row = place.size // place.shape[0]
        above = start // row
        rows: Tensor = stored[above : -(-end // row)]
        return rows.flatten()[start - above * row : end - above * row]


def origin_of(checkpoints: Checkpoints, node_config: NodeConfig) -> CheckpointOrigin:
    """The newest sound checkpoint, if it belongs to this job."""
    for place, found in checkpoints.newest_sound():
        if isinstance(found, UserError):
            log.warning("%s; the checkpoint before it is used", found)
            continue
        for name, theirs, ours in (
            ("model", _essence(found.config), _essence(node_config.config)),
            ("seed", found.seed, node_config.seed),
            ("text", found.data, node_config.data_fingerprint),
        ):
            if theirs != ours:
                raise UserError(f"{place}: was made with another {name}; resume with the job it belongs to")
        return CheckpointOrigin(place, found)
    raise UserError(f"{checkpoints.folder}: no sound checkpoint to resume from")


def _essence(config: dict[str, Any]) -> dict[str, Any]:
    """What the weights depend on; versions and paths do not count."""
    left_out = ("transformers_version", "_name_or_path", CODE_FIELD)
    plain: dict[str, Any] = json.loads(json.dumps(config))  # as it looks after a file: lists, not tuples
    return {name: value for name, value in plain.items() if name not in left_out}


def export(place: Path, folder: Path) -> Manifest:
    """A checkpoint as a Hugging Face folder, or nothing; UserError if it cannot be written."""
    manifest = verified(place)
    spec = ModelSpec(config_from(manifest.config), manifest.seed)
    reader = StateReader(CheckpointOrigin(place, manifest), manifest.layers, spec)
    model = ModelFolder(folder, manifest.layers, spec, TextTokenizer.load(place), run_id=manifest.run)
    try:
        for stage in range(len(manifest.layers)):
            model.store_flat(stage, reader.weights(stage))
    except (OSError, UserError) as error:
        missing = in_bytes(model.missing_bytes)
        model.discard()
        raise UserError(
            f"{folder}: {missing} of the model cannot be written: {reason(error)}; make room, or name another folder"
        ) from None
    return manifest
