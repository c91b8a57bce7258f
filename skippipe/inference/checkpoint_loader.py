"""Loads a trained model, cut into stages: a checkpoint, a run's output folder, a Hugging Face folder, or one built in.

A checkpoint records its stages. So does a folder that `skippipe export` wrote: it has one file for each stage, and the
first one holds embedding and head. Weights have their names of the whole model, so any other cut can be loaded too.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from skippipe.checkpoint.adapters import base_of, read_base
from skippipe.checkpoint.bridges_file import (
    BRIDGES_FILE,
    StandInsInfo,
    bridges_info,
    load_bridges,
    new_stand_ins,
    stored_values,
)
from skippipe.checkpoint.format import MANIFEST, Manifest, check_file, read_manifest, verified
from skippipe.checkpoint.locate import locate_checkpoint
from skippipe.errors import UserError, first_line
from skippipe.model.flat_params import layout_of_stage
from skippipe.model.lora import A, B, merged
from skippipe.model.model_files import GENERATION, ONE_FILE, check_model_folder, reads_more, text_name, weight_map_of
from skippipe.model.model_spec import LAYER, ROUTER_BIAS, ModelSpec, config_from, config_named, parse_devices
from skippipe.model.spread_layers import SpreadLayers, inference_devices, replica_devices
from skippipe.model.stage import StageModel, layer_ranges
from skippipe.model.stand_ins import is_stand_in
from skippipe.runs.tail import read_object
from skippipe.stage_subset import whole_numbers
from skippipe.workload import Workload

log = logging.getLogger(__name__)
_Language: Any = AutoModelForCausalLM  # untyped
_Tokenizer: Any = AutoTokenizer
WEIGHTS = ".weights.safetensors"  # suffix of a checkpoint's files with weights
PROBES, PROBE_BYTES = 16, 2**16  # parts of a file of weights that its fingerprint is made of


@dataclass(frozen=True)
class StagedModel:
    """A model in stages, all of them in this process."""

    stages: list[StageModel]
    tokenizer: Any
    """A tokenizer of transformers: what it adds to a text, the harness's own models get too."""
    prefix: int
    """The token before a text without context: the one that begins a text, or else that ends one."""
    context: int
    """Tokens that the model attends to, at most."""
    device: str
    end_tokens: frozenset[int] = frozenset()
    """Tokens that end a text."""

    @property
    def layers(self) -> tuple[int, ...]:
        """Number of layers of each stage."""
        return tuple(len(stage.layers) for stage in self.stages)

    @property
    def stand_ins(self) -> bool:
        """Whether it has bridges or adapters for missing stages."""
        return any(stage.stand_ins is not None for stage in self.stages)


@dataclass(frozen=True)
class CheckpointOutline:
    """A model on disk, without its weights."""

    place: Path
    spec: ModelSpec
    layers: tuple[int, ...]
    """Number of layers of each stage."""
    stand_ins: StandInsInfo | None = None
    """Bridges and adapters for missing stages, if it has any."""

    def tokenizer(self) -> Any:
        return _tokenizer(self.place, self.spec.config.vocab_size)

    def end_tokens(self, tokenizer: Any) -> frozenset[int]:
        """Tokens that end a text: by the model's configuration, its tokenizer, and generation_config.json, which in
        folders of chat models often has one that the others do not name."""
        folder = self.place.parent if (self.place / MANIFEST).is_file() else self.place  # beside a run's checkpoints
        settings = read_object(folder / GENERATION) or {}
        found: set[int] = set()
        for named in (self.spec.config.eos_token_id, tokenizer.eos_token_id, settings.get("eos_token_id")):
            found.update(each for each in (named if isinstance(named, list) else [named]) if isinstance(each, int))
        return frozenset(found)


