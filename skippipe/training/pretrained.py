"""Training that begins with weights that are there: those of a Hugging Face folder become the run's first checkpoint.

So nodes get them as they get the state of any checkpoint: each the tensors of its own stage, and none needs the folder.
The optimizer begins with nothing, at iteration 0. If only adapters are trained (LoRA, or healing with bridges and
adapters that lie beside the weights), the first checkpoint has these, and the weights of the folder are kept beside all
checkpoints.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator, Mapping
from copy import deepcopy
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from skippipe.checkpoint.adapters import BASE, read_adapter, with_adapter
from skippipe.checkpoint.bridges_file import BRIDGES_FILE, StandInsInfo, bridges_info, read_stand_ins
from skippipe.checkpoint.format import MANIFEST, StageWriter, StoredFile
from skippipe.checkpoint.grown_state import donor_layers, donor_name
from skippipe.checkpoint.hf_export import ModelFolder, stored_dtype
from skippipe.checkpoint.manager import manifest_of
from skippipe.codecs import encode
from skippipe.errors import UserError, first_line
from skippipe.inference.checkpoint_loader import CheckpointOutline, select_weights
from skippipe.json_fields import exists
from skippipe.model.flat_params import layout_of_stage
from skippipe.model.lora import initial
from skippipe.model.model_files import CONFIG, GENERATION, TOKENIZER
from skippipe.model.model_spec import ModelSpec, config_named
from skippipe.model.stage import StageModel, layer_ranges
from skippipe.model.stand_ins import trained_bridges
from skippipe.model_shape import HUB_NAME
from skippipe.optim import OPTIMIZERS
from skippipe.optim.interface import STORED_BYTES, ParamSlot
from skippipe.training.depth_growth import differences
from skippipe.training.job_config import JobConfig
from skippipe.training.job_tables import ModelConfig
from skippipe.training.run import Run

HUB_FILES = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]
TOKENIZER_FILES = ("tokenizer.json", TOKENIZER, "tokenizer.model", "vocab.json")


def with_pretrained(job: JobConfig) -> JobConfig:
    """The job with the model and the tokenizer of the weights that it begins with; as it is if there are none."""
    job = replace(job, lora=with_adapter(job.lora))
    if not job.model.weights:
        return job
    folder = _folder_of(job.model.weights)
    config = job.model.config
    if config in (ModelConfig.config, str(folder)):
        config = str(folder)
    if config != str(folder) or job.model.layers:
        _check_deeper(config, job.model.layers, folder)
    tokenizer = job.data.tokenizer
    if not tokenizer:
        if not any((folder / name).is_file() for name in TOKENIZER_FILES):
            raise UserError(
                f"model.weights: {folder} has no tokenizer; name the one it was trained with: data.tokenizer"
            )
        tokenizer = str(folder)
    model = replace(job.model, config=config, weights=str(folder))
    job = replace(job, model=model, data=replace(job.data, tokenizer=tokenizer))
    return _with_stand_ins(job, folder) if job.recipe.heal else job


def _with_stand_ins(job: JobConfig, folder: Path) -> JobConfig:
    """The job with the ranks and the stages of the bridges and adapters in the folder, which it trains; UserError if
    there are none, if they are of a kind that nodes do not train, or if the job says otherwise."""
    if job.model.config != str(folder) or job.model.layers:
        name = "layers" if job.model.layers else "config"
        raise UserError(f"model.{name}: with recipe.heal it is that of model.weights; leave it out")
    info = stand_ins_in(folder)
    for name in ("bridges", "adapters", "repeats"):
        ours, theirs = getattr(job.recipe, name), getattr(info, name)
        if ours not in (0, theirs):
            raise UserError(f"recipe.{name}: {ours} here, {theirs} in {folder / BRIDGES_FILE}; leave it out")
    recipe = replace(job.recipe, bridges=info.bridges, adapters=info.adapters, repeats=info.repeats)
    pipeline = job.pipeline
    if not pipeline.plan:
        stages, layers = len(info.layers), ",".join(map(str, info.layers))
        said = ("stages", pipeline.stages, stages), ("layers", pipeline.layers.replace(" ", ""), layers)
        for name, ours, theirs in said:
            if ours and ours != theirs:
                raise UserError(f"pipeline.{name}: {ours} here, {theirs} in {folder / BRIDGES_FILE}; leave it out")
        pipeline = replace(pipeline, layers=layers)
    return replace(job, recipe=recipe, pipeline=pipeline)


def stand_ins_in(folder: Path) -> StandInsInfo:
    """The bridges and adapters beside a model that is to be healed; UserError unless nodes can train them."""
    info, file = bridges_info(folder, config_named(str(folder)).num_hidden_layers), folder / BRIDGES_FILE
    how = f"'skippipe heal {folder} --data TEXT --tokens 0 -o FOLDER' makes a folder with what there is to train"
    if info is None:
        raise UserError(f"recipe.heal: there is no {file}; {how}")
    if not (info.bridges and info.adapters):
        raise UserError(f"recipe.heal: {file} has no {'adapters' if info.bridges else 'bridges'}; {how}")
    if info.hop_rank:
        raise UserError(f"recipe.heal: {file} has adapters by hop, which nodes do not train; {how} with other adapters")
    return info


def check_healed_stages(plan_file: str, folder: Path, layers: tuple[int, ...]) -> None:
    """UserError unless bridges and adapters in the folder are for the stages of a plan, of so many layers."""
    theirs = stand_ins_in(folder).layers
    if layers != theirs:
        here, there = (",".join(map(str, each)) for each in (layers, theirs))
        raise UserError(
            f"pipeline.plan: {plan_file} has stages of {here} layers, and {folder / BRIDGES_FILE} is for stages of "
            f"{there}: make a plan for these, or leave pipeline.plan out"
        )


def _folder_of(name: str) -> Path:
    """The folder of this name; or what the Hugging Face hub has under it, downloaded."""
    folder = Path(name)
    if not exists(folder) and HUB_NAME.fullmatch(name):
        folder = _downloaded(name)
    if not exists(folder):
        raise UserError(f"model.weights: '{name}': no such folder")
    if (folder / MANIFEST).is_file() or (folder / "checkpoints").is_dir():
        raise UserError(
            f"model.weights: {folder} is of a run: 'skippipe train --resume' goes on with it, and 'skippipe export' "
            "makes a folder of its model that can be named here"
        )
    if not (folder / CONFIG).is_file():
        raise UserError(f"model.weights: {folder} is no Hugging Face folder: it has no {CONFIG}")
    if not any(folder.glob("*.safetensors")):
        raise UserError(f"model.weights: {folder} has no weights in safetensors files; others are not read")
    return folder


def _downloaded(name: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, allow_patterns=HUB_FILES))
    except LocalEntryNotFoundError:
        why = "could not be asked for it (no network)"
    except Exception as error:  # of the hub or the disk
        why = f"did not give it: {first_line(error)}"
    raise UserError(
        f"model.weights: there is no folder '{name}' here, and the Hugging Face hub {why}; if it is a folder, check "
        f"the path; if it is a name on the hub: 'hf download {name} --local-dir FOLDER' where there is a network, and "
        "name that folder"
    )


def check_vocabulary(job: JobConfig, model_tokens: int, tokenizer_tokens: int) -> None:
    """UserError if the text has tokens that the model has never seen."""
    if tokenizer_tokens > model_tokens:
        raise UserError(
            f"data.tokenizer: {job.data.tokenizer} has {tokenizer_tokens:,} tokens, and the model in "
            f"{job.model.weights} knows {model_tokens:,}; use the tokenizer that it was trained with"
        )


def write_first_checkpoint(run: Run, folder: Path, adapter: str = "") -> Path:
    """Write the weights of a folder as the checkpoint of no iterations, from which the run goes on. If adapters are
    trained, they make up the checkpoint: LoRA's are new, or those of the folder `adapter`; those of healing, and its
    bridges, lie beside the weights. Other bridges are new."""
    node_config, layers = run.node_config, run.node_config.plan.layers
    optimizer = OPTIMIZERS[node_config.learning.optimizer]
    stages: Iterator[dict[str, Tensor]] = _stages_in(folder, run.spec.without_adapters(), layers)
    if run.spec.frozen:
        _write_base(run, stages, folder / GENERATION)
        begun = Path(adapter) if adapter else None
        stages = _stand_ins(folder, run.spec, layers) if run.spec.heals else _adapters(run.spec, layers, begun)
    unfinished = run.checkpoints.begin()
    if (folder / GENERATION).is_file():  # for the folders that are made of this run
        shutil.copyfile(folder / GENERATION, run.checkpoints.folder / GENERATION)
    run.tokenizer.save(unfinished)
    files: list[StoredFile] = []
    for stage, found in enumerate(stages):
        slots = layout_of_stage(run.spec, layers, stage)
        bridges = None if run.spec.heals else trained_bridges(run.spec, stage, len(layers))
        if bridges:
            found = dict(bridges.named_weights()) | found
        writer = StageWriter(unfinished, stage, slots, optimizer, run.run_id)
        for slot in slots:
            writer.write(encode(found[slot.name].detach().float().flatten(), "fp32").data)
        for slot in optimizer.state_slots(slots)[len(slots) :]:
            writer.write(bytes(STORED_BYTES * slot.size))
        files += writer.finish()
    manifest = manifest_of(node_config, 0, [0] * len(layers), files, run.run_id)
    run.checkpoints.commit(unfinished, manifest)
    return run.checkpoints.complete()[0]


def _check_deeper(config: str, layers: int, folder: Path) -> None:
    """UserError unless the model is that in the folder, or the same with more layers."""
    theirs, ours = config_named(str(folder)).to_dict(), config_named(config, layers=layers).to_dict()
    differ = differences(theirs, ours)
    before, after = theirs["num_hidden_layers"], ours["num_hidden_layers"]
    is_another = config != str(folder) and after == before
    if layers and not differ and after < before:
        raise UserError(f"model.layers: {layers}, and model.weights has {before}: a model gets more layers, not fewer")
    if differ or is_another or after < before:
        what = "; ".join(differ) or f"{after} layers here, {before} there"
        raise UserError(
            f"model.config: '{config}', and model.weights has a configuration of its own; leave one out, or name the "
            f"same with more layers, which are then copies: {what}"
        )


def _stages_in(folder: Path, spec: ModelSpec, layers: tuple[int, ...]) -> Iterator[dict[str, Tensor]]:
    """The weights of each stage, read from a Hugging Face folder; of a deeper model, copies of its layers."""
    theirs = ModelSpec(config_named(str(folder)))
    copied = donor_layers((theirs.layers,), layers) if spec.layers > theirs.layers else tuple(range(spec.layers))
    for layer, donor in enumerate(copied):
        ours, kind = spec.mask_kind(layer), theirs.mask_kind(donor)
        if ours != kind:
            raise UserError(f"model.config: layer {layer} ({ours}) cannot be a copy of layer {donor} ({kind})")
    outline = CheckpointOutline(folder, theirs, (theirs.layers,))
    found: dict[str, Tensor] = {}
    for stage in range(len(layers)):
        slots = layout_of_stage(spec, layers, stage)
        donors = [slot._replace(name=donor_name(slot.name, copied)) for slot in slots]
        names = {slot.name for slot in donors}
        if not names <= found.keys():  # all were read at once if the files have other names
            found = select_weights(outline, names)
        _check_shapes(folder, donors, found)
        yield {slot.name: found[donor.name] for slot, donor in zip(slots, donors, strict=True)}


def _adapters(spec: ModelSpec, layers: tuple[int, ...], folder: Path | None) -> Iterator[dict[str, Tensor]]:
    """The adapters that each stage begins with: those in a folder of peft, or new ones by the seed."""
    slots = [layout_of_stage(spec, layers, stage) for stage in range(len(layers))]
    if folder is not None:
        found = read_adapter(folder)
        _check_shapes(folder, [slot for stage in slots for slot in stage], found)
        others = found.keys() - {slot.name for stage in slots for slot in stage}
        if others:
            raise UserError(f"lora.weights: {folder}: '{min(others)}' is of no linear map of this model's layers")
    for stage in slots:
        yield {
            slot.name: initial(slot.name, slot.shape, spec.seed) if folder is None else found[slot.name]
            for slot in stage
        }


def _stand_ins(folder: Path, spec: ModelSpec, layers: tuple[int, ...]) -> Iterator[dict[str, Tensor]]:
    """The bridges and adapters that each stage begins with: those beside the weights in a folder."""
    info = stand_ins_in(folder)
    for number, each in enumerate(layer_ranges(layers)):
        with torch.device("meta"):  # of which the names and sizes of linear maps are wanted
            stage = StageModel(spec.without_adapters(), each, ends=False)
        yield read_stand_ins(folder, info, number, stage)


def _check_shapes(folder: Path, slots: Iterable[ParamSlot], found: Mapping[str, Tensor]) -> None:
    for slot in slots:
        each = found.get(slot.name)
        if each is None or each.shape != slot.shape:
            there = f"of shape {list(each.shape)}" if each is not None else "not there"
            raise UserError(f"{folder}: tensor '{slot.name}' {list(slot.shape)} is {there}")


def _write_base(run: Run, stages: Iterable[dict[str, Tensor]], generation: Path) -> None:
    """Keep the weights that adapters are for beside the checkpoints; a stage in half precision if it is stored so."""
    layers = run.node_config.plan.layers
    spec = ModelSpec(deepcopy(run.spec.config), run.spec.seed)  # whose configuration is changed by writing it
    folder = run.checkpoints.folder / BASE
    model = ModelFolder(folder, layers, spec, run.tokenizer, run_id=run.run_id, generation=generation)
    for stage, found in enumerate(stages):
        model.dtype = stored_dtype(found.values())
        flat = [found[slot.name].detach().flatten() for slot in layout_of_stage(spec, layers, stage)]
        model.store_flat(stage, torch.cat(flat))
