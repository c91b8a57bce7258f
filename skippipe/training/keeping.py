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
from skippipe.model.stage import StageModel, layer_ranges
from skippipe.model.weights import Place, layout
from skippipe.rules import exposure
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


class Stages:
    """Which weights each stage has, in the order of its flat tensor."""

    def __init__(self, counts: tuple[int, ...], blueprint: Blueprint) -> None:
        """`counts` of layers, of each stage."""
        self._blueprint = blueprint
        self.counts = counts

    def places(self, stage: int) -> list[Place]:
        with torch.device("meta"):
            like = StageModel(self._blueprint, layer_ranges(self.counts)[stage], ends=stage == 0)
        return layout(like.named_weights())


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
        self._stages = Stages(tuple(stage.layers for stage in brief.plan.stages), blueprint)
        self._writing = ThreadPoolExecutor(1, "checkpoint")
        self._place: Path | None = None
        self._writer: StageWriter | None = None
        self._files: list[StoredFile] = []
        self._reader = StateReader(origin, self._stages) if origin else None
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
                self._writer = StageWriter(self._place, stage, self._stages.places(stage))
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
        if place is None or len(files) != 2 * len(self._stages.counts):
            log.warning("no checkpoint after %d iterations: %s", iterations, "; ".join(self.failures[-1:]))
            return
        plan, brief = self._brief.plan, self._brief
        visits = exposure(
            [plan.visits(lane) for lane in plan.lanes], [lane.microbatches for lane in plan.lanes], len(plan.stages)
        )
        manifest = Manifest(
            iterations=iterations,
            layers=self._stages.counts,
            steps=tuple(iterations if count else 0 for count in visits),
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

    def __init__(self, origin: Origin, stages: Stages) -> None:
        self._origin = origin
        self._stages = stages
        self._flat: dict[int, Tensor] = {}
        self.steps = max(origin.manifest.steps)

    @cached_property
    def _files(self) -> dict[str, Path]:
        """Name of a tensor → the file that holds it."""
        found: dict[str, Path] = {}
        for file in self._origin.manifest.files:
            path = self._origin.place / file.name
            with safe_open(path, "pt") as opened:
                found |= dict.fromkeys(opened.keys(), path)
        return found

    def piece(self, stage: int, number: int) -> Packed | None:
        values = self._whole(stage)[number * SHOWN_VALUES : (number + 1) * SHOWN_VALUES]
        return pack(values, "fp32", share=True) if len(values) else None

    def weights(self, stage: int) -> Tensor:
        """Of a stage, without the optimizer's state, as one flat tensor."""
        return torch.cat([self._tensor(place.name, place).flatten() for place in self._stages.places(stage)])

    def _whole(self, stage: int) -> Tensor:
        """Weights, means and squares of a stage, one after another; one stage at a time is held."""
        if stage not in self._flat:
            parts: list[Tensor] = []
            for part in PARTS:
                for place in self._stages.places(stage):
                    name = place.name if part == PARTS[0] else f"{MEANS[part]}.{place.name}"
                    parts.append(self._tensor(name, place).flatten())
            self._flat = {stage: torch.cat(parts)}
        return self._flat[stage]

    def _tensor(self, name: str, place: Place) -> Tensor:
        if name not in self._files:
            raise UserError(f"{self._origin.place}: has no tensor '{name}'")
        with safe_open(self._files[name], "pt") as opened:
            tensor: Tensor = opened.get_tensor(name)
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
    stages = Stages(manifest.layers, blueprint)
    reader = StateReader(Origin(place, manifest), stages)
    model = ModelFolder(folder, manifest.layers, blueprint, TextTokenizer.load(place))
    for stage in range(len(manifest.layers)):
        model.store_flat(stage, reader.weights(stage))
    return manifest
