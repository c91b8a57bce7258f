"""Collectives: how the nodes of a stage average their gradients.

COLLECTIVES is the registry: job file, planner, simulator and runtime read it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from skippipe.collectives.interface import Averager, Collective, GroupConfig, MakeAverager
from skippipe.collectives.peer_to_peer import Auto, Ring
from skippipe.collectives.torch_allreduce import TorchAllReduce
from skippipe.value_ranges import Choices

if TYPE_CHECKING:
    CollectiveId = str

__all__ = ["COLLECTIVES", "Averager", "Collective", "CollectiveId", "GroupConfig", "MakeAverager", "collective_named"]

COLLECTIVES: dict[str, Collective] = {collective.id: collective for collective in (Auto(), Ring(), TorchAllReduce())}

if not TYPE_CHECKING:
    CollectiveId = Literal[tuple(COLLECTIVES)]  # what a job file may say; a type checker takes any text


def collective_named(name: str) -> Collective:
    Choices(COLLECTIVES).check(name, "workload.collective")
    return COLLECTIVES[name]
