"""What a node sees of the world, and how far it is in an iteration."""

from __future__ import annotations

from enum import Enum
from typing import Any, Protocol

from skippipe.runtime.control import COORDINATOR, Control
from skippipe.transport.message import Message


class Outside(Protocol):
    """All that a node can do to the world."""

    def now_ns(self) -> int: ...

    def send(self, receiver: int, message: Message) -> None: ...

    def say(self, control: Control, to: int = COORDINATOR) -> None: ...

    def start(self, work: Any) -> None:
        """Have it run; `finished` follows. One work at a time."""

    def fits(self, message: Message, at: int, size: int) -> bool:
        """Is a tensor what it should be? (See `work.Computer`.)"""


class Phase(Enum):
    WAITING = "waiting for the coordinator to begin"
    RUNNING = "running tasks"
    SETTLING = "finishing what is left"
    SETTLED = "waiting for the coordinator to have gradients averaged"
    AVERAGING = "averaging gradients"
    AVERAGED = "waiting for the coordinator's step"
    STEPPING = "taking the optimizer step"


IN_ITERATION = (Phase.RUNNING, Phase.SETTLING, Phase.SETTLED, Phase.AVERAGING, Phase.AVERAGED)
