"""A deeper model from one that is trained: its layers are copies, and training goes on with all of them.

The smaller model is cheaper to train, and most of what it learns is of use to the larger one. A run grows by itself if
its recipe says when (`recipe.grow`); or the newest checkpoint of one run becomes, grown, one of another (`grow`).
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from skippipe.checkpoint.format import CheckpointOrigin, Checkpoints, StageWriter, StoredFile
from skippipe.checkpoint.grown_state import LAYER_FIELDS
from skippipe.checkpoint.manager import StateReader, manifest_of
from skippipe.errors import UserError
from skippipe.model.flat_params import layout_of_stage
from skippipe.model.lora import LoraConfig
from skippipe.model.model_files import TEXT_FIELDS
from skippipe.model.model_spec import config_named
from skippipe.optim import OPTIMIZERS
from skippipe.plan import Plan
from skippipe.skip_schedule import visited_of, young_stages
from skippipe.stage_subset import whole_numbers
from skippipe.training.job_config import JobConfig
from skippipe.training.run import Run, layers_in_use
from skippipe.workload import split_evenly

FILE_FIELDS = ("transformers_version", "_name_or_path", "architectures", "dtype", *TEXT_FIELDS)
"""Fields of a configuration that say nothing about weights."""


@dataclass(frozen=True)
class Grown:
    """The deeper model that was made."""

    place: Path
    """The checkpoint to resume from."""
    donors: tuple[int, ...]
    """For each layer, the layer of the smaller model that it is a copy of."""


def grown_job(job: JobConfig) -> JobConfig:
    """The job of the whole model, which a run whose model grows ends with."""
    return replace(job, recipe=job.recipe.when_grown(), learning=job.schedule)


def young_jobs(job: JobConfig, layers: int, stages: int, microbatches: int) -> list[JobConfig]:
    """The jobs before that, from the smallest model on, each until its model grows. The whole one has so many layers,
    stages and microbatches."""
    recipe, of_whole = job.recipe, _stage_layers(job, layers, stages)
    batch = replace(job.batch, microbatches=microbatches)
    young, before = [], 1
    for step, share in zip(recipe.growth, recipe.young_shares, strict=True):
        visited = visited_of(share, stages)
        if not before < visited < stages:
            raise UserError(
                f"recipe.grow: until {float(step):.0%} of the run the model has {visited} of {stages} stages, as "
                f"recipe.skip says; it takes more than {before} and fewer than {stages}"
            )
        before = visited
        kept = [of_whole[stage] for stage in young_stages(stages, visited)]
        given = ",".join(map(str, kept)) if job.pipeline.layers else ""
        _check_config(job, sum(kept))
        young.append(
            replace(
                job,
                iterations=math.ceil(step * job.iterations),
                model=replace(job.model, layers=sum(kept)),
                pipeline=replace(job.pipeline, stages=visited, layers=given),
                batch=batch,
                learning=job.schedule,
                recipe=replace(recipe, grow="", skip="0", bridges=0, distill=0.0, distill_hidden=0.0),
                validation=replace(job.validation, patience=0),
            )
        )
    return young


def _check_config(job: JobConfig, layers: int) -> None:
    """UserError if the configuration does not say what a model of so many layers is like."""
    try:
        config_named(job.model.config, layers=layers)
    except UserError as error:
        raise UserError(
            f"recipe.grow: {layers} layers would be trained first, and {job.model.config} does not say of which kinds "
            f"({error}); train them by themselves with a config.json of their own, and then 'skippipe grow'"
        ) from None


def _stage_layers(job: JobConfig, layers: int, stages: int) -> Sequence[int]:
    """The layers of each stage of the whole model."""
    return (
        whole_numbers(job.pipeline.layers, "pipeline.layers") if job.pipeline.layers else split_evenly(layers, stages)
    )


def depth_reached(jobs: Sequence[JobConfig], layers: int, run_id: str) -> int:
    """Which of these jobs a run that is resumed is in; the last is of a model of so many layers."""
    output, depths = Path(jobs[-1].output), [*(job.model.layers for job in jobs[:-1]), layers]
    newest = Checkpoints(output / "checkpoints", run_id=run_id).newest_sound()
    done = newest.manifest.iterations if newest else 0
    in_use = layers_in_use(output / "journal") if jobs[-1].transport.peers else None
    if in_use in depths and jobs[depths.index(in_use)].iterations > done:
        return depths.index(in_use)  # nodes may be further than the checkpoint
    by_iterations = next((number for number, job in enumerate(jobs) if done < job.iterations), len(jobs) - 1)
    there = sum(newest.manifest.layers) if newest else 0
    return max(by_iterations, depths.index(there) if there in depths else 0)  # a model does not shrink


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
    if job.recipe.grow:
        raise UserError(
            "recipe.grow: a model that grows by itself begins small; leave it out, and what is skipped until then"
        )
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
    reader = StateReader(young, node_config.plan.layers, run.spec)
    assert reader.grown is not None, "the job has been checked"
    begin()
    checkpoints = run.checkpoints
    unfinished = checkpoints.begin()
    run.tokenizer.save(unfinished)
    files: list[StoredFile] = []
    stages = range(len(node_config.plan.layers))
    for stage in stages:
        slots = layout_of_stage(run.spec, node_config.plan.layers, stage)
        writer = StageWriter(unfinished, stage, slots, OPTIMIZERS[made.optimizer], run.run_id)
        for piece in reader.whole_state(stage):
            writer.write(piece.data)
        files += writer.finish()
    steps = [reader.steps(stage) for stage in stages]
    run.begin_journal()
    run.wal.close()
    checkpoints.commit(unfinished, manifest_of(node_config, made.iterations, steps, files, run.run_id))
    return Grown(checkpoints.complete()[0], reader.grown.donors)


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
