"""LoRA: a matrix of low rank beside linear maps of the layers is trained, and the model itself stays as it is.

After Hu et al., "LoRA: Low-rank adaptation of large language models" (2021), as the library peft has it: a map W
becomes W + alpha/rank · B A. A is drawn at random and B is zero, so training begins with the model as it is. Weights
have peft's names, behind those of the map: `model.layers.3.self_attn.q_proj.lora_A.weight`.

This module is for the job file too, so torch is imported late.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated

from skippipe.errors import UserError
from skippipe.value_ranges import Range, check_ranges

if TYPE_CHECKING:
    from torch import Tensor

A, B = ".lora_A.weight", ".lora_B.weight"
"""How the names of an adapter's two matrices end, behind the name of the map."""


@dataclass(frozen=True)
class LoraConfig:
    rank: Annotated[int, Range(0, 100_000)] = 0
    """Rank of the adapters, the only weights that are then trained; 0: all weights of the model are trained. 16 is a
    good start; it needs model.weights, and often a learning.rate ten times that of full training."""
    alpha: Annotated[float, Range(0, 1e6, above=True)] = 32.0
    """What the adapters add is multiplied by alpha / rank."""
    targets: list[str] = field(default_factory=list)
    """Linear maps that get an adapter, by the end of their names, as in peft: "q_proj", "v_proj"; empty: all linear
    maps of the layers."""
    weights: str = ""
    """A folder with an adapter to begin with, as peft and 'skippipe export --adapter' write it; rank, alpha and targets
    are then taken from it. Empty: new adapters, by the seed."""

    def __post_init__(self) -> None:
        check_ranges(self, "lora")

    @property
    def scale(self) -> float:
        return self.alpha / self.rank

    def takes(self, name: str) -> bool:
        """Whether the linear map of this name gets an adapter."""
        return not self.targets or any(name == each or name.endswith(f".{each}") for each in self.targets)

    def resolved(self, maps: Iterable[str]) -> LoraConfig:
        """The same with all targets by name; `maps` are the names of all linear maps of the layers."""
        ends = {name.rpartition(".")[2] for name in maps if self.takes(name)}
        for each in self.targets:
            if not any(LoraConfig(targets=[each]).takes(name) for name in maps):
                there = ", ".join(sorted({name.rpartition(".")[2] for name in maps}))
                raise UserError(f"lora.targets: no linear map of the layers is called '{each}'; there are {there}")
        return LoraConfig(self.rank, self.alpha, self.targets or sorted(ends))


def is_adapter(name: str) -> bool:
    """Whether a weight of this name is of an adapter."""
    return name.endswith((A, B))


def initial(name: str, shape: tuple[int, ...], seed: int) -> Tensor:
    """The values with which a matrix of an adapter begins: they depend on the seed and its name alone."""
    from hashlib import sha256

    import torch

    if name.endswith(B):
        return torch.zeros(shape)
    digest = sha256(f"{seed}/{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    bound = 1 / math.sqrt(shape[1])  # kaiming_uniform_(a=√5), as in peft
    return torch.empty(shape, device="cpu").uniform_(-bound, bound, generator=generator)


def merged(weights: Mapping[str, Tensor], adapters: Mapping[str, Tensor], lora: LoraConfig) -> dict[str, Tensor]:
    """The weights with what their adapters add to them; those without an adapter are as they were."""
    found = dict(weights)
    for name in adapters:
        if name.endswith(A) and (of := name.removesuffix(A) + ".weight") in found:
            low, up = adapters[name].float(), adapters[name.removesuffix(A) + B].float()
            found[of] = found[of].float() + (up @ low) * lora.scale
    return found
