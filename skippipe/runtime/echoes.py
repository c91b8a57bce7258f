"""Messages that come again, under virtual time: as from the buffer of a connection that has been replaced since."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

from skippipe.costs import ns
from skippipe.runtime.faults import Fault

LATER_S = (0.0005, 0.02, 0.5, 4.0, 15.0)  # roughly: within an iteration, or many lives later


class Echoes:
    """What comes again, and when, follows from the fault alone."""

    def __init__(self) -> None:
        self._faults: list[tuple[Fault, Random]] = []

    def begin(self, fault: Fault) -> None:
        self._faults.append((fault, Random(str(fault))))

    def end(self, fault: Fault) -> None:
        self._faults = [each for each in self._faults if each[0] is not fault]

    def of(self, sender: int, receiver: int) -> Iterator[int]:
        """A message is sent: after how many nanoseconds it comes once more."""
        for fault, random in self._faults:
            if (sender in fault.nodes or receiver in fault.nodes) and random.random() < fault.share:
                yield ns(random.choice(LATER_S) * random.uniform(0.5, 1.5))
