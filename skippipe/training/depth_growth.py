"""A deeper model from one that is trained: its layers are copies, and training goes on with all of them.

The smaller model is cheaper to train, and most of what it learns is of use to the larger one. What lies between its
first and its last layers is repeated as a block, which works better than to double layer by layer (Du et al.,
"Stacking Your Transformers", 2024); of two, the last is. The optimizer's state and number of steps are copied with the
weights.

The result is a checkpoint like any other, of as many iterations as the smaller model has had.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from skippipe.checkpoint.format import CheckpointOrigin, Checkpoints, StageWriter, StoredFile
from skippipe.checkpoint.manager import StateReader, manifest_of
from skippipe.codecs import encode
from skippipe.errors import UserError
from skippipe.model.flat_params import layout_of_stage
from skippipe.model.lora import LoraConfig
from skippipe.model.model_files import TEXT_FIELDS
from skippipe.model.model_spec import LAYER, ModelSpec, config_from, config_named
from skippipe.model.stage import layer_ranges
from skippipe.model.stand_ins import is_bridge, trained_bridges
from skippipe.optim import OPTIMIZERS
from skippipe.optim.interface import STORED_BYTES, Optimizer, ParamSlot
from skippipe.plan import Plan
from skippipe.skip_schedule import donors
from skippipe.training.job_config import JobConfig
from skippipe.training.run import Run

LEAST_UNITS = 2
"""Units (stages or layers) of a model that can grow: the first, and one to repeat."""
LAYER_FIELDS = ("num_hidden_layers", "layer_types")
"""Fields of a configuration that may differ: kinds of layers are compared one by one."""
FILE_FIELDS = ("transformers_version", "_name_or_path", "architectures", "dtype", *TEXT_FIELDS)
"""Fields of a configuration that say nothing about weights."""


@dataclass(frozen=True)
class Grown:
    """The deeper model that was made."""

    place: Path
    """The checkpoint to resume from."""
    donors: tuple[int, ...]
    """For each layer, the layer of the smaller model that it is a copy of."""


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


def young_of(run: Path) -> CheckpointOrigin:
    """The newest sound checkpoint of the run that trained the smaller model."""
    origin = Checkpoints.of_run(run).newest_sound()
    if origin is None:
        raise UserError(f"{run}: has no sound checkpoint to grow from; name the output folder of a run that has one")
    if origin.manifest.trains_adapters:
        raise UserError(f"{run}: its checkpoints hold adapters, and those do not grow; export the model, and train on")
    return origin


def check_job(young: CheckpointOrigin, job: JobConfig) -> None:
    """UserError if a run of this job cannot resume from there, as far as that is known before there is a plan."""
    made, output = young.manifest, Path(job.output)
    if job.lora != LoraConfig() or job.recipe.heal:
        what = "recipe.heal" if job.recipe.heal else "lora"
        raise UserError(f"{what}: a grown model is trained whole; leave it out")
    if young.place.parent.parent.resolve() == output.resolve():
        raise UserError(f"output: {output} is where {young.place} lies; name another folder in the job")
    if job.iterations <= made.iterations:
        raise UserError(
            f"iterations: {job.iterations} in the job, and {young.place} is {made.iterations} iterations on; "
            "say how long the whole run is to be"
        )
    if job.learning.optimizer != made.optimizer:
        raise UserError(
            f"learning.optimizer: '{job.learning.optimizer}' in the job, '{made.optimizer}' in {young.place}: keep it"
        )
    if job.seed != made.seed:
        raise UserError(f"seed: {job.seed} in the job, {made.seed} in {young.place}; text would be repeated: keep it")
    vocabulary = made.config["vocab_size"]  # the text has another look at it
    config = config_named(job.model.config, vocabulary, job.model.layers).to_dict()
    differ = differences(made.config, config)
    if differ:
        raise UserError(
            f"model '{job.model.config}': only the number of layers may differ from {young.place}: {'; '.join(differ)}"
        )
    before, after = sum(made.layers), config["num_hidden_layers"]
    if after <= before:
        raise UserError(f"model '{job.model.config}': has {after} layers, {young.place} has {before}: it takes more")


def grow(young: CheckpointOrigin, run: Run, begin: Callable[[], None] = lambda: None) -> Grown:
    """Write the checkpoint that the run resumes from; `begin` is called after all checks, before the first write."""
    made, node_config = young.manifest, run.node_config
    if made.data != node_config.data_fingerprint:
        raise UserError(
            f"data: other tokens ({node_config.data_fingerprint[:12]}, "
            f"a vocabulary of {node_config.config['vocab_size']:,}) than "
            f"those of {young.place} ({made.data[:12]}, {made.config['vocab_size']:,}); name the same texts, "
            "tokenizer and vocabulary"
        )
    optimizer = OPTIMIZERS[node_config.learning.optimizer]
    copied = donor_layers(made.layers, node_config.plan.layers)
    state = _YoungState(young, copied)
    state.check_kinds(run.spec)
    stages = [
        layout_of_stage(run.spec, node_config.plan.layers, stage) for stage in range(len(node_config.plan.layers))
    ]
    for places in stages:
        state.check_shapes(places)
    begin()
    checkpoints = run.checkpoints
    unfinished = checkpoints.begin()
    run.tokenizer.save(unfinished)
    files: list[StoredFile] = []
    for stage, places in enumerate(stages):
        writer = StageWriter(unfinished, stage, places, optimizer, run.run_id)
        bridges = trained_bridges(run.spec, stage, len(stages))
        state.copy_to(writer, places, optimizer, dict(bridges.named_weights()) if bridges else {})
        files += writer.finish()
    steps = [state.steps(each) for each in layer_ranges(node_config.plan.layers)]
    run.begin_journal()
    run.wal.close()
    checkpoints.commit(unfinished, manifest_of(node_config, made.iterations, steps, files, run.run_id))
    return Grown(checkpoints.complete()[0], copied)


def other_batch(run: Path, plan: Plan) -> str:
    """How the text of an iteration differs from that of the smaller model's run; empty: it does not, or is unknown."""
    try:
        before, after = _batch(Plan.load(run / "plan.json")), _batch(plan)
    except UserError:
        return ""
    return "" if before == after else f"an iteration had {before} and now has {after}"