def load(
    checkpoint: Path,
    cut: str | None = None,
    device: str = "cpu",
    context: int | None = None,
    *,
    stand_ins: bool = True,
) -> StagedModel:
    """A model cut into so many stages ("6"), or into stages of so many layers ("4,4,6"); `cut` None: as it was trained.

    `device` may name several (`cuda:0-3`): layers are spread over them. With `cuda` as many are used as are needed.
    `context` replaces the number of tokens that the configuration allows. Without `stand_ins`, bridges and adapters are
    not read, and the model may be cut in any way.
    """
    parse_devices(device)
    outline = read_outline(checkpoint, cut, stand_ins=stand_ins)
    return _load(outline, lambda size: [inference_devices(device, size)], context)[0]


def load_replicas(
    checkpoint: Path, cut: str | None = None, device: str = "cpu", context: int | None = None
) -> list[StagedModel]:
    """The same model once for each of several devices, or for each group of them that can hold it; else as `load`."""
    parse_devices(device)
    return _load(read_outline(checkpoint, cut), lambda size: replica_devices(device, size), context)


def _load(
    outline: CheckpointOutline, groups: Callable[[int], list[list[str]]], context: int | None = None
) -> list[StagedModel]:
    """The model on each of the groups of devices, which are chosen by its number of bytes."""
    place, spec, tokenizer = outline.place, outline.spec, outline.tokenizer()
    prefix = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
    if prefix is None:
        raise UserError(f"{place}: its tokenizer names no token that begins or ends a text ('eos_token')")
    if (place / MANIFEST).is_file():
        weights = _checkpoint_weights(place)
    elif reads_more(place):
        weights = select_weights(outline, {slot.name for slot in layout_of_stage(spec, (spec.layers,), 0)})
    else:
        weights = _folder_weights(place, spec.config)
    beside = stored_values(place) if outline.stand_ins else 0
    whole_bytes = 4 * (sum(each.numel() for each in weights.values()) + beside)
    attended = context_of(spec.config, context)
    found = []
    for devices in groups(whole_bytes):
        spread = SpreadLayers(devices, whole_bytes)
        stages = []
        for number, each in enumerate(layer_ranges(outline.layers)):
            stage = StageModel(spec, each, ends=number == 0)
            _add_stand_ins(stage, outline, number)
            _fill(stage, weights, place)
            stages.append(spread.place(stage))
        found.append(StagedModel(stages, tokenizer, prefix, attended, devices[0], outline.end_tokens(tokenizer)))
    return found


def context_of(config: Any, wanted: int | None) -> int:
    """Tokens that a model of this configuration attends to, at most; a warning if it is not made for so many."""
    longest = longest_context(config)
    if wanted is not None and wanted > longest:
        log.warning(
            "--context %s: by its config the model is made for %s tokens (max_position_embeddings and rope_scaling); "
            "answers to longer texts may be nonsense",
            *(f"{wanted:,}", f"{longest:,}"),
        )
    return wanted or int(config.max_position_embeddings)


def longest_context(config: Any) -> int:
    """Tokens that a model is made for: as vLLM counts, more than `max_position_embeddings` if these are stretched."""
    rope, length = getattr(config, "rope_parameters", None) or {}, int(config.max_position_embeddings)
    match rope.get("rope_type"):
        case "linear":
            return max(length, int(length * rope["factor"]))
        case "yarn":
            return max(length, int((rope.get("original_max_position_embeddings") or length) * rope["factor"]))
    return length


