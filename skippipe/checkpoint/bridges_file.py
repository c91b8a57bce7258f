"""`bridges.safetensors`: bridges and adapters of a model, one more file in its Hugging Face folder.

Without it the folder is an ordinary model. With it the model answers better when stages are missing, and is the same
when none is. The file's metadata:

    skippipe_bridges   version of this format: "1", or "2" with repeats
    layers             layers of each stage, as in "2,2,2": bridges and adapters are for these stages alone
    bridges            rank of the bridges; "0": there are none
    adapters           rank of the adapters; "0": there are none
    adapter_scale      how strong adapters are where k of S stages are missing: "missing": 2k/S times. "hop": those of
                       their own for each number of stages that the hop from a stage leaves out. "hop 256": the last
                       256 of the rank as with "hop", those before as with "missing"
    repeats            how many of the stages that are missing after a stage it takes the place of; the adapters' rank
                       is divided equally among these turns and its own, which is the first. Left out: "0"

Tensors, of a model of S stages and d channels (n = S − stage − 1 is how many bridges begin at a stage: to the stages
from the next but one on, and to the head):

    bridges.STAGE.down [n, d, rank]   bridges.STAGE.up [n, rank, d]   bridges.STAGE.gain [n, d]
    gates.STAGE [repeats, d]          by what that which the layers add in each of these turns is multiplied
    MAP.adapter_down [rank, inputs]   MAP.adapter_up [outputs, rank], for every linear map of every layer, as in
                                      model.layers.3.self_attn.q_proj
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import zip_longest
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from skippipe.checkpoint.format import save_tensors
from skippipe.errors import UserError
from skippipe.model.model_spec import ModelSpec
from skippipe.model.stage import StageModel
from skippipe.model.stand_ins import ADAPTER, BRIDGE, Bridges, StageAdapters, StandIns, is_bridge

BRIDGES_FILE = "bridges.safetensors"
VERSION, REPEATS_VERSION = "1", "2"
DIGITS = 6  # of a number in the metadata
BY_MISSING, BY_HOP = "missing", "hop"


@dataclass(frozen=True)
class StandInsInfo:
    """What a folder has for missing stages."""

    layers: tuple[int, ...]
    """Layers of each stage."""
    bridges: int = 0
    """Rank of the bridges; 0: there are none."""
    adapters: int = 0
    """Rank of the adapters; 0: there are none."""
    hop_rank: int = 0
    """The part of the adapters' rank that is divided among hops of different length."""
    repeats: int = 0
    """Stages that a stage takes the place of, of those that are missing after it."""

    @classmethod
    def of(cls, spec: ModelSpec, layers: tuple[int, ...]) -> StandInsInfo:
        """What is trained with stages of so many layers."""
        return cls(layers, spec.bridges, spec.adapters, repeats=spec.repeats)

    def turns(self, stage: int) -> int:
        """How often a token passes a stage's layers at most, by the path on which all stages after it are missing. The
        stage has a KV cache for each of these turns."""
        return 1 + min(self.repeats, len(self.layers) - 1 - stage)

    @property
    def metadata(self) -> dict[str, str]:
        repeats = {"repeats": str(self.repeats)} if self.repeats else {}
        return {
            "format": "pt",
            "skippipe_bridges": REPEATS_VERSION if repeats else VERSION,
            "layers": ",".join(map(str, self.layers)),
            "bridges": str(self.bridges),
            "adapters": str(self.adapters),
            "adapter_scale": self._adapter_scale,
            **repeats,
        }

    @property
    def _adapter_scale(self) -> str:
        if not self.hop_rank:
            return BY_MISSING
        return BY_HOP if self.hop_rank == self.adapters else f"{BY_HOP} {self.hop_rank}"


