"""Weights that come in from the nodes, stage by stage, into a Hugging Face folder that transformers loads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from skippipe.jsonfile import write_text
from skippipe.model.blueprint import Blueprint
from skippipe.model.weights import layout_of_stage
from skippipe.text.tokenizer import TextTokenizer
from skippipe.transport.packed import unpack


class ModelFolder:
    """Takes the flat weights of one stage after another; holds one stage at a time."""

    def __init__(
        self,
        folder: Path,
        layers: tuple[int, ...],
        blueprint: Blueprint,
        tokenizer: TextTokenizer,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        """`layers` of each stage; `dtype` of what is written."""
        self._dtype = dtype
        self._folder = folder
        self._blueprint = blueprint
        self._tokenizer = tokenizer
        self._layers = layers
        self._pieces: list[torch.Tensor] = []
        self._where: dict[str, str] = {}
        self._bytes = 0

    def store(self, stage: int, number: int, piece: Any) -> None:
        """A piece of the stage; None ends it. With number 0 the stage begins, perhaps again."""
        if number == 0:
            self._pieces = []
        if piece is not None:
            self._pieces.append(unpack(piece))
            return
        flat = torch.cat(self._pieces)
        self._pieces = []
        self.store_flat(stage, flat)

    def store_flat(self, stage: int, flat: torch.Tensor) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        weights = {
            place.name: flat[place.start : place.start + place.size].view(place.shape).to(self._dtype).contiguous()
            for place in layout_of_stage(self._blueprint, self._layers, stage)
        }
        file = f"model-{stage + 1:05d}-of-{len(self._layers):05d}.safetensors"
        save_file(weights, self._folder / file, metadata={"format": "pt"})
        self._where |= dict.fromkeys(weights, file)
        self._bytes += self._dtype.itemsize * len(flat)
        if stage + 1 == len(self._layers):
            self._finish()

    def _finish(self) -> None:
        index = {"metadata": {"total_size": self._bytes}, "weight_map": self._where}
        write_text(self._folder / "model.safetensors.index.json", json.dumps(index, indent=2) + "\n")
        config = self._blueprint.config
        config.architectures = [type(self._blueprint.skeleton).__name__]
        config.dtype = self._dtype
        config.save_pretrained(self._folder)
        self._tokenizer.save(self._folder)
