"""Optimizers: one interface, one file for each, and the registry of those that `learning.optimizer` can name."""

from __future__ import annotations

from skippipe.optim.adamw import AdamW
from skippipe.optim.adamw8bit import AdamW8bit
from skippipe.optim.interface import Optimizer
from skippipe.optim.muon import Muon
from skippipe.optim.sgd import SGD

OPTIMIZERS: dict[str, type[Optimizer]] = {
    "adamw": AdamW,
    "adamw8bit": AdamW8bit,
    "muon": Muon,
    "sgd": SGD,
}
DEFAULT = "adamw"
"""What a job, plan or checkpoint uses that names none, as those of earlier versions do."""