def read_outline(checkpoint: Path, cut: str | None = None, *, stand_ins: bool = True) -> CheckpointOutline:
    """The model at this place, cut as by `load`."""
    place = locate_checkpoint(checkpoint)
    check_model_folder(place)
    if (place / MANIFEST).is_file():
        manifest = read_manifest(place)
        config, known = config_from(manifest.config), manifest.layers
        trained = StandInsInfo(known, manifest.bridges, manifest.adapters, repeats=manifest.repeats)
    else:
        config, known = config_named(str(place.resolve())), exported_layers(weight_map_of(place))
        trained = StandInsInfo(known)
    spec, info = ModelSpec(config), None
    known = known if sum(known) == spec.layers else ()  # there may be layers that only predict further tokens
    if stand_ins:
        info = trained if trained.bridges or trained.adapters else bridges_info(place, spec.layers)
    known = info.layers if info else known
    layers = layers_of(cut, spec) if cut is not None else known or (spec.layers,)
    if info and layers != known:
        stages = f"for stages of {','.join(map(str, known))} layers; leave --cut out"
        if info is trained:
            raise UserError(f"--cut {cut}: the bridges of {place} are {stages}")
        raise UserError(f"--cut {cut}: {place / BRIDGES_FILE} is {stages}, or take that file away")
    return CheckpointOutline(place, spec, layers, info)


def load_stage(outline: CheckpointOutline, number: int) -> StageModel:
    """One stage alone, in host memory; the weights of other stages are not read, unless the files have other names for
    them."""
    stage = StageModel(outline.spec, layer_ranges(outline.layers)[number], ends=number == 0)
    _add_stand_ins(stage, outline, number)
    _fill(stage, select_weights(outline, {name for name, _ in _stored_with(stage, outline.place)}), outline.place)
    return stage


