"""What a Hugging Face folder holds beside weights, tokenizer and configuration: ids of special tokens for generation,
and a model card that says how the model was trained, on what, how good it is, and what it loses with stages missing.

The card is made of what the run left in its folder: `job.json`, `plan.json`, `metrics.jsonl`, and a score of
`skippipe eval`. What is not there is left out.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from skippipe.data.tokenizer import FILE, SETTINGS
from skippipe.errors import UserError
from skippipe.json_fields import read_json
from skippipe.runs.records import MetricsRow, metrics_of

JOB_FILE = "job.json"
CARD_FILE = "README.md"
SCORE_FILE = "eval.json"
"""The score of a run's model in its output folder, if there is one."""


def special_ids(folder: Path, config: Any) -> dict[str, int | list[int]]:
    """bos_token_id, eos_token_id and pad_token_id by the tokenizer in a folder; those that it has no token for are left
    out. A model that was trained further may end texts with other special tokens, too: these stay."""
    settings, tokenizer = _object(folder / SETTINGS), _object(folder / FILE)
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


@dataclass(frozen=True)
class ModelCard:
    """The facts of a model card."""

    config: Any
    """Of the model, as transformers has it."""
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
        job, rows = _object(self.run / JOB_FILE) if self.run else {}, self._rows()
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
        plan = _object(self.run / "plan.json") if self.run else {}
        data, learning, batch, pipeline, lora = (
            job.get(name, {}) for name in ("data", "learning", "batch", "pipeline", "lora")
        )
        skip = job.get("recipe", {}).get("skip") or pipeline.get("skip")
        adapters = f"LoRA of rank {lora['rank']}, merged into the weights" if lora.get("rank") else lora.get("weights")
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
        score = _object(place) if place else {}
        sizes = score.get("sizes")
        yield from ("", "## With stages missing", "")
        if not isinstance(sizes, dict) or not sizes:
            yield "Not measured. `skippipe eval FOLDER --text TEXT --losing` measures what is lost with every stage."
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


def _object(file: Path) -> dict[str, Any]:
    """The JSON object in a file; empty if there is none that can be read."""
    try:
        found = read_json(file) if file.is_file() else {}
    except UserError:
        return {}
    return found if isinstance(found, dict) else {}


def _base_model(weights: str) -> str:
    """The name of the model that was trained further: on the hub, if it came from there, else that of its folder."""
    for part in Path(weights).parts:
        if part.startswith("models--"):  # of the hub's cache
            return part.removeprefix("models--").replace("--", "/", 1)
    return Path(weights).name


def _cell(value: Any) -> str:
    return str(value).replace("|", "\\|").replace("\n", " ")