def write_bridges(
    folder: Path,
    layers: tuple[int, ...],
    bridges: Sequence[Bridges],
    adapters: Sequence[StageAdapters] = (),
    *,
    hop_rank: int = 0,
    dtype: torch.dtype = torch.float32,
) -> Path:
    """Write those of all stages, in the order of the stages; OSError if it cannot be written."""
    ranks = [each.down.shape[1] // each.width for each in bridges[:1]], [each.rank for each in adapters[:1]]
    info = StandInsInfo(layers, sum(ranks[0]), sum(ranks[1]), hop_rank, adapters[0].repeats if adapters else 0)
    pairs = zip_longest(bridges, adapters)
    stages = [dict(weight for each in pair if each is not None for weight in each.named_weights()) for pair in pairs]
    return write_stand_ins(folder, info, stages, dtype)


def write_stand_ins(
    folder: Path, info: StandInsInfo, stages: Iterable[Mapping[str, Tensor]], dtype: torch.dtype = torch.float32
) -> Path:
    """Write the weights of all stages, under the names by which they are trained; OSError if it cannot be written."""
    tensors = {
        _stored_name(name, number): _stored_shape(name, each, info, number)
        for number, held in enumerate(stages)
        for name, each in held.items()
    }
    file = folder / BRIDGES_FILE
    kept = {name: each.detach().to("cpu", dtype).contiguous() for name, each in tensors.items()}
    save_tensors(kept, file, info.metadata)
    return file


def bridges_info(folder: Path, layers: int) -> StandInsInfo | None:
    """What a folder with a model of so many layers has; None: it has no such file."""
    file = folder / BRIDGES_FILE
    if not file.is_file():
        return None
    with _opened(file) as opened:
        found = opened.metadata() or {}
    version = found.get("skippipe_bridges")
    if version not in (VERSION, REPEATS_VERSION):
        raise UserError(
            f"{file}: has format '{version}', and this version of skippipe reads {VERSION} and {REPEATS_VERSION}; "
            "make it anew"
        )
    counts = [_whole(file, "layers", word) for word in found.get("layers", "").split(",")[: layers + 1]]
    if sum(counts) != layers or 0 in counts or len(counts) < 2:
        raise UserError(f"{file}: is for {len(counts)} stages of {sum(counts)} layers; the model has {layers} layers")
    bridges, adapters = (_whole(file, name, found.get(name, "")) for name in ("bridges", "adapters"))
    scale = found.get("adapter_scale", "")
    kind, _, part = scale.partition(" ")
    hop_rank = (_whole(file, "adapter_scale", part) if part else adapters) if kind == BY_HOP else 0
    if (scale != BY_MISSING and (kind != BY_HOP or hop_rank > adapters)) or not (bridges or adapters):
        raise UserError(f"{file}: neither bridges nor adapters, or an adapter_scale that is not known, '{scale[:20]}'")
    repeats = _whole(file, "repeats", found.get("repeats", "0"))
    if repeats and (hop_rank or not adapters or adapters % (repeats + 1)):
        raise UserError(f"{file}: {repeats} repeats do not go with adapters of rank {adapters}, or with those by hop")
    return StandInsInfo(tuple(counts), bridges, adapters, hop_rank, repeats)


def stored_values(folder: Path) -> int:
    """Values of all tensors of the file in a folder; 0: there is none."""
    if not (file := folder / BRIDGES_FILE).is_file():
        return 0
    with _opened(file) as opened:
        return sum(prod(opened.get_slice(name).get_shape()) for name in opened.keys())  # noqa: SIM118 (no mapping)


def new_stand_ins(info: StandInsInfo, number: int, stage: StageModel) -> StandIns:
    """Bridges that begin at a stage of this number, and adapters, which its linear maps have from then on."""
    stages, width = len(info.layers), stage.spec.config.hidden_size
    bridges = Bridges(number, stages, width, info.bridges, 0) if info.bridges and number < stages - 1 else None
    adapters = StageAdapters(stage, info.adapters, 0, info.repeats) if info.adapters else None
    return StandIns(stages, bridges, adapters, info.hop_rank)


def load_bridges(folder: Path, info: StandInsInfo, number: int, stage: StageModel) -> StandIns:
    """Those of a stage of this number, as the file has them."""
    stored, found = read_stand_ins(folder, info, number, stage), new_stand_ins(info, number, stage)
    fill_stand_ins(stored, found)
    return found


def read_stand_ins(folder: Path, info: StandInsInfo, number: int, stage: StageModel) -> dict[str, Tensor]:
    """The weights of the bridges that begin at a stage of this number, and of its adapters, under the names by which
    they are trained; UserError unless they have the shapes that the info and the stage say, which is known before
    anything is made as large as the info says."""
    file, expected = folder / BRIDGES_FILE, dict(_expected_shapes(info, number, stage))
    if not expected:
        return {}
    with _opened(file) as opened:
        there, names = set(opened.keys()), {trained: _stored_name(trained, number) for trained in expected}
        for trained, name in names.items():
            shape = expected[trained]
            if name not in there:
                raise UserError(f"{file}: has no tensor '{name}'")
            if (stored := opened.get_slice(name)).get_shape() != list(shape) or "F" not in stored.get_dtype():
                raise UserError(
                    f"{file}: '{name}' has the shape {stored.get_shape()} of {stored.get_dtype()}, not {list(shape)} "
                    "of floating-point numbers"
                )
        return {trained: opened.get_tensor(name) for trained, name in names.items()}


@torch.no_grad()
def fill_stand_ins(stored: Mapping[str, Tensor], *parts: StandIns | Bridges | StageAdapters) -> None:
    """Give what is of a stage the values that `read_stand_ins` found."""
    for name, each in (weight for part in parts for weight in part.named_weights()):
        each.copy_(stored[name].view(each.shape))


def _expected_shapes(info: StandInsInfo, number: int, stage: StageModel) -> Iterator[tuple[str, tuple[int, ...]]]:
    """The shapes that the weights of a stage have in the file, by the names under which they are trained."""
    count, rank, width = len(info.layers) - number - 1, info.bridges, stage.spec.config.hidden_size
    if rank and count:
        for part, shape in (("down", (count, width, rank)), ("up", (count, rank, width)), ("gain", (count, width))):
            yield f"{BRIDGE}{number}.{part}", shape
    for name, module in stage.linear_maps() if info.adapters else ():
        yield f"{ADAPTER}{name}.down", (info.adapters, module.in_features)
        yield f"{ADAPTER}{name}.up", (module.out_features, info.adapters)
    if info.repeats:
        yield f"{ADAPTER}{stage.numbers.start}.gates", (info.repeats, width)


def _stored_name(name: str, number: int) -> str:
    """The name in the file of a weight of a stage of this number, by the name under which it is trained."""
    if is_bridge(name):
        return name
    of, _, part = name.removeprefix(ADAPTER).rpartition(".")
    return f"gates.{number}" if part == "gates" else f"{of}.adapter_{part}"


def _stored_shape(name: str, each: Tensor, info: StandInsInfo, number: int) -> Tensor:
    """A weight, which may be flat while it is trained, as the file has it."""
    if not is_bridge(name):
        return each if each.dim() > 1 else each.view(info.repeats, -1)
    count, rank, part = len(info.layers) - number - 1, info.bridges, name.rpartition(".")[2]
    return each.view({"down": (count, -1, rank), "up": (count, rank, -1), "gain": (count, -1)}[part])


def _whole(file: Path, name: str, text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= DIGITS):
        raise UserError(f"{file}: {name}: '{text[:20]}' in its metadata is no whole number of up to {DIGITS} digits")
    return int(text)


@contextmanager
def _opened(file: Path) -> Iterator[Any]:
    try:
        with safe_open(file, "pt") as opened:
            yield opened
    except (OSError, SafetensorError) as error:
        raise UserError(f"{file}: cannot be read: {error}") from None
