"""Models on disk, as a run leaves them behind: an exported folder, a checkpoint; and parts of a model by themselves."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from skippipe.checkpoint.format import Checkpoints, Manifest, StageWriter
from skippipe.checkpoint.hf_export import ModelFolder
from skippipe.data.tokenizer import train_bpe
from skippipe.inference.cached_stage import logits
from skippipe.inference.checkpoint_loader import StagedModel, load_replicas
from skippipe.inference.eval.perplexity import Windows
from skippipe.inference.likelihood import SubsetModel
from skippipe.model.flat_params import layout_of_stage
from skippipe.model.model_spec import ModelSpec
from skippipe.model.stage import StageModel, layer_ranges
from skippipe.stage_subset import StageSubset
from tests.helpers.models import tiny

LAYERS = (2, 1, 2)
TOKENIZER = train_bpe(['some words, and some more words.\n\n"Of what?" said Emma.'] * 20, 300)


def made(family: str = "llama", **others: Any) -> tuple[ModelSpec, list[StageModel]]:
    """A model with weights so large that its parts differ a lot."""
    spec = ModelSpec(tiny(family, vocab_size=TOKENIZER.size, initializer_range=0.2, **others), seed=5)
    ranges = layer_ranges(LAYERS)
    return spec, [StageModel(spec, each, ends=index == 0) for index, each in enumerate(ranges)]


def flat(spec: ModelSpec, stages: list[StageModel], number: int) -> torch.Tensor:
    weights = dict(stages[number].named_weights())
    return torch.cat([weights[place.name].detach().flatten() for place in layout_of_stage(spec, LAYERS, number)])


def export_to(folder: Path, family: str = "llama", **others: Any) -> tuple[ModelSpec, list[StageModel]]:
    spec, stages = made(family, **others)
    model = ModelFolder(folder, LAYERS, spec, TOKENIZER)
    for number in range(len(LAYERS)):
        model.store_flat(number, flat(spec, stages, number))
    return spec, stages


def checkpoint_in(run: Path) -> list[StageModel]:
    """As a run leaves it behind."""
    spec, stages = made()
    checkpoints = Checkpoints(run / "checkpoints")
    place = checkpoints.begin()
    TOKENIZER.save(place)
    files = []
    for number in range(len(LAYERS)):
        writer = StageWriter(place, number, layout_of_stage(spec, LAYERS, number))
        weights = flat(spec, stages, number)
        writer.write(torch.cat([weights, torch.zeros(2 * len(weights))]).numpy().tobytes())
        files += writer.finish()
    checkpoints.commit(place, Manifest(7, LAYERS, (7, 7, 7), 5, "0" * 64, spec.config.to_dict(), tuple(files)))
    return stages


def subset(*stages: int, residual_scale: float = 1.0, total: int = 5) -> StageSubset:
    return StageSubset(stages, total, residual_scale)


def by_itself(staged: StagedModel, wanted: StageSubset, windows: Windows) -> float:
    """As the scoring of parts has it."""
    model = SubsetModel(staged, wanted)
    rows = windows.rows(windows.numbers)
    values = logits(staged.stages[0], model.hidden(rows[:, :-1]))
    return float(functional.cross_entropy(values.flatten(0, 1), rows[:, 1:].flatten()))


def plainly(logits: torch.Tensor, tokens: Sequence[int]) -> tuple[float, bool]:
    """How likely the tokens are, one for each row of logits."""
    chances, wanted = logits[-len(tokens) :].log_softmax(-1), torch.tensor(tokens)
    return float(chances.gather(-1, wanted[:, None]).sum()), bool((chances.argmax(-1) == wanted).all())


def replicas_that_begin_together(folder: Path, cut: str | None, monkeypatch: pytest.MonkeyPatch) -> list[StagedModel]:
    """A model on three workers, none of which goes on before all have begun."""
    found = load_replicas(folder, cut, "cpu:3")
    begun: set[int] = set()
    all_begun = threading.Barrier(len(found), timeout=60)
    embed = StageModel.embed

    def embed_together(ends: StageModel, tokens: Tensor) -> Tensor:
        if len(begun) < len(found) and id(ends) not in begun and threading.current_thread().name.startswith("eval"):
            begun.add(id(ends))
            all_begun.wait()
        return embed(ends, tokens)

    monkeypatch.setattr(StageModel, "embed", embed_together)
    return found
