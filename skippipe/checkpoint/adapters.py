"""Adapters on disk: the weights that they are for, beside a run's checkpoints; and LoRA's as folders in peft's layout.

Checkpoints of a run that trains adapters hold these and their optimizer state alone. What is not trained lies in the
folder `base` beside them, a Hugging Face folder that is written once, before the first iteration. So whatever needs the
weights of a stage (a node that begins or joins, a lost stage, an export, a server) finds both halves in the run's own
folder.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from skippipe.checkpoint.format import save_tensors
from skippipe.errors import UserError
from skippipe.json_fields import Fields, fsync_path, json_text, read_json
from skippipe.model.lora import A, LoraConfig, is_adapter
from skippipe.model.model_files import ADAPTER, INDEX, weight_map_of

BASE = "base"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
PREFIX = "base_model.model."
"""What peft puts before the names of weights."""
UNLIKE = {
    "use_dora": False,
    "use_rslora": False,
    "fan_in_fan_out": False,
    "lora_bias": False,
    "bias": "none",
    "modules_to_save": None,
    "rank_pattern": {},
    "alpha_pattern": {},
    "exclude_modules": None,
    "trainable_token_indices": None,
    "target_parameters": None,
}
"""Settings of peft under which an adapter is another thing than here, and what they are if it is not."""
CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""Beginnings of peft's ways to start that change the model itself, too."""


def base_of(checkpoint: Path) -> Path:
    """The folder with the weights that the adapters of a checkpoint are for; UserError if it is not there."""
    folder = checkpoint.parent / BASE
    if not (folder / INDEX).is_file():
        raise UserError(
            f"{checkpoint}: holds adapters, and the weights that they are for are not in {folder}; put both back as "
            "the run left them"
        )
    return folder


def open_base(folder: Path) -> dict[str, Any]:
    """Name of a weight → the open file that holds it; files are mapped, so only what is needed is read."""
    weight_map = weight_map_of(folder)
    try:
        opened = {name: safe_open(folder / name, "pt") for name in set(weight_map.values())}
    except (OSError, SafetensorError) as error:
        raise UserError(f"{folder}: cannot be read: {error}") from None
    return {weight: opened[name] for weight, name in weight_map.items()}


def read_base(folder: Path, names: Iterable[str]) -> dict[str, Tensor]:
    """Weights of these names."""
    opened = open_base(folder)
    missing = [name for name in names if name not in opened]
    if missing:
        raise UserError(f"{folder}: has no tensor '{missing[0]}'")
    return {name: opened[name].get_tensor(name) for name in names}


def write_adapter(folder: Path, adapters: Mapping[str, Tensor], lora: LoraConfig, model: str) -> None:
    """Write an adapter as peft does; `model` is what it names as the model that the adapter is for. OSError if it
    cannot be written."""
    folder.mkdir(parents=True, exist_ok=True)
    alpha = int(lora.alpha) if lora.alpha == int(lora.alpha) else lora.alpha
    settings = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": model,
        "r": lora.rank,
        "lora_alpha": alpha,
        "target_modules": lora.targets,
        "lora_dropout": 0.0,
        "init_lora_weights": True,
        "inference_mode": True,
        **UNLIKE,
    }
    tensors = {PREFIX + name: each.contiguous() for name, each in adapters.items()}
    save_tensors(tensors, folder / ADAPTER_WEIGHTS, {"format": "pt"})
    (folder / ADAPTER).write_text(json_text(settings) + "\n", encoding="utf-8")
    fsync_path(folder / ADAPTER)
    fsync_path(folder)


def with_adapter(lora: LoraConfig) -> LoraConfig:
    """The settings with those of the adapter that training begins with; UserError if they differ, or if it is of a kind
    that is not supported."""
    if not lora.weights:
        return lora
    folder = Path(lora.weights)
    if not (folder / ADAPTER).is_file():
        raise UserError(f"lora.weights: {folder} is no adapter folder of peft: it has no {ADAPTER}")
    if not (folder / ADAPTER_WEIGHTS).is_file():
        raise UserError(f"lora.weights: {folder} has no {ADAPTER_WEIGHTS}; other files are not read")
    settings = read_json(folder / ADAPTER)
    if not isinstance(settings, dict) or settings.get("peft_type") != "LORA":
        raise UserError(f"lora.weights: {folder / ADAPTER} is not of a LoRA adapter")
    for name, usual in UNLIKE.items():
        if (value := settings.get(name, usual)) != usual and (value or usual):
            raise UserError(f"lora.weights: {folder} has {name} {json.dumps(value)}, which is not supported")
    start = settings.get("init_lora_weights")
    if isinstance(start, str) and start.lower().startswith(CHANGES_BASE):
        raise UserError(f"lora.weights: {folder} was begun by '{start}', which changes the model too; not supported")
    fields = Fields(settings, str(folder / ADAPTER))
    names = read_adapter(folder).keys()
    targets = sorted({name.removesuffix(A).rpartition(".")[2] for name in names if name.endswith(A)})
    found = LoraConfig(fields.integer("r"), fields.number("lora_alpha"), targets, lora.weights)
    default = LoraConfig()
    for name in ("rank", "alpha", "targets"):
        ours, theirs = getattr(lora, name), getattr(found, name)
        if ours not in (getattr(default, name), theirs) and not (name == "targets" and sorted(ours) == theirs):
            raise UserError(f"lora.{name}: {ours} here, {theirs} in {folder}; leave it out")
    return found


def read_adapter(folder: Path) -> dict[str, Tensor]:
    """The weights of an adapter, under their names here."""
    file = folder / ADAPTER_WEIGHTS
    try:
        with safe_open(file, "pt") as opened:
            found = {name.removeprefix(PREFIX): opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise UserError(f"{file}: cannot be read: {error}") from None
    others = [name for name in found if not is_adapter(name)]
    if others:
        raise UserError(f"{file}: '{others[0]}' is no weight of a LoRA adapter beside a linear map; not supported")
    return found
