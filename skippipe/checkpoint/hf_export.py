"""Writing the trained weights, as nodes send them stage by stage, into a Hugging Face folder that transformers loads,
and uploading it to the hub.

Files lie in `unfinished` within the folder until all are there and on the disk. So a model is there whole or not at
all, and one that the folder holds already stays until then.
"""

from __future__ import annotations

import contextlib
import json
import shutil
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig

from skippipe.checkpoint.adapters import read_base
from skippipe.checkpoint.bridges_file import write_bridges
from skippipe.checkpoint.format import run_field, save_tensors
from skippipe.checkpoint.model_card import CARD_FILE, ModelCard, special_ids
from skippipe.codecs import decode
from skippipe.data.tokenizer import TextTokenizer
from skippipe.errors import UserError, first_line, require
from skippipe.json_fields import fsync_path
from skippipe.model.flat_params import layout_of_stage
from skippipe.model.lora import merged
from skippipe.model.model_files import INDEX
from skippipe.model.model_spec import ModelSpec
from skippipe.model.stage import Bridges, trained_bridges

UNFINISHED = "unfinished"
_Generation: Any = GenerationConfig  # untyped


@dataclass
class ModelFolder:
    """A Hugging Face folder that is written stage by stage; one stage at a time is held in memory."""

    folder: Path
    layers: tuple[int, ...]
    """Layers of each stage."""
    spec: ModelSpec
    tokenizer: TextTokenizer
    dtype: torch.dtype = torch.float32
    """The type in the files."""
    run_id: str = ""
    """The run that trained it."""
    run: Path | None = None
    """Its output folder, for the model card."""
    iterations: int | None = None
    """After how many iterations the weights were taken; None: after the last."""
    score: Path | None = None
    """As in `ModelCard`."""
    base: Path | None = None
    """If the stages that come are adapters: the folder with the weights that they are merged into."""
    _pieces: list[torch.Tensor] = field(init=False, default_factory=list)
    _where: dict[str, str] = field(init=False, default_factory=dict)
    """Name of a weight → the file that holds it."""
    _bytes: int = field(init=False, default=0)
    _bridges: dict[int, Bridges] = field(init=False, default_factory=dict)
    """Stage → the bridges that begin there; they go into a file of their own."""

    def store(self, stage: int, number: int, piece: Any) -> None:
        """Take the next chunk of a stage, of which number 0 starts the stage over. None ends it: OSError if it cannot
        be written, and then it may be ended again."""
        if piece is not None:
            self._pieces = [*(self._pieces if number else ()), decode(piece)]
            return
        self.store_flat(stage, torch.cat(self._pieces))
        self._pieces = []

    def store_flat(self, stage: int, flat: torch.Tensor) -> None:
        """Write a whole stage; OSError if it cannot be written."""
        if not self._where:
            shutil.rmtree(self._unfinished, ignore_errors=True)  # of one that was cut short
        self._unfinished.mkdir(parents=True, exist_ok=True)
        trained = {slot.name: slot.of(flat) for slot in layout_of_stage(self.spec, self.layers, stage)}
        bridges = trained_bridges(self.spec, stage, len(self.layers))
        if bridges is not None:
            self._bridges[stage] = bridges
            for name, each in bridges.named_weights():
                each.data.copy_(trained.pop(name))
        if self.base is not None:
            names = [slot.name for slot in layout_of_stage(self.spec, self.layers, stage, frozen=True)]
            trained = merged(read_base(self.base, names), trained, self.spec.lora)
        weights = {name: each.to(self.dtype).contiguous() for name, each in trained.items()}
        file = f"model-{stage + 1:05d}-of-{len(self.layers):05d}.safetensors"
        if self._where.get(next(iter(weights))) != file:  # else it is there: what failed came after it
            save_tensors(weights, self._unfinished / file, {"format": "pt", **run_field(self.run_id)})
            self._where |= dict.fromkeys(weights, file)
            self._bytes += self.dtype.itemsize * sum(each.numel() for each in weights.values())
        if stage + 1 == len(self.layers):
            self._finish()

    def move(self, folder: Path) -> None:
        """Go on in another folder, with the stages that are written already; OSError if they cannot be copied there."""
        before, after = self._unfinished, folder / UNFINISHED
        after.mkdir(parents=True, exist_ok=True)
        for file in set(self._where.values()):
            shutil.copyfile(before / file, after / file)
            fsync_path(after / file)
        shutil.rmtree(before, ignore_errors=True)
        self.folder = folder

    def discard(self) -> None:
        """Remove what there is of an incomplete model."""
        shutil.rmtree(self._unfinished, ignore_errors=True)
        with contextlib.suppress(OSError):
            self.folder.rmdir()  # if there is nothing else

    @property
    def missing_bytes(self) -> int:
        """Bytes of the model that are not written yet."""
        spec = self.spec.without_adapters()
        stages = (layout_of_stage(spec, self.layers, stage) for stage in range(len(self.layers)))
        return self.dtype.itemsize * sum(place.size for places in stages for place in places) - self._bytes

    @property
    def _unfinished(self) -> Path:
        return self.folder / UNFINISHED

    def _finish(self) -> None:
        index = {"metadata": {"total_size": self._bytes, **run_field(self.run_id)}, "weight_map": self._where}
        config = deepcopy(self.spec.config)
        config.architectures = [type(self.spec.skeleton).__name__]
        config.dtype = self.dtype
        self.tokenizer.save(self._unfinished)
        ids = special_ids(self._unfinished, config)
        for name in ids.keys() - {"pad_token_id"}:  # a padding token would change the embedding
            setattr(config, name, ids[name])
        config.save_pretrained(self._unfinished)
        _Generation(**ids).save_pretrained(self._unfinished)
        card = ModelCard(config, self.layers, self._bytes // self.dtype.itemsize, self.run, self.iterations, self.score)
        (self._unfinished / CARD_FILE).write_text(card.text() + "\n", encoding="utf-8")
        (self._unfinished / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
        if self._bridges:
            held = [self._bridges[stage] for stage in sorted(self._bridges)]
            write_bridges(self._unfinished, self.layers, held, dtype=self.dtype)
        for path in self._unfinished.iterdir():
            fsync_path(path)
        for path in sorted(self._unfinished.iterdir()):
            path.replace(self.folder / path.name)
        self._unfinished.rmdir()
        fsync_path(self.folder)


def hub_api(name: str) -> Any:
    """The hub's interface; UserError if this machine has no token for it, before anything is made to upload."""
    hub = require("huggingface_hub", "train", "--push")
    if name.count("/") > 1:
        raise UserError(f"--push: '{name}' is no name of a model on the hub; give NAME or ORGANISATION/NAME")
    if hub.get_token() is None:
        raise UserError(
            "--push: there is no token for the Hugging Face hub; 'hf auth login' stores one, or set HF_TOKEN"
        )
    return hub.HfApi()


def push(api: Any, folder: Path, name: str, *, private: bool) -> str:
    """Upload all files of a folder as a model; gives its address."""
    try:
        address = api.create_repo(name, private=private, exist_ok=True)
        api.upload_folder(
            repo_id=address.repo_id, folder_path=str(folder), commit_message="Model trained with SkipPipe"
        )
    except Exception as error:  # of the network, the hub, or its library
        raise UserError(
            f"--push: the Hugging Face hub did not take '{name}': {first_line(error)}; the model is in {folder}, and "
            f"where there is a network, 'hf upload {name} {folder}' uploads it"
        ) from None
    return str(address)
