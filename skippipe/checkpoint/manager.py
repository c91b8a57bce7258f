"""Checkpoints of a run while it trains: chunks of state from nodes go to files, and from files to nodes that resume.

Writing happens on a thread of its own, so that training does not wait for a disk. A checkpoint that cannot be written
(a full disk) is given up with a warning; the ones before it stay, and training goes on. What was written of it is
removed at once, to make room.
"""

from __future__ import annotations

import json
import logging
import math
import shutil
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from skippipe.checkpoint.adapters import BASE, base_of, open_base, write_adapter
from skippipe.checkpoint.format import (
    CheckpointOrigin,
    Checkpoints,
    Manifest,
    StageWriter,
    StoredFile,
    read_manifest,
    verified,
)
from skippipe.checkpoint.grown_state import LAYER_FIELDS, GrownState
from skippipe.checkpoint.hf_export import ModelFolder
from skippipe.checkpoint.storage import Rescue, WriteFailures, in_bytes, reason
from skippipe.codecs import EncodedTensor, encode
from skippipe.data.tokenizer import TextTokenizer
from skippipe.errors import UserError
from skippipe.model.flat_params import layout_of_stage
from skippipe.model.model_files import CODE_FIELD, GENERATION, TEXT_FIELDS
from skippipe.model.model_spec import ModelSpec, config_from
from skippipe.model.stage import layer_ranges
from skippipe.optim import OPTIMIZERS
from skippipe.optim.interface import ParamSlot
from skippipe.runs.tail import run_id_of
from skippipe.runtime.node_config import NodeConfig
from skippipe.value_ranges import Choices

log = logging.getLogger(__name__)


