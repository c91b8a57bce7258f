"""A trained model from disk, cut into stages: a checkpoint, a run's output folder or any Hugging Face folder.

A checkpoint knows its stages. So does a folder that `skippipe export` wrote: it has one file for each, and the first
one holds both ends. Weights lie under the names that they have in the whole model, so another cut is as good.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from skippipe.errors import UserError
from skippipe.jsonfile import exists, read_json
from skippipe.model.blueprint import Blueprint, config_from, config_named
from skippipe.model.rebuilding import LAYER
from skippipe.model.stage import StageModel, layer_ranges
from skippipe.parts import whole_numbers
from skippipe.runtime.building import check_device
from skippipe.training.checkpoint import MANIFEST, Checkpoints, verified
from skippipe.workload import Workload

_Language: Any = AutoModelForCausalLM  # untyped
_Tokenizer: Any = AutoTokenizer
INDEX = "model.safetensors.index.json"


@dataclass(frozen=True)
class StagedModel:
    stages: list[StageModel]
    tokenizer: Any
    """Of transformers: whatever it adds to a text, the harness's own models get too."""
    prefix: int
    """The token that stands before a text without context: the one that begins a text, or else that ends one."""
    context: int
    """Tokens that it looks at, at most."""
    device: str

    @property
    def layers(self) -> tuple[int, ...]:
        """Of each stage."""
        return tuple(len(stage.layers) for stage in self.stages)


@dataclass(frozen=True)
class _Stored:
    config: Any
    weights: Mapping[str, Tensor]
    layers: tuple[int, ...]
    """Of each stage; empty: it does not say."""


def load(checkpoint: Path, cut: str | None = None, device: str = "cpu", context: int | None = None) -> StagedModel:
    """`cut` into so many stages ("6"), or into stages of so many layers ("4,4,6"); None: as it was trained.

    `context`: look at so many tokens instead of those that the configuration allows.
    """
    check_device(device)
    place = found_place(checkpoint)
    stored = _from_checkpoint(place) if (place / MANIFEST).is_file() else _from_folder(place)
    blueprint = Blueprint(stored.config)
    tokenizer = _tokenizer(place, stored.config.vocab_size)
    prefix = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
    if prefix is None:
        raise UserError(f"{place}: its tokenizer names no token that begins or ends a text ('eos_token')")
    layers = layers_of(cut, blueprint) if cut is not None else stored.layers or (blueprint.layers,)
    stages = []
    for number, each in enumerate(layer_ranges(layers)):
        stage = StageModel(blueprint, each, ends=number == 0).eval()
        _fill(stage, stored.weights, place)
        stages.append(stage.to(device))
    return StagedModel(stages, tokenizer, prefix, context or stored.config.max_position_embeddings, device)


def found_place(checkpoint: Path) -> Path:
    """A checkpoint, a Hugging Face folder, or what a run's output folder has: its newest checkpoint or its model."""
    if not exists(checkpoint):
        raise UserError(f"{checkpoint}: no such folder")
    for place in (checkpoint, *Checkpoints(checkpoint / "checkpoints").complete()[:1], checkpoint / "model"):
        if (place / MANIFEST).is_file() or (place / "config.json").is_file():
            return place
    raise UserError(
        f"{checkpoint}: neither a checkpoint, nor a run's output folder, nor a Hugging Face folder with a config.json"
    )


def layers_of(cut: str, blueprint: Blueprint) -> tuple[int, ...]:
    """Layers of each stage."""
    counts = whole_numbers(cut, "--cut")
    if len(counts) == 1:
        if not counts[0]:
            raise UserError("--cut: a model has 1 stage or more")
        return Workload(blueprint.shape).layer_split(counts[0])
    if 0 in counts or sum(counts) != blueprint.layers:
        raise UserError(f"--cut {cut}: the model has {blueprint.layers} layers, and every stage 1 or more of them")
    return counts


def exported_layers(weight_map: Mapping[str, str]) -> tuple[int, ...]:
    """Layers of each stage, if the files that hold the weights are stages; else nothing."""
    held: dict[str, set[int]] = {file: set() for file in sorted(set(weight_map.values()))}
    first = next(iter(held), None)
    for name, file in weight_map.items():
        layer = LAYER.match(name)
        if layer is not None:
            held[file].add(int(layer[1]))
        elif file != first:  # transformers puts the last norm into the last file
            return ()
    counts = tuple(map(len, held.values()))
    in_order = [sorted(numbers) for numbers in held.values()] == [list(each) for each in layer_ranges(counts)]
    return counts if in_order and 0 not in counts else ()


def _from_checkpoint(place: Path) -> _Stored:
    manifest = verified(place)
    weights: dict[str, Tensor] = {}
    for file in manifest.files:
        if file.name.endswith(".weights.safetensors"):
            weights |= load_file(place / file.name)
    return _Stored(config_from(manifest.config), weights, manifest.layers)


def _from_folder(place: Path) -> _Stored:
    """Through transformers, which knows in how many ways weights have been stored."""
    config = config_named(str(place.resolve()))
    try:
        model, said = _Language.from_pretrained(
            place, config=config, dtype=torch.float32, local_files_only=True, output_loading_info=True
        )
    except (OSError, ValueError, RuntimeError, KeyError, SafetensorError) as error:
        raise UserError(f"{place}: transformers cannot load it: {str(error).strip().splitlines()[0]}") from None
    if said["missing_keys"]:
        raise UserError(f"{place}: has no tensor '{min(said['missing_keys'])}'")
    index = read_json(place / INDEX) if (place / INDEX).is_file() else {}
    return _Stored(config, dict(model.named_parameters()), exported_layers(index.get("weight_map", {})))


def _tokenizer(place: Path, vocabulary: int) -> Any:
    try:
        found = _Tokenizer.from_pretrained(place, local_files_only=True)
    except Exception as error:  # whatever any of its hundred tokenizers raises
        reason = str(error).strip().partition("\n")[0]
        raise UserError(f"{place}: no tokenizer that transformers reads: {reason}") from None
    if len(found) > vocabulary:
        raise UserError(f"{place}: its tokenizer has {len(found):,} tokens, the model {vocabulary:,}")
    return found


@torch.no_grad()
def _fill(stage: StageModel, weights: Mapping[str, Tensor], place: Path) -> None:
    for name, each in stage.named_weights():
        stored = weights.get(name)
        if stored is None:
            raise UserError(f"{place}: has no tensor '{name}'")
        if stored.shape != each.shape:
            raise UserError(f"{place}: '{name}' has the shape {list(stored.shape)}, not {list(each.shape)}")
        each.copy_(stored)
