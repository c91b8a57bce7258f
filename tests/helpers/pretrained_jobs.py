"""Jobs that begin with the weights of a Hugging Face folder, and what transformers makes of the same text."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from skippipe.data.tokenizer import train_bpe
from skippipe.runtime.coordinator.interfaces import Callback, IterationReport
from skippipe.training.backends import BACKENDS
from skippipe.training.build_run import RunSetup
from skippipe.training.job_config import JobConfig
from skippipe.training.job_tables import (
    BatchConfig,
    ComputeConfig,
    DataConfig,
    ModelConfig,
    PipelineConfig,
    TransportConfig,
)
from tests.helpers.models import tiny

TEXT = "It is a truth universally acknowledged, that a node in possession of a good stage must be in want of a lane. "
VOCABULARY = 300
ROOM = 7  # tokens of the model that its tokenizer does not have
NEAR = 1e-4


def folder_of(family: str, folder: Path, *, shard: str = "20KB", dtype: torch.dtype = torch.float32) -> Path:
    """A model of transformers with random weights, far from those that a run would begin with, and a tokenizer."""
    tokenizer = train_bpe([TEXT], VOCABULARY)
    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_config(tiny(family, vocab_size=tokenizer.size + ROOM))  # type: ignore[no-untyped-call]
    with torch.no_grad():
        for each in model.parameters():
            each.add_(0.1 * torch.randn_like(each))
    model.to(dtype).save_pretrained(folder, max_shard_size=shard)
    tokenizer.save(folder)
    return folder


def job_in(folder: Path, weights: Path | str, **others: Any) -> JobConfig:
    text = folder / "text.txt"
    text.write_text(" ".join(f"{number} {TEXT}" for number in range(100)))
    return replace(
        JobConfig(
            cluster="datacentre:4",
            output=str(folder / "run"),
            iterations=2,
            model=ModelConfig(weights=str(weights)),
            data=DataConfig([str(text)], folder=str(folder / "tokens")),
            batch=BatchConfig(sequence=16, samples=2, microbatches=4),
            pipeline=PipelineConfig(stages=3, skip="0", strategy="dtfm-skip", budget_s=0.1),
            transport=TransportConfig(wire="fp32"),
            compute=ComputeConfig(dtype="fp32"),
        ),
        **others,
    )


class Losses(Callback):
    def __init__(self) -> None:
        self.found: list[float] = []

    def iteration_done(self, report: IterationReport) -> None:
        self.found.append(report.loss)


def trained(run_setup: RunSetup, engine: str = "virtual") -> list[float]:
    """The losses of all iterations."""
    losses = Losses()
    BACKENDS[engine](run_setup.with_first_checkpoint(), losses, lambda: 0)
    return losses.found


def loss_of_transformers(folder: Path, run_setup: RunSetup) -> float:
    """Of the first iteration's microbatches."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    sampler, plan, losses = run_setup.node_config.sampler(), run_setup.plan, []
    for lane, each in enumerate(plan.lanes):
        for number in range(each.microbatches):
            inputs, labels = (torch.from_numpy(ids) for ids in sampler.batch(0, plan.microbatch(lane, number)))
            with torch.no_grad():
                logits = model(inputs).logits
            losses.append(torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()).item())
    return sum(losses) / len(losses)