@dataclass
class CheckpointManager:
    """Writes and reads the checkpoints of one run. Chunks come stage by stage and in order."""

    checkpoints: Checkpoints
    node_config: NodeConfig
    spec: ModelSpec
    tokenizer: TextTokenizer
    origin: CheckpointOrigin | None = None
    rescue: Rescue = lambda: None

    def __post_init__(self) -> None:
        self._warned = WriteFailures()
        self._writing = ThreadPoolExecutor(1, "checkpoint")
        self._place: Path | None = None
        self._writer: StageWriter | None = None
        self._files: list[StoredFile] = []
        self._reader = StateReader(self.origin, self.node_config.plan.layers, self.spec) if self.origin else None
        self._given_up = False
        """Further chunks of the checkpoint that is being made are dropped."""
        self.failures: list[str] = []
        self.lacking = ""
        """Why the checkpoint that was finished last is not on disk; empty if it is."""

    def save(self, stage: int, number: int, piece: EncodedTensor | None) -> None:
        """Write the next chunk of a stage's state, None after the last one; number 0 starts the stage over."""
        self._writing.submit(self._save, stage, number, piece)

    def saved(self, iterations: int, steps: Sequence[int], validation_loss: float | None = None) -> None:
        """Make it a checkpoint, now that all stages are saved; `steps` are those that each optimizer has taken."""
        finite = validation_loss is not None and math.isfinite(validation_loss)
        self._writing.submit(self._saved, iterations, tuple(steps), validation_loss if finite else None)

    def abandon(self) -> None:
        """Drop the checkpoint that is being made, because a node that was sending it is lost."""
        self._writing.submit(self._abandon)

    def lack(self) -> str:
        """Why the checkpoint that was finished last is not on disk; empty if it is. Waits for pending writes."""
        return self._writing.submit(lambda: self.lacking).result()

    def move(self) -> None:
        """Write to the rescue folder from now on, if there is one."""
        self._writing.submit(self._move)

    def newest(self) -> int | None:
        """Choose the newest sound checkpoint of this run to resume from: its iterations, None if there is none.

        Waits for pending writes.
        """
        self._reader = self._writing.submit(self._newest).result()
        return None if self._reader is None else self._reader.origin.manifest.iterations

    def state(self, stage: int, first: int, count: int) -> EncodedTensor:
        """A range of a stage's weights and optimizer state, as one sequence of numbers, of the checkpoint to resume
        from."""
        return self._opened.state(stage, first, count)

    def steps(self, stage: int) -> int:
        """Steps that the optimizer of a stage had taken when the checkpoint was made."""
        return self._opened.steps(stage)

    @property
    def grown(self) -> GrownState | None:
        """How the model has grown since the checkpoint to resume from; None: it has not, or there is none."""
        return self._reader.grown if self._reader is not None else None

    @property
    def _opened(self) -> StateReader:
        assert self._reader is not None, "there is no checkpoint to resume from"
        return self._reader

    def close(self) -> None:
        """Return when all writes are done."""
        self._writing.shutdown(wait=True)

    def _save(self, stage: int, number: int, piece: EncodedTensor | None) -> None:
        if self._given_up:
            return
        try:
            if self._place is None:
                self._place = self.checkpoints.begin()
                self.tokenizer.save(self._place)
            if number == 0:
                self._stop_stage()
                places = layout_of_stage(self.spec, self.node_config.plan.layers, stage)
                optimizer = OPTIMIZERS[self.node_config.learning.optimizer]
                self._writer = StageWriter(self._place, stage, places, optimizer, self._run_id)
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
            folder = self.rescue()
        except UserError as error:
            log.warning("%s", error)
            return
        if folder is None:
            return
        moved = folder / "checkpoints"
        if self.spec.frozen:  # or what goes there would be of no use without the other disk
            with self._warned.tolerated(moved / BASE, "the weights that adapters are for are where they were"):
                shutil.copytree(self.checkpoints.folder / BASE, moved / BASE, dirs_exist_ok=True)
        self.checkpoints = replace(self.checkpoints, folder=moved)

    @property
    def _run_id(self) -> str:
        return self.checkpoints.run_id or ""

    def _saved(self, iterations: int, steps: tuple[int, ...], validation_loss: float | None) -> None:
        place, files = self._place, self._files
        self._place, self._files, self.lacking, self._given_up = None, [], "", False
        if place is None or len(files) != 2 * len(self.node_config.plan.layers):
            self._lack(iterations)
            return
        try:
            manifest = manifest_of(self.node_config, iterations, steps, files, self._run_id)
            self.checkpoints.commit(place, replace(manifest, validation_loss=validation_loss))
            self._warned.works(self.checkpoints.folder)
        except OSError as error:
            self._place = place
            self._give_up(error)
            self._given_up = False
            self._lack(iterations)

    def _lack(self, iterations: int) -> None:
        self.lacking = f"none after {iterations} iterations: {'; '.join(self.failures[-1:])}"

    def _give_up(self, error: Exception) -> None:
        self.failures.append(f"{type(error).__name__}: {error}")
        self._warned.failed(self.checkpoints.folder, error, "the checkpoints before stay, and training goes on")
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
        for place in self.checkpoints.complete():
            try:
                if self._reader is not None and self._reader.reads(place):
                    return self._reader  # verified before
                reader = StateReader(CheckpointOrigin(place, verified(place)), self.node_config.plan.layers, self.spec)
                reader.open()
            except (UserError, OSError) as error:
                log.warning("%s; the checkpoint before it is used", error)
                continue
            return reader
        return None


