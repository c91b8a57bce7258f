"""Writing the trained weights, as nodes send them stage by stage, into a Hugging Face folder that transformers loads,
with ids of special tokens for generation and a model card; and uploading it to the hub.

Files lie in `unfinished` within the folder until all are there and on the disk. So a model is there whole or not at
all, and one that the folder holds already stays until then.
"""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig

from skippipe.checkpoint.adapters import read_base
from skippipe.checkpoint.bridges_file import StandInsInfo, write_stand_ins
from skippipe.checkpoint.format import run_field, save_tensors
from skippipe.codecs import decode
from skippipe.data.tokenizer import FILE, SETTINGS, TextTokenizer
from skippipe.errors import UserError, first_line, require
from skippipe.json_fields import fsync_path, json_text
from skippipe.model.flat_params import layout_of_stage
from skippipe.model.lora import merged
from skippipe.model.model_files import GENERATION, INDEX
from skippipe.model.model_spec import ModelSpec
from skippipe.model.stand_ins import is_stand_in
from skippipe.optim.interface import STORED_BYTES
from skippipe.runs.records import MetricsRow, metrics_of
from skippipe.runs.tail import read_object
from skippipe.runtime.state_source import MalformedWeights

JOB_FILE = "job.json"
CARD_FILE = "README.md"
SCORE_FILE = "eval.json"
"""The score of a run's model in its output folder, if there is one."""
SHARDS = "model-?????-of-?????.safetensors"
UNFINISHED = "unfinished"
HALVES = (torch.bfloat16, torch.float16)
_Generation: Any = GenerationConfig  # untyped


def special_ids(folder: Path, config: Any) -> dict[str, int | list[int]]:
    """bos_token_id, eos_token_id and pad_token_id by the tokenizer in a folder; those that it has no token for are left
    out. A model that was trained further may end texts with other special tokens, too: these stay."""
    settings, tokenizer = (read_object(folder / name) or {} for name in (SETTINGS, FILE))
    vocabulary = (tokenizer.get("model") or {}).get("vocab")
    ids: dict[str, int] = dict(vocabulary) if isinstance(vocabulary, dict) else {}
    special = {each["content"]: each["id"] for each in tokenizer.get("added_tokens") or ()}
    ids |= special
    found: dict[str, int | list[int]] = {}
    for kind in ("bos", "eos", "pad"):
        token = settings.get(f"{kind}_token")
        token = token.get("content") if isinstance(token, dict) else token
        if token in ids:
            found[f"{kind}_token_id"] = ids[token]
    ends = config.eos_token_id if isinstance(config.eos_token_id, list) else [config.eos_token_id]
    others = [each for each in ends if each in special.values() and each != found.get("eos_token_id")]
    if others and "eos_token_id" in found:
        found["eos_token_id"] = [int(found["eos_token_id"]), *others]  # type: ignore[arg-type]
    return found


