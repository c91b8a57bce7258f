"""Stages whose layers are spread over several devices, for inference with a model that does not fit one of them.

A stage looks as if it were on the first device: its layers' inputs are brought to them, and its output is brought back.
What it has beside its layers is on the first device, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from skippipe.model.model_spec import parse_devices
from skippipe.model.stage import StageModel
from skippipe.model.stand_ins import adapted_maps

ROOM = 1.25  # memory for each byte of weights and KV cache: activations take the rest


def inference_devices(text: str, needed_bytes: int, first: int = 0) -> list[str]:
    """The devices that a text names; of all GPUs of the machine (`cuda`) as many as are needed to hold so many bytes,
    because each more makes a token slower. The `first` may be any number: nodes of one machine take them in turn."""
    found = parse_devices(text)
    if text != "cuda":
        return found
    first %= len(found)
    found, free_bytes = [*found[first:], *found[:first]], 0
    for count, device in enumerate(found[:-1], 1):
        free_bytes += torch.cuda.mem_get_info(device)[0]  # not of more than are needed: asking takes memory there
        if free_bytes >= ROOM * needed_bytes:
            return found[:count]
    return found


def replica_devices(text: str, needed_bytes: int) -> list[list[str]]:
    """The devices that a text names, in groups of which each can hold so many bytes: most often of one device each. If
    all together cannot, they are one group. A worker on the processor (`cpu:4`) always can."""
    groups: list[list[str]] = []
    group: list[str] = []
    free_bytes = 0
    found = parse_devices(text)
    for device in found:
        group.append(device)
        if device != "cpu" and len(found) > 1:
            free_bytes += torch.cuda.mem_get_info(device)[0]
            if free_bytes < ROOM * needed_bytes:
                continue
        groups.append(group)
        group, free_bytes = [], 0
    return groups or [found]


def weight_bytes(module: nn.Module) -> int:
    return sum(each.numel() * each.element_size() for each in module.parameters())


class SpreadLayers:
    """Places one stage after another on devices, so that each has about as many bytes of weights."""

    def __init__(self, devices: Sequence[str], whole_bytes: int) -> None:
        """`whole_bytes` are those of all stages."""
        self._devices = tuple(devices)
        self._hooks = [DeviceHooks(device) for device in devices]
        self._whole_bytes = whole_bytes
        self._placed_bytes = 0

    def place(self, stage: StageModel) -> StageModel:
        """Move a stage to its devices, and give it back."""
        if len(self._devices) == 1:
            return stage.to(self._devices[0])
        stage.devices = self._devices
        parts = [[layer, *(each.adapter for each in adapted_maps(layer))] for layer in stage.layers]
        sizes = [sum(map(weight_bytes, each)) for each in parts]
        self._placed_bytes += weight_bytes(stage) - sum(sizes)
        for name, module in stage.named_children():
            if name != "layers":
                module.to(self._devices[0])
        for layer, together, size in zip(stage.layers, parts, sizes, strict=True):
            hooks = self._next(size)
            for module in together:
                module.to(hooks.device)
            layer.register_forward_pre_hook(hooks.bring, with_kwargs=True)
        stage.layers[-1].register_forward_hook(self._hooks[0].bring_back)
        return stage

    def _next(self, size: int) -> DeviceHooks:
        """The device of the next layer, which has so many bytes."""
        middle = self._placed_bytes + size / 2
        self._placed_bytes += size
        return self._hooks[min(len(self._devices) - 1, int(middle * len(self._devices) / self._whole_bytes))]


class DeviceHooks:
    """Forward hooks that bring what layers are given to their device."""

    def __init__(self, device: str) -> None:
        self.device = device
        self._brought: dict[str, tuple[Tensor, Tensor]] = {}
        """Masks and rotations: what came last by each name, and the same on the device; layers share them."""

    def bring(self, _layer: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> Any:
        there = tuple(each.to(self.device) if isinstance(each, Tensor) else each for each in inputs)
        return there, {name: self._shared(name, each) for name, each in named.items()}

    def bring_back(self, _layer: nn.Module, _inputs: Any, output: Tensor) -> Tensor:
        return output.to(self.device)

    def _shared(self, name: str, given: Any) -> Any:
        if isinstance(given, tuple):
            return tuple(self._shared(f"{name}.{at}", each) for at, each in enumerate(given))
        if not isinstance(given, Tensor):
            return given
        if name not in self._brought or self._brought[name][0] is not given:
            self._brought[name] = given, given.to(self.device)
        return self._brought[name][1]
