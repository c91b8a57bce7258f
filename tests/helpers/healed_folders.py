"""Folders with models that have bridges and adapters for missing stages."""

from __future__ import annotations

from pathlib import Path

import torch

from skippipe.checkpoint.bridges_file import write_bridges
from skippipe.optim.config import OptimConfig
from skippipe.skip_schedule import SkipSchedule
from skippipe.study.engine import Engine
from tests.helpers.model_folders import LAYERS, export_to

REPEATS = SkipSchedule("1/3", bridges=2, adapters=6, repeats=2)


def healed(folder: Path, recipe: SkipSchedule, family: str = "llama") -> Engine:
    """A folder with stand-ins that change a lot, and the engine with the same weights."""
    spec, stages = export_to(folder, family)
    engine = Engine(spec, LAYERS, OptimConfig(), recipe)
    chance = torch.Generator().manual_seed(3)
    for weights in [*engine.bridge_weights, *engine.adapter_weights]:
        weights.values.add_(0.3 * torch.randn(weights.values.shape, generator=chance))
    with torch.no_grad():
        for mine, theirs in zip(engine.stages, stages, strict=True):
            for (_, each), (_, other) in zip(mine.named_weights(), theirs.named_weights(), strict=True):
                each.copy_(other)
    write_bridges(folder, LAYERS, engine.bridges, engine.adapters, hop_rank=recipe.hop_rank)
    return engine