def generation_settings(ids: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """What `generation_config.json` says: the settings of the model that was trained further, with the ids by the
    tokenizer unless that ends texts with one of the tokens that were given."""
    ours, theirs = (
        each if isinstance(each, list) else [each] for each in (ids.get("eos_token_id"), given.get("eos_token_id"))
    )
    return {**ids, **given} if ours[0] in theirs else {**given, **ids}


@dataclass(frozen=True)
class ModelCard:
    """The facts of a model card: how the model was trained, on what, how good it is, and what it loses with stages
    missing.

    It is made of what the run left in its folder: `job.json`, `plan.json`, `metrics.jsonl`, and a score of
    `skippipe eval`. What is not there is left out.
    """

    config: Any
    """Configuration of the model, as transformers has it."""
    layers: tuple[int, ...]
    """Layers of each stage."""
    parameters: int
    run: Path | None = None
    """The output folder of the run that trained it."""
    iterations: int | None = None
    """After how many iterations its weights were taken; None: after the last."""
    score: Path | None = None
    """What `skippipe eval` has written about it; none: the run's eval.json, if there is one."""

    def text(self) -> str:
        job, rows = (read_object(self.run / JOB_FILE) if self.run else None) or {}, self._rows()
        base = _base_model(str(job.get("model", {}).get("weights") or ""))
        name = self.run.resolve().name if self.run else self.config.model_type
        front = ["---", "library_name: transformers", "pipeline_tag: text-generation", "tags:", "- skippipe"]
        front += [f"base_model: {base}"] * ("/" in base) + ["---", ""]  # if the hub knows it
        sections = (self._trained(job, rows), self._loss(job, rows), self._missing_stages())
        return "\n".join([*front, f"# {name}", "", self._summary(base), *(line for each in sections for line in each)])

    def _summary(self, base: str) -> str:
        config, stages = self.config, ", ".join(map(str, self.layers))
        return (
            f"A {config.model_type} model with {self.parameters / 1e6:,.1f}M weights and {sum(self.layers)} layers, "
            + (f"trained further from {base} " if base else "trained ")
            + f"with SkipPipe over {len(self.layers)} pipeline stages of {stages} layers; every file of weights is one "
            "stage. It loads with transformers like any other."
        )

    def _trained(self, job: dict[str, Any], rows: Sequence[MetricsRow]) -> Iterator[str]:
        plan = (read_object(self.run / "plan.json") if self.run else None) or {}
        data, learning, batch, pipeline, lora = (
            job.get(name, {}) for name in ("data", "learning", "batch", "pipeline", "lora")
        )
        skip = job.get("recipe", {}).get("skip") or pipeline.get("skip")
        adapters = f"LoRA of rank {lora['rank']}, merged into the weights" if lora.get("rank") else lora.get("weights")
        if rank := job.get("recipe", {}).get("adapters"):
            adapters = f"of rank {rank}, for missing stages, beside the weights, which stay as they were"
        nodes, last = plan.get("cluster", {}).get("nodes", ()), rows[-1] if rows else None
        facts = {
            "data": ", ".join(map(str, data.get("texts", ()))),
            "iterations": last.iteration + 1 if last else self.iterations,
            "tokens": f"{last.tokens:,.0f}" if last and last.tokens else "",
            "sequence length": batch.get("sequence"),
            "stages skipped while training": skip,
            "adapters": adapters,
            "optimizer": f"{learning.get('optimizer')}, learning rate {learning.get('rate')}" if learning else "",
            "seed": job.get("seed"),
            "machines": f"{len(nodes)} nodes of '{plan.get('cluster', {}).get('name', '')}'" if nodes else "",
        }
        yield from ("", "## Training", "", "| | |", "|---|---|")
        yield from (f"| {name} | {_cell(value)} |" for name, value in facts.items() if value not in (None, ""))

    def _loss(self, job: dict[str, Any], rows: Sequence[MetricsRow]) -> Iterator[str]:
        losses = [row.loss for row in rows if row.loss is not None]
        held_out = [row.validation_loss for row in rows if row.validation_loss is not None]
        if not losses:
            return
        yield from ("", "## Loss", "", f"Training loss: {losses[0]:.4f} at first, {losses[-1]:.4f} at last.")
        if held_out:
            texts = job.get("validation", {}).get("texts")
            what = ", ".join(map(str, texts)) if texts else "a held-out part of the training text"
            yield f"Held-out loss ({_cell(what)}): {held_out[-1]:.4f}; the lowest on the way was {min(held_out):.4f}."

    def _missing_stages(self) -> Iterator[str]:
        place = self.score or (self.run / SCORE_FILE if self.run else None)
        score = (read_object(place) if place else None) or {}
        sizes = score.get("sizes")
        yield from ("", "## With stages missing", "")
        if not isinstance(sizes, dict) or not sizes:
            yield "Not measured. `skippipe eval FOLDER --text TEXT --ablation` measures what is lost with every stage."
            return
        yield "Perplexity with some stages only, by how many are kept (stage 0 always is):"
        yield from ("", "| text | stages kept | mean | best | worst |", "|---|---|---|---|---|")
        for text, rows in sizes.items():
            for row in rows if isinstance(rows, list) else ():
                figures = " | ".join(f"{row[name]:.2f}" for name in ("mean", "best", "worst"))
                yield f"| {_cell(text)} | {row['kept']} of {len(self.layers)} | {figures} |"

    def _rows(self) -> list[MetricsRow]:
        file = self.run / "metrics.jsonl" if self.run else None
        if file is None or not file.is_file():
            return []
        found = (metrics_of(line) for line in file.read_bytes().split(b"\n"))
        rows = [each.row for each in found if each is not None]
        return [row for row in rows if self.iterations is None or row.iteration < self.iterations]


def _base_model(weights: str) -> str:
    """The name of the model that was trained further: on the hub, if it came from there, else that of its folder."""
    for part in Path(weights).parts:
        if part.startswith("models--"):  # of the hub's cache
            return part.removeprefix("models--").replace("--", "/", 1)
    return Path(weights).name


def _cell(value: Any) -> str:
    return str(value).replace("|", "\\|").replace("\n", " ")


@dataclass
class ModelFolder:
    """A Hugging Face folder that is written stage by stage; one stage at a time is held in memory."""

    folder: Path
    layers: tuple[int, ...]
    """Layers of each stage."""
    spec: ModelSpec
    tokenizer: TextTokenizer
    dtype: torch.dtype = torch.float32
    """The type in the files."""
    run_id: str = ""
    """The run that trained it."""
    run: Path | None = None
    """The run's output folder, for the model card."""
    iterations: int | None = None
    """After how many iterations the weights were taken; None: after the last."""
    score: Path | None = None
    """As in `ModelCard`."""
    base: Path | None = None
    """If the stages that come are adapters: the folder with the weights that they are for. Those that stay as they are
    are stored in the type that they have there."""
    generation: Path | None = None
    """`generation_config.json` of the model that was trained further, which need not be there."""
    is_written: bool = field(init=False, default=False)
    """All stages are in the folder."""
    _pieces: list[torch.Tensor] = field(init=False, default_factory=list)
    _where: dict[str, str] = field(init=False, default_factory=dict)
    """Name of a weight → the file that holds it."""
    _bytes: int = field(init=False, default=0)
    _stand_ins: dict[int, dict[str, torch.Tensor]] = field(init=False, default_factory=dict)
    """Stage → bridges that begin there, and its adapters for missing stages; they go into a file of their own."""

    def store(self, stage: int, number: int, piece: Any) -> None:
        """Take the next chunk of a stage, of which number 0 starts the stage over. None ends it: OSError if it cannot
        be written, and then it may be ended again. MalformedWeights if it is not as large as the stage."""
        if piece is not None:
            self._pieces = [*(self._pieces if number else ()), decode(piece)]
        size = sum(slot.size for slot in layout_of_stage(self.spec, self.layers, stage))
        found = sum(each.numel() for each in self._pieces)
        if found > size or (piece is None and found < size):
            raise MalformedWeights(f"its weights of stage {stage} are not {size:,} numbers")
        if piece is not None:
            return
        self.store_flat(stage, torch.cat(self._pieces))
        self._pieces = []

    def store_flat(self, stage: int, flat: torch.Tensor) -> None:
        """Write a whole stage; OSError if it cannot be written."""
        if not self._where:
            shutil.rmtree(self._unfinished, ignore_errors=True)  # of one that was cut short
        self._unfinished.mkdir(parents=True, exist_ok=True)
        trained = {slot.name: slot.of(flat) for slot in layout_of_stage(self.spec, self.layers, stage)}
        self._stand_ins[stage] = {name: trained.pop(name).clone() for name in list(trained) if is_stand_in(name)}
        if self.base is not None:
            names = [slot.name for slot in layout_of_stage(self.spec, self.layers, stage, frozen=True)]
            there = read_base(self.base, names)
            trained = merged(there, trained, self.spec.lora)
            if self.spec.heals:
                self.dtype = stored_dtype(there.values())
        weights = {name: each.to(self.dtype).contiguous() for name, each in trained.items()}
        file = f"model-{stage + 1:05d}-of-{len(self.layers):05d}.safetensors"
        if self._where.get(next(iter(weights))) != file:  # else it is there: what failed came after it
            save_tensors(weights, self._unfinished / file, {"format": "pt", **run_field(self.run_id)})
            self._where |= dict.fromkeys(weights, file)
            self._bytes += self.dtype.itemsize * sum(each.numel() for each in weights.values())
        if stage + 1 == len(self.layers):
            self._finish()

    def move(self, folder: Path) -> None:
        """Go on in another folder, with the stages that are written already; OSError if they cannot be copied there."""
        before, after = self._unfinished, folder / UNFINISHED
        after.mkdir(parents=True, exist_ok=True)
        for file in set(self._where.values()):
            shutil.copyfile(before / file, after / file)
            fsync_path(after / file)
        shutil.rmtree(before, ignore_errors=True)
        self.folder = folder

    def discard(self) -> None:
        """Remove what there is of an incomplete model."""
        shutil.rmtree(self._unfinished, ignore_errors=True)
        with contextlib.suppress(OSError):
            self.folder.rmdir()  # if there is nothing else

    @property
    def missing_bytes(self) -> int:
        """Bytes of the model that are not written yet."""
        spec = self.spec.without_adapters()
        numbers = range(len(self.layers))
        model = sum(slot.size for stage in numbers for slot in layout_of_stage(spec, self.layers, stage))
        trained = (slot for stage in numbers for slot in layout_of_stage(self.spec, self.layers, stage))
        beside = sum(slot.size for slot in trained if is_stand_in(slot.name))  # they are written last
        return self.dtype.itemsize * model - self._bytes + STORED_BYTES * beside

    @property
    def _unfinished(self) -> Path:
        return self.folder / UNFINISHED

    def _finish(self) -> None:
        index = {"metadata": {"total_size": self._bytes, **run_field(self.run_id)}, "weight_map": self._where}
        config = deepcopy(self.spec.config)
        config.architectures = [type(self.spec.skeleton).__name__]
        config.dtype = self.dtype
        self.tokenizer.save(self._unfinished)
        ids = special_ids(self._unfinished, config)
        for name in ids.keys() - {"pad_token_id"}:  # a padding token would change the embedding
            setattr(config, name, ids[name])
        config.save_pretrained(self._unfinished)
        given = (read_object(self.generation) if self.generation else None) or {}
        if given:  # as it is: what transformers would not write itself is none of our business
            text = json_text(generation_settings(ids, given)) + "\n"
            (self._unfinished / GENERATION).write_text(text, encoding="utf-8")
        else:
            _Generation(**ids).save_pretrained(self._unfinished)
        card = ModelCard(config, self.layers, self._bytes // self.dtype.itemsize, self.run, self.iterations, self.score)
        (self._unfinished / CARD_FILE).write_text(card.text() + "\n", encoding="utf-8")
        (self._unfinished / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
        if self.spec.bridges or self.spec.heals:
            stages = [self._stand_ins[stage] for stage in range(len(self.layers))]
            write_stand_ins(self._unfinished, StandInsInfo.of(self.spec, self.layers), stages)
        for path in self._unfinished.iterdir():
            fsync_path(path)
        for path in sorted(self._unfinished.iterdir()):
            path.replace(self.folder / path.name)
        self._unfinished.rmdir()
        for path in self.folder.glob(SHARDS):  # of the model as it was when the run was stopped, with fewer stages
            if path.name not in self._where.values():
                path.unlink()
        fsync_path(self.folder)
        self.is_written = True


def stored_dtype(weights: Iterable[torch.Tensor]) -> torch.dtype:
    """The type in which weights that stay as they are are stored: their own, if all have the same and it is one of half
    precision."""
    (found, *others) = {each.dtype for each in weights}
    return found if found in HALVES and not others else torch.float32


def hub_api(name: str) -> Any:
    """The hub's interface; UserError if this machine has no token for it, before anything is made to upload."""
    hub = require("huggingface_hub", "train", "--push")
    if name.count("/") > 1:
        raise UserError(f"--push: '{name}' is no name of a model on the hub; give NAME or ORGANISATION/NAME")
    if hub.get_token() is None:
        raise UserError(
            "--push: there is no token for the Hugging Face hub; 'hf auth login' stores one, or set HF_TOKEN"
        )
    return hub.HfApi()


def push(api: Any, folder: Path, name: str, *, private: bool) -> str:
    """Upload all files of a folder as a model; gives its address."""
    try:
        address = api.create_repo(name, private=private, exist_ok=True)
        api.upload_folder(
            repo_id=address.repo_id, folder_path=str(folder), commit_message="Model trained with SkipPipe"
        )
    except Exception as error:  # of the network, the hub, or its library
        raise UserError(
            f"--push: the Hugging Face hub did not take '{name}': {first_line(error)}; the model is in {folder}, and "
            f"where there is a network, 'hf upload {name} {folder}' uploads it"
        ) from None
    return str(address)
