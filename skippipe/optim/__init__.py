"""Optimizers: one interface, those behind it, and the registry of those that `learning.optimizer` can name."""

from __future__ import annotations

from skippipe.optim.adamw8bit import AdamW8bit
from skippipe.optim.interface import Optimizer
from skippipe.optim.muon import Muon
from skippipe.optim.torch_optimizer import SGD, AdamW

OPTIMIZERS: dict[str, type[Optimizer]] = {
    "adamw": AdamW,
    "adamw8bit": AdamW8bit,
    "muon": Muon,
    "sgd": SGD,
}
DEFAULT = "adamw"
"""What a job, plan or checkpoint uses that names none, as those of earlier versions do."""
