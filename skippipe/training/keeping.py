"""Checkpoints of a run as it goes: what nodes send becomes files, and files become what nodes ask for.

Writing happens on a thread of its own, so that training does not wait for a disk. A checkpoint that cannot be written
(a full disk) is given up with a warning; the ones before it stay, and training goes on.
"""

from __future__ import annotations

import json
import logging
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from skippipe.errors import UserError
from skippipe.model.blueprint import Blueprint, config_from
from skippipe.model.weights import Place, layout_of_stage
from skippipe.runtime.tensors import SHOWN_VALUES
from skippipe.text.tokenizer import TextTokenizer
from skippipe.training.brief import Brief
from skippipe.training.checkpoint import MEANS, PARTS, Checkpoints, Manifest, StageWriter, StoredFile, verified
from skippipe.training.export import ModelFolder
from skippipe.transport.packed import Packed, pack

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Origin:
    """A checkpoint to go on from."""

    place: Path
    manifest: Manifest


class CheckpointKeeper:
    """One for a run. Pieces come stage by stage and in order."""

    def __init__(
        self,
        checkpoints: Checkpoints,
        brief: Brief,
        blueprint: Blueprint,
        tokenizer: TextTokenizer,
        origin: Origin | None = None,
    ) -> None:
        self._checkpoints = checkpoints
        self._brief = brief
        self._tokenizer = tokenizer
        self._blueprint = blueprint
        self._writing = ThreadPoolExecutor(1, "checkpoint")
        self._place: Path | None = None
        self._writer: StageWriter | None = None
        self._files: list[StoredFile] = []
        self._reader = StateReader(origin, brief.plan.layers, blueprint) if origin else None
        self.failures: list[str] = []

    def save(self, stage: int, piece: Packed | None) -> None:
        self._writing.submit(self._save, stage, piece)

    def saved(self, iterations: int) -> None:
        self._writing.submit(self._saved, iterations)

    def piece(self, stage: int, number: int) -> tuple[Packed | None, int]:
        assert self._reader is not None, "there is nothing to go on from"
        return self._reader.piece(stage, number), self._reader.steps

    def close(self) -> None:
        """When all that was asked for is on disk."""
        self._writing.shutdown(wait=True)

    def _save(self, stage: int, piece: Packed | None) -> None:
        try:
            if self._place is None:
                self._place = self._checkpoints.begin()
                self._tokenizer.save(self._place)
            if self._writer is None:
                places = layout_of_stage(self._blueprint, self._brief.plan.layers, stage)
                self._writer = StageWriter(self._place, stage, places)
            if piece is not None:
                self._writer.write(piece.data)
            else:
                self._files += self._writer.finish()
                self._writer = None
        except Exception as error:  # whatever it is, training goes on
            self._give_up(f"{type(error).__name__}: {error}")

    def _saved(self, iterations: int) -> None:
        place, files = self._place, self._files
        self._place, self._files = None, []
        if place is None or len(files) != 2 * len(self._brief.plan.layers):
            log.warning("no checkpoint after %d iterations: %s", iterations, "; ".join(self.failures[-1:]))
            return
        brief = self._brief
        manifest = Manifest(
            iterations=iterations,
            layers=brief.plan.layers,
            steps=tuple(iterations if count else 0 for count in brief.plan.exposure),
            seed=brief.seed,
            data=brief.data_fingerprint,
            config=brief.config,
            files=tuple(files),
        )
        try:
            self._checkpoints.commit(place, manifest)
        except OSError as error:
            self._give_up(str(error))
            log.warning("no checkpoint after %d iterations: %s", iterations, error)

    def _give_up(self, reason: str) -> None:
        self.failures.append(reason)
        if self._writer is not None:
            self._writer.abandon()
        self._writer = None
        self._files = []


class StateReader:
    """The state of any stage, whatever stages the checkpoint was made with."""

    def __init__(self, origin: Origin, layers: tuple[int, ...], blueprint: Blueprint) -> None:
        """`layers` of each stage that is asked for."""
        self._origin = origin
        self._layers = layers
        self._blueprint = blueprint
        self._places: dict[int, list[Place]] = {}
        self.steps = max(origin.manifest.steps)

    @cached_property
    def _files(self) -> dict[str, Any]:
        """Name of a tensor → the open file that holds it; files are mapped, so only what is asked for is read."""
        found: dict[str, Any] = {}
        for file in self._origin.manifest.files:
            opened: Any = safe_open(self._origin.place / file.name, "pt")
            found |= dict.fromkeys(opened.keys(), opened)
        return found

    def piece(self, stage: int, number: int) -> Packed | None:
        """Of weights, means and squares, one after another."""
        first = number * SHOWN_VALUES
        found: list[Tensor] = []
        start = 0
        for part in PARTS:
            for place in self._stage(stage):
                end = start + place.size
                if start < first + SHOWN_VALUES and end > first:
                    name = place.name if part == PARTS[0] else f"{MEANS[part]}.{place.name}"
                    values = self._tensor(name, place).flatten()
                    found.append(values[max(0, first - start) : first + SHOWN_VALUES - start])
                start = end
        return pack(torch.cat(found), "fp32", share=True) if found else None

    def weights(self, stage: int) -> Tensor:
        """Of a stage, without the optimizer's state, as one flat tensor."""
        return torch.cat([self._tensor(place.name, place).flatten() for place in self._stage(stage)])

    def _stage(self, stage: int) -> list[Place]:
        if stage not in self._places:
            self._places[stage] = layout_of_stage(self._blueprint, self._layers, stage)
        return self._places[stage]

    def _tensor(self, name: str, place: Place) -> Tensor:
        if name not in self._files:
            raise UserError(f"{self._origin.place}: has no tensor '{name}'")
        tensor: Tensor = self._files[name].get_tensor(name)
        if tuple(tensor.shape) != place.shape:
            raise UserError(
                f"{self._origin.place}: '{name}' has the shape {list(tensor.shape)}, not {list(place.shape)}"
            )
        return tensor


def origin_of(checkpoints: Checkpoints, brief: Brief) -> Origin:
    """The newest sound checkpoint, if it belongs to this job."""
    for place, found in checkpoints.newest_sound():
        if isinstance(found, UserError):
            log.warning("%s; the checkpoint before it is used", found)
            continue
        for name, theirs, ours in (
            ("model", _essence(found.config), _essence(brief.config)),
            ("seed", found.seed, brief.seed),
            ("text", found.data, brief.data_fingerprint),
        ):
            if theirs != ours:
                raise UserError(f"{place}: was made with another {name}; resume with the job it belongs to")
        return Origin(place, found)
    raise UserError(f"{checkpoints.folder}: no sound checkpoint to resume from")


def _essence(config: dict[str, Any]) -> dict[str, Any]:
    """What the weights depend on; versions and paths do not count."""
    plain: dict[str, Any] = json.loads(json.dumps(config))  # as it looks after a file: lists, not tuples
    return {name: value for name, value in plain.items() if name not in ("transformers_version", "_name_or_path")}


def export(place: Path, folder: Path) -> Manifest:
    """A checkpoint as a Hugging Face folder."""
    manifest = verified(place)
    blueprint = Blueprint(config_from(manifest.config), manifest.seed)
    reader = StateReader(Origin(place, manifest), manifest.layers, blueprint)
    model = ModelFolder(folder, manifest.layers, blueprint, TextTokenizer.load(place))
    for stage in range(len(manifest.layers)):
        model.store_flat(stage, reader.weights(stage))
    return manifest