def _batch(plan: Plan) -> str:
    work = plan.workload
    return f"{plan.microbatches} microbatches of {work.samples_per_microbatch} x {work.sequence_tokens} tokens"


class _YoungState:
    """Weights and optimizer of the smaller model, under the names that they are to have in the larger one."""

    def __init__(self, young: CheckpointOrigin, copied: Sequence[int]) -> None:
        self._origin = young
        self._copied = copied
        made = young.manifest
        self._spec = ModelSpec(config_from(made.config), made.seed)
        self._reader = StateReader(young, made.layers, self._spec)
        stages = (layout_of_stage(self._spec, made.layers, stage) for stage in range(len(made.layers)))
        self._shapes = {slot.name: slot.shape for slots in stages for slot in slots}

    def steps(self, layers: range) -> int:
        """The steps that the optimizers of all stages have taken that these layers are copied from."""
        made = self._origin.manifest
        donors = {self._copied[layer] for layer in layers}
        pairs = zip(layer_ranges(made.layers), made.steps, strict=True)
        return min(steps for theirs, steps in pairs if donors & set(theirs))

    def check_kinds(self, grown: ModelSpec) -> None:
        for layer, donor in enumerate(self._copied):
            ours, theirs = grown.mask_kind(layer), self._spec.mask_kind(donor)
            if ours != theirs:
                raise self._unlike(f"layer {layer} ({ours})", f"layer {donor} ({theirs})")

    def check_shapes(self, places: Sequence[ParamSlot]) -> None:
        for place in (each for each in places if not is_bridge(each.name)):
            name = self._donor(place.name)
            if self._shapes.get(name) != place.shape:
                raise self._unlike(f"'{place.name}' {list(place.shape)}", f"'{name}', which is not there or not so")

    def copy_to(
        self,
        writer: StageWriter,
        weights: Sequence[ParamSlot],
        optimizer: type[Optimizer],
        bridges: Mapping[str, Tensor],
    ) -> None:
        """Write the weights and the optimizer state of a stage, one tensor at a time; bridges are new."""
        for slot in optimizer.state_slots(weights):
            if slot.name in bridges:
                writer.write(encode(bridges[slot.name].detach().flatten(), "fp32").data)
            elif is_bridge(slot.name):
                writer.write(bytes(STORED_BYTES * slot.size))
            else:
                writer.write(self._reader.tensor(slot._replace(name=self._donor(slot.name))).data)

    def _donor(self, name: str) -> str:
        return donor_name(name, self._copied)

    def _unlike(self, ours: str, theirs: str) -> UserError:
        return UserError(
            f"{self._origin.place}: {ours} cannot be a copy of {theirs}; "
            "cut both models into equal stages, over which the kinds of layers repeat (pipeline.stages)"
        )


def differences(young: dict[str, Any], grown: dict[str, Any]) -> list[str]:
    """Fields of two configurations that must agree and do not, each with both values."""
    theirs, ours = (json.loads(json.dumps(each)) for each in (young, grown))  # as they look after a file
    names = [name for name in {**theirs, **ours} if name not in LAYER_FIELDS + FILE_FIELDS]
    if theirs["model_type"] != ours["model_type"]:
        names = ["model_type"]  # and much else
    return [
        f"{name} {theirs.get(name)} there, {ours.get(name)} here"
        for name in names
        if theirs.get(name) != ours.get(name)
    ]