def fingerprint(place: Path) -> str:
    """A digest of a checkpoint or a folder: tells one set of weights from another, without reading all of them."""
    digest = sha256()
    if (place / MANIFEST).is_file():  # it has a hash of every file
        digest.update((place / MANIFEST).read_bytes())
        if not read_manifest(place).trains_adapters:
            return digest.hexdigest()
        place = base_of(place)
    for file in sorted(each for each in place.iterdir() if each.suffix == ".safetensors"):
        size = file.stat().st_size
        digest.update(f"{file.name} {size}".encode())
        with file.open("rb") as opened:
            for probe in range(PROBES):
                opened.seek(probe * max(0, size - PROBE_BYTES) // (PROBES - 1))
                digest.update(opened.read(PROBE_BYTES))
    return digest.hexdigest()


def layers_of(cut: str, spec: ModelSpec) -> tuple[int, ...]:
    """Number of layers of each stage, by `--cut`."""
    counts = whole_numbers(cut, "--cut")
    if len(counts) == 1:
        if not counts[0]:
            raise UserError("--cut: a model has 1 stage or more")
        return Workload(spec.shape).layer_split(counts[0])
    if 0 in counts or sum(counts) != spec.layers:
        raise UserError(f"--cut {cut}: the model has {spec.layers} layers, and every stage 1 or more of them")
    return counts


def exported_layers(weight_map: Mapping[str, str]) -> tuple[int, ...]:
    """Number of layers of each stage, if every file of weights is a stage; else empty."""
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


def _checkpoint_weights(place: Path) -> dict[str, Tensor]:
    weights: dict[str, Tensor] = {}
    manifest = verified(place)
    for file in manifest.files:
        if file.name.endswith(WEIGHTS):
            weights |= load_file(place / file.name)
    return _with_base(place, manifest, weights) if manifest.trains_adapters else weights


def _with_base(
    place: Path, manifest: Manifest, trained: Mapping[str, Tensor], names: Iterable[str] | None = None
) -> dict[str, Tensor]:
    """Weights of these names, by default all, of a checkpoint that has only what was `trained` beside them."""
    base = base_of(place)
    own = weight_map_of(base) if names is None else [name for name in names if not is_stand_in(name)]
    stand_ins = {name: each for name, each in trained.items() if is_stand_in(name)}
    return merged(read_base(base, own), trained, manifest.lora) | stand_ins


def _folder_weights(place: Path, config: Any) -> dict[str, Tensor]:
    """Weights through transformers, which knows the many ways in which they are stored; of safetensors files alone."""
    weight_map_of(place)  # refuses an index that names files elsewhere
    if not any(place.glob("*.safetensors")):
        raise UserError(f"{place}: has no weights in safetensors files, and others (pickle) are not read; convert them")
    try:
        model, info = _Language.from_pretrained(
            place,
            config=config,
            dtype=torch.float32,
            local_files_only=True,
            output_loading_info=True,
            trust_remote_code=False,
            use_safetensors=True,
        )
    except (OSError, ValueError, RuntimeError, KeyError, SafetensorError) as error:
        raise UserError(f"{place}: transformers cannot load it: {first_line(error)}") from None
    if info["missing_keys"]:
        raise UserError(f"{place}: has no tensor '{min(info['missing_keys'])}'")
    biases = {name: each for name, each in model.named_buffers() if name.endswith(f".{ROUTER_BIAS}")}
    return {**dict(model.named_parameters()), **biases}


def select_weights(outline: CheckpointOutline, names: set[str]) -> dict[str, Tensor]:
    """The weights of these names; all of them where the files have other names."""
    place = outline.place
    if (place / MANIFEST).is_file():
        weights: dict[str, Tensor] = {}
        manifest = read_manifest(place)
        maps = {name.removesuffix(".weight") for name in names}
        wanted = names | {of + end for of in maps for end in (A, B)} if manifest.lora.rank else names
        for file in manifest.files:
            if file.name.endswith(WEIGHTS) and (found := _read_tensors(place / file.name, wanted)):
                check_file(place, file)
                weights |= found
        return _with_base(place, manifest, weights, names) if manifest.trains_adapters else weights
    weights = {}
    for name in sorted(set(weight_map_of(place).values())) or [ONE_FILE]:
        if (place / name).is_file():
            weights |= _read_tensors(place / name, names)
    if weights.keys() >= names:
        return weights
    if reads_more(place):
        raise UserError(f"{place}: has no tensor '{min(names - weights.keys())}' of its text model")
    return _folder_weights(place, outline.spec.config)


def _read_tensors(file: Path, names: set[str]) -> dict[str, Tensor]:
    try:
        with safe_open(file, "pt") as opened:
            there = {text_name(name): name for name in opened.keys()}  # noqa: SIM118 (it is no dictionary)
            return {name: opened.get_tensor(there[name]) for name in there.keys() & names}
    except (OSError, SafetensorError) as error:
        raise UserError(f"{file}: cannot be read: {error}") from None


def _tokenizer(place: Path, vocabulary: int) -> Any:
    try:
        found = _Tokenizer.from_pretrained(place, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # any error of its hundred tokenizers
        raise UserError(f"{place}: no tokenizer that transformers reads: {first_line(error)}") from None
    if len(found) > vocabulary:
        raise UserError(f"{place}: its tokenizer has {len(found):,} tokens, the model {vocabulary:,}")
    return found


def _add_stand_ins(stage: StageModel, outline: CheckpointOutline, number: int) -> None:
    """Bridges and adapters, if the model has any: as their file has them, or to be filled with weights that lie among
    those of a checkpoint."""
    info, place = outline.stand_ins, outline.place
    if info is None:
        return
    if (place / MANIFEST).is_file():
        stage.stand_ins = new_stand_ins(info, number, stage).eval()
    else:
        stage.stand_ins = load_bridges(place, info, number, stage).eval()


def _stored_with(stage: StageModel, place: Path) -> Iterator[tuple[str, nn.Parameter]]:
    """The weights of a stage that lie among those of the model."""
    yield from stage.named_weights()
    if stage.stand_ins is not None and (place / MANIFEST).is_file():
        yield from stage.stand_ins.named_weights()


@torch.no_grad()
def _fill(stage: StageModel, weights: Mapping[str, Tensor], place: Path) -> None:
    for name, each in _stored_with(stage, place):
        stored = weights.get(name)
        if stored is None:
            raise UserError(f"{place}: has no tensor '{name}'")
        if stored.shape != each.shape:
            raise UserError(f"{place}: '{name}' has the shape {list(stored.shape)}, not {list(each.shape)}")
        each.copy_(stored)
