"""The state of a smaller model as that of a deeper one, whose layers are copies of its layers.

What lies between its first and its last layers is repeated as a block, which works better than to double layer by layer
(Du et al., "Stacking Your Transformers", 2024); of two, the last is. Weights, the optimizer's state and its number of
steps are copied; bridges are new.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property

import torch
from torch import Tensor

from skippipe.errors import UserError
from skippipe.model.flat_params import layout_of_stage
from skippipe.model.model_spec import LAYER, ModelSpec
from skippipe.model.stage import layer_ranges
from skippipe.model.stand_ins import is_bridge, trained_bridges
from skippipe.optim.interface import ParamSlot
from skippipe.skip_schedule import donors

LEAST_UNITS = 2
"""Units (stages or layers) of a model that can grow: the first, and one to repeat."""
LAYER_FIELDS = ("num_hidden_layers", "layer_types")
"""Fields of a configuration that may differ: kinds of layers are compared one by one."""


def donor_layers(young: Sequence[int], grown: Sequence[int]) -> tuple[int, ...]:
    """The layer that each layer of the grown model is a copy of; both are given as the layers of each stage.

    Whole stages are copied if all stages of both models have the same number of layers, else layer by layer.
    """
    assert sum(grown) > sum(young), "it does not grow"
    unit = young[0] if len({*young, *grown}) == 1 else 1
    before, after = sum(young) // unit, sum(grown) // unit
    if before < LEAST_UNITS:
        raise UserError(
            f"a model of {before} x {unit} layers has none after the first {unit} to repeat; "
            + ("cut the job's model into other stages (pipeline.stages)" if unit > 1 else "train one of 2 or more")
        )
    copies = donors(after, before)
    units = [copies.get(number, min(number, before - 1)) for number in range(after)]
    return tuple(unit * donor + layer for donor in units for layer in range(unit))


def donor_name(name: str, copied: Sequence[int]) -> str:
    """The name of the tensor that this one is a copy of; `copied` as `donor_layers` gives it."""
    return LAYER.sub(lambda layer: f"model.layers.{copied[int(layer[1])]}.", name, count=1)


class GrownState:
    """Which tensors of a smaller model are those of a deeper one. UserError if its layers cannot be copies."""

    def __init__(
        self,
        young: ModelSpec,
        young_layers: tuple[int, ...],
        spec: ModelSpec,
        layers: tuple[int, ...],
        where: object = "the smaller model",
    ) -> None:
        """Both models with the layers of each of their stages; `where` names the smaller one in errors."""
        self._young_layers = young_layers
        self._spec = spec
        self._layers = layers
        self._where = where
        self.donors = donor_layers(young_layers, layers)
        """For each layer, the layer of the smaller model that it is a copy of."""
        self._check(young)

    @property
    def summary(self) -> str:
        copied = " ".join(map(str, self.donors))
        return f"{sum(self._young_layers)} layers become {len(self.donors)}, copies of {copied}"

    def name(self, name: str) -> str:
        """The name of a tensor in the smaller model."""
        return donor_name(name, self.donors)

    def steps(self, stage: int, young_steps: Sequence[int]) -> int:
        """The steps of a stage's optimizer, from those of the smaller model's stages: the least of all that its layers
        are copied from."""
        copied = {self.donors[layer] for layer in layer_ranges(self._layers)[stage]}
        pairs = zip(layer_ranges(self._young_layers), young_steps, strict=True)
        return min(steps for theirs, steps in pairs if copied & set(theirs))

    def new_tensor(self, slot: ParamSlot) -> Tensor | None:
        """A tensor that is new: of a bridge, or of its optimizer's state; None: it is a copy."""
        if not is_bridge(slot.name):
            return None
        found = self._bridges.get(slot.name)
        return torch.zeros(slot.size) if found is None else found

    @cached_property
    def _bridges(self) -> Mapping[str, Tensor]:
        stages = len(self._layers)
        made = (trained_bridges(self._spec, stage, stages) for stage in range(stages))
        return {name: weight.detach().flatten() for each in made if each for name, weight in each.named_weights()}

    def _check(self, young: ModelSpec) -> None:
        for layer, donor in enumerate(self.donors):
            ours, theirs = self._spec.mask_kind(layer), young.mask_kind(donor)
            if ours != theirs:
                raise self._unlike(f"layer {layer} ({ours})", f"layer {donor} ({theirs})")
        shapes = {slot.name: slot.shape for slot in _slots(young, self._young_layers)}
        for slot in _slots(self._spec, self._layers):
            name = self.name(slot.name)
            if not is_bridge(slot.name) and shapes.get(name) != slot.shape:
                raise self._unlike(f"'{slot.name}' {list(slot.shape)}", f"'{name}', which is not there or not so")

    def _unlike(self, ours: str, theirs: str) -> UserError:
        return UserError(
            f"{self._where}: {ours} cannot be a copy of {theirs}; "
            "cut both models into equal stages, over which the kinds of layers repeat (pipeline.stages)"
        )


def _slots(spec: ModelSpec, layers: tuple[int, ...]) -> list[ParamSlot]:
    return [slot for stage in range(len(layers)) for slot in layout_of_stage(spec, layers, stage)]