@dataclass
class StateReader:
    """Reads the state of stages from a checkpoint, whatever stages it was made with; from one with fewer layers, as
    that of a model that has grown."""

    origin: CheckpointOrigin
    layers: tuple[int, ...]
    """Layers of each stage to be read."""
    spec: ModelSpec
    grown: GrownState | None = field(init=False, default=None)
    """How the model has grown; None: the checkpoint has all its layers."""
    _slots: dict[int, list[ParamSlot]] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        made = self.origin.manifest
        if sum(made.layers) < sum(self.layers):
            young = ModelSpec(config_from(made.config), made.seed)
            self.grown = GrownState(young, made.layers, self.spec, self.layers, self.origin.place)

    def steps(self, stage: int) -> int:
        """Steps of the optimizer: the most of all stages that this one's layers came from."""
        made = self.origin.manifest
        if self.grown is not None:
            return self.grown.steps(stage, made.steps)
        ours = layer_ranges(self.layers)[stage]
        pairs = zip(layer_ranges(made.layers), made.steps, strict=True)
        return max(steps for theirs, steps in pairs if set(theirs) & set(ours))

    def reads(self, place: Path) -> bool:
        """Whether this is the checkpoint that it reads."""
        made = self.origin.manifest
        return place == self.origin.place and read_manifest(place) == made

    def open(self) -> None:
        """Open all files; they can then be read even after newer checkpoints have replaced this one."""
        _ = self._files

    @cached_property
    def _files(self) -> dict[str, Any]:
        """Name of a tensor → the open file that holds it; files are mapped, so only what is needed is read."""
        found: dict[str, Any] = {}
        for file in self.origin.manifest.files:
            opened: Any = safe_open(self.origin.place / file.name, "pt")
            found |= dict.fromkeys(opened.keys(), opened)
        return found | open_base(base_of(self.origin.place)) if self.spec.frozen else found

    def state(self, stage: int, first: int, count: int) -> EncodedTensor:
        """A range of the stage's weights, optimizer state and weights that are not trained, as one sequence of
        numbers."""
        return encode(torch.cat(list(self._range(self._state_slots(stage), first, count))), "fp32", share=True)

    def _range(self, slots: Sequence[ParamSlot], first: int, count: int) -> Iterator[Tensor]:
        whole = slots[-1].start + slots[-1].size
        if not 0 <= first < first + count <= whole:
            raise ValueError(f"numbers {first} to {first + count} of a state of {whole}")
        for slot in slots:
            start, end = max(0, first - slot.start), min(slot.size, first + count - slot.start)
            if start < end:
                yield self._values(slot, start, end)

    def weights(self, stage: int, *, frozen: bool = False) -> Tensor:
        """The trained weights of a stage as one flat tensor, or those that are not trained."""
        slots = layout_of_stage(self.spec, self.layers, stage, frozen=frozen)
        return torch.cat([self._values(slot, 0, slot.size) for slot in slots])

    def whole_state(self, stage: int) -> Iterator[EncodedTensor]:
        """The stage's state, tensor by tensor."""
        for slot in self._state_slots(stage):
            yield encode(self._values(slot, 0, slot.size), "fp32", share=True)

    def _state_slots(self, stage: int) -> list[ParamSlot]:
        if stage not in self._slots:
            name = self.origin.manifest.optimizer
            Choices(OPTIMIZERS).check(name, f"{self.origin.place}: optimizer")
            slots = OPTIMIZERS[name].state_slots(layout_of_stage(self.spec, self.layers, stage))
            end = slots[-1].start + slots[-1].size
            frozen = layout_of_stage(self.spec, self.layers, stage, frozen=True)
            self._slots[stage] = [*slots, *(slot._replace(start=end + slot.start) for slot in frozen)]
        return self._slots[stage]

    def _values(self, slot: ParamSlot, start: int, end: int) -> Tensor:
        """A range of a tensor as if it were flat; only the rows that it lies in are read."""
        new = self.grown.new_tensor(slot) if self.grown is not None else None
        if new is not None:
            return new[start:end]
        name = slot.name if self.grown is None else self.grown.name(slot.name)
        if name not in self._files:
            raise UserError(f"{self.origin.place}: has no tensor '{name}'")
        stored = self._files[name].get_slice(name)
        if tuple(stored.get_shape()) != slot.shape:
            raise UserError(f"{self.origin.place}: '{name}' has the shape {stored.get_shape()}, not {list(slot.shape)}")
        row = slot.size // slot.shape[0]
        above = start // row
        rows: Tensor = stored[above : -(-end // row)]
        return rows.flatten()[start - above * row : end - above * row].float()


def manifest_of(
    node_config: NodeConfig, iterations: int, steps: Iterable[int], files: Iterable[StoredFile], run_id: str
) -> Manifest:
    """The manifest of a checkpoint with the stages of the plan; `steps` are those that each optimizer has taken."""
    return Manifest(
        iterations=iterations,
        layers=node_config.plan.layers,
        steps=tuple(steps),
        seed=node_config.seed,
        data=node_config.data_fingerprint,
        config=node_config.config,
        files=tuple(files),
        run=run_id,
        optimizer=node_config.learning.optimizer,
        lora=node_config.lora,
        bridges=node_config.recipe.bridges,
        adapters=node_config.recipe.adapters,
        repeats=node_config.recipe.repeats,
    )


def origin_of(checkpoints: Checkpoints, node_config: NodeConfig, *, grown: bool = False) -> CheckpointOrigin:
    """The newest sound checkpoint, if it belongs to this job. `grown`: it may be of fewer layers, as the run's model
    has grown since."""
    origin = checkpoints.newest_sound()
    if origin is None:
        raise UserError(no_checkpoint(checkpoints))
    found = origin.manifest
    before, after = sum(found.layers), sum(node_config.plan.layers)
    if before != after and not (grown and before < after):
        raise UserError(
            f"{origin.place}: has {before} layers, and the job's model {after}; go on with model, recipe.grow and "
            "recipe.skip as they were"
        )
    grown = before < after
    left_out = LAYER_FIELDS if grown else ()
    for name, theirs, ours in (
        ("model", essence(found.config, left_out), essence(node_config.config, left_out)),
        ("seed", found.seed, node_config.seed),
        ("text", found.data, node_config.data_fingerprint),
        ("optimizer", found.optimizer, node_config.learning.optimizer),
        ("[lora]", found.lora, node_config.lora),
        ("recipe.heal", found.adapters > 0, node_config.recipe.adapters > 0),
        ("recipe.bridges", found.bridges, 0 if grown else node_config.recipe.bridges),
        ("recipe.adapters", (found.adapters, found.repeats), (node_config.recipe.adapters, node_config.recipe.repeats)),
    ):
        if theirs != ours:
            raise UserError(f"{origin.place}: was made with another {name}; resume with the job it belongs to")
    if found.bridges and found.layers != node_config.plan.layers:
        there, here = (",".join(map(str, each)) for each in (found.layers, node_config.plan.layers))
        raise UserError(
            f"{origin.place}: its bridges are for stages of {there} layers, and the plan has {here}: set "
            f'pipeline.layers = "{there}"'
        )
    if found.trains_adapters:
        base_of(origin.place)
    return origin


def no_checkpoint(checkpoints: Checkpoints) -> str:
    return f"{checkpoints.folder}: no sound checkpoint to resume from"


def essence(config: dict[str, Any], also: Sequence[str] = ()) -> dict[str, Any]:
    """The part of a model's configuration that weights depend on: all but versions, paths and ids of special tokens,
    and what is to be left out `also`."""
    left_out = ("transformers_version", "_name_or_path", CODE_FIELD, *TEXT_FIELDS, *also)
    plain: dict[str, Any] = json.loads(json.dumps(config))  # as it looks after a file: lists, not tuples
    return {name: value for name, value in plain.items() if name not in left_out}


def export_adapter(place: Path, folder: Path) -> Manifest:
    """The adapters of a checkpoint as a folder of peft; UserError if it has none, or they cannot be written."""
    manifest = verified(place)
    if not manifest.lora.rank:
        what = (
            "its adapters are for missing stages" if manifest.adapters else "has no adapters: all weights were trained"
        )
        raise UserError(f"{place}: {what}; export the model without --adapter")
    spec = ModelSpec(config_from(manifest.config), manifest.seed, manifest.lora)
    reader = StateReader(CheckpointOrigin(place, manifest), manifest.layers, spec)
    adapters: dict[str, Tensor] = {}
    for stage in range(len(manifest.layers)):
        flat = reader.weights(stage)
        adapters |= {slot.name: slot.of(flat) for slot in layout_of_stage(spec, manifest.layers, stage)}
    model = str(manifest.config.get("_name_or_path") or base_of(place).resolve())
    try:
        write_adapter(folder, adapters, manifest.lora, model)
        TextTokenizer.load(place).save(folder)
    except OSError as error:
        raise UserError(f"{folder}: cannot be written: {reason(error)}; make room, or name another folder") from None
    return manifest


def export(place: Path, folder: Path, score: Path | None = None) -> Manifest:
    """A checkpoint as a Hugging Face folder, or nothing; UserError if it cannot be written. `score`: as in
    `ModelCard`."""
    manifest = verified(place)
    trained = manifest.lora, manifest.bridges, manifest.adapters, manifest.repeats
    spec = ModelSpec(config_from(manifest.config), manifest.seed, *trained)
    reader = StateReader(CheckpointOrigin(place, manifest), manifest.layers, spec)
    run, tokenizer = place.resolve().parents[1], TextTokenizer.load(place)
    ours = manifest.run != "" and run_id_of(run) == manifest.run
    about: dict[str, Any] = {"run": run if ours else None, "iterations": manifest.iterations, "score": score}
    about["base"] = base_of(place) if manifest.trains_adapters else None
    about["generation"] = place.parent / GENERATION
    model = ModelFolder(folder, manifest.layers, spec, tokenizer, run_id=manifest.run, **about)
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
